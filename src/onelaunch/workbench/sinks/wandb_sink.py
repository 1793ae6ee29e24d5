"""Sink for Weights & Biases, on its server or offline."""

from __future__ import annotations

import shutil
from pathlib import Path

from onelaunch.errors import ArgumentError
from onelaunch.wording import shown
from onelaunch.workbench.sinks.record import Record

PROJECT = "onelaunch"
"""Default project."""

OFFLINE = "offline"
"""Place that stands for a folder on this machine."""

_SECONDS = 30.0
"""Most seconds to wait for the server, at the beginning and at the end."""


class WandbSink:
    """Project of Weights & Biases, or a folder for later.

    Args:
        where: ``PROJECT`` or ``ENTITY/PROJECT``, :data:`PROJECT` of the user's default entity if empty; or ``offline`` or
            ``offline:FOLDER``, where ``wandb sync`` finds the run later. wandb's environment variables, such as ``WANDB_MODE``
            and ``WANDB_API_KEY``, apply.

    Raises:
        ArgumentError: The place has more than one slash, or an empty part.
    """

    title = "Weights & Biases"

    def __init__(self, where: str = "") -> None:
        kind, _, folder = where.partition(":")
        self.offline = kind == OFFLINE
        self.folder = Path(folder or ".") if self.offline else None
        entity, slash, project = ("", "", PROJECT) if self.offline or not where else where.rpartition("/")
        if (slash and not entity) or not project or "/" in entity or (":" in where and not self.offline):
            raise ArgumentError(
                f"The place of the sink wandb is {shown(where)}; it must be PROJECT, ENTITY/PROJECT or offline[:FOLDER]."
            )
        self.entity, self.project = entity or None, project

    def send(self, record: Record) -> str:
        import wandb  # takes two seconds

        wanted = {
            "silent": True,
            "console": "off",
            "x_disable_stats": True,
            "init_timeout": _SECONDS,
            "login_timeout": _SECONDS,
            "finish_timeout": _SECONDS,
        }
        known = wandb.Settings.model_fields  # older versions do not know all of them
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            dir=None if self.folder is None else str(self.folder),
            mode="offline" if self.offline else None,
            name=record.run,
            group=record.study,
            job_type="study",
            notes=record.question,
            tags=[tag[:64] for tag in (*record.tags, record.study)],  # its limit of characters
            config=record.facts,
            settings=wandb.Settings(**{key: value for key, value in wanted.items() if key in known}),
        )
        try:
            for step in range(max(map(len, record.series.values()), default=0)):
                run.log({name: values[step] for name, values in record.series.items() if step < len(values)}, step=step)
            run.summary.update(record.numbers)
            for file in record.files:  # copied, since wandb would only link to files elsewhere
                copy = shutil.copy(file, run.dir)
                run.save(copy, base_path=run.dir, policy="now")
            # Without a server a run has no address, and asking for one prints a warning.
            place = str(run.settings.sync_dir) if run.settings.mode == "offline" else str(run.url)
        except BaseException:
            run.finish(exit_code=1)
            raise
        run.finish()
        return place
