"""Sink for TensorBoard: event files in a folder, written with PyTorch's writer."""

from __future__ import annotations

from pathlib import Path

from onelaunch.workbench.sinks.record import Record

FOLDER = "runs"
"""Default folder, as in PyTorch."""


class TensorBoardSink:
    """Folder with event files, one subfolder for each run: FOLDER/STUDY/RUN. Show it with ``tensorboard --logdir FOLDER``.

    Args:
        where: The folder; :data:`FOLDER` of the working directory if empty.
    """

    title = "TensorBoard"

    def __init__(self, where: str = "") -> None:
        self.folder = Path(where or FOLDER)

    def send(self, record: Record) -> str:
        from torch.utils.tensorboard import SummaryWriter  # takes two seconds

        # Colons are not allowed in names on some file systems.
        folder = self.folder / record.study / record.run.replace(":", "-").replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        with SummaryWriter(str(folder)) as writer:
            for name, value in record.numbers.items():
                writer.add_scalar(name, value, 0)
            for name, values in record.series.items():
                for step, value in enumerate(values):
                    writer.add_scalar(name, value, step)
            facts = "\n".join(f"| {name} | {value} |" for name, value in record.facts.items())
            writer.add_text("facts", f"| fact | value |\n|---|---|\n{facts}")
            writer.add_text("report", record.report)
        return str(folder)
