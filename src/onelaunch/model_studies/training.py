"""Training run of a variant, which can be stopped after any step and continued in another process.

Batches depend on the seed and the step alone, and the learning rate on the step alone. On a CPU a run that was stopped and
continued gives the same bits as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onelaunch.model_studies.build import ROUNDINGS, Trainer, example
from onelaunch.model_studies.declare import LanguageModel
from onelaunch.model_studies.result import Missing, Training
from onelaunch.model_studies.tasks import absent, failure
from onelaunch.workbench.result.provenance import commit
from onelaunch.workbench.result.sources import package_digest

WARM_UP = 20
"""Steps in which the learning rate grows to its value."""

READ_EVERY = 10
"""Steps between two reads of the losses. A read waits for the device. Then the run may stop."""

SAVE_SECONDS = 60.0
"""Seconds between two checkpoints."""


def training(
    model: LanguageModel,
    variant: str,
    seed: int,
    device: torch.device,
    checkpoint: Path,
    stop: Callable[[], bool],
    *,
    control: bool = False,
    index: int = 0,
) -> Training:
    """Train a variant, from its checkpoint if there is one.

    Args:
        model: Declaration of the model, with the number of steps.
        variant: Name of the variant.
        seed: Seed of the weights and of the batches.
        device: Device of the run.
        checkpoint: File to continue from and to save to. It is removed at the end of the run.
        stop: Function that says whether the run must save and stop. It is asked every few steps.
        control: Whether each initial weight is changed by one rounding of the model's precision
            (:data:`~onelaunch.model_studies.build.ROUNDINGS`).
        index: Index of the control, which seeds the signs of the roundings.

    Returns:
        The finished run. One that was stopped has the status ``interrupted``.
    """
    perturbation = ROUNDINGS[model.precision] if control else 0.0
    known: dict[str, Any] = {"model": model.name, "variant": variant, "seed": seed, "control": control, "index": index}
    found = Training(**known, perturbation=perturbation)
    if (why_absent := absent(model, variant, device)) is not None:
        return found.model_copy(update={"missing": why_absent})
    try:
        run = _Run(model, variant, seed, device, checkpoint, perturbation, index)
        finished = run.train(stop)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the variant's status
        return found.model_copy(update={"missing": failure(error)})
    found = found.model_copy(update={"seconds": run.seconds, "text": run.text.digest})
    if not finished:
        why = f"stopped after {len(run.losses)} of {model.steps} steps"
        return found.model_copy(update={"missing": Missing(status="interrupted", reason=why)})
    checkpoint.unlink(missing_ok=True)
    losses = torch.tensor(run.losses)
    if not bool(losses.isfinite().all()):
        step = int((~losses.isfinite()).nonzero()[0])
        return found.model_copy(update={"missing": Missing(status="incorrect", reason=f"the loss of step {step} is not finite")})
    return found.model_copy(update={"losses": tuple(round(loss, 6) for loss in run.losses)})


def _code() -> str:
    """Return what identifies the code of this process: the commit, and a digest of the files where it does not determine them."""
    found = commit()
    return found if found and not found.endswith("-dirty") else f"{found} {package_digest()}"


class _Run:
    """State of a training run."""

    def __init__(
        self,
        model: LanguageModel,
        variant: str,
        seed: int,
        device: torch.device,
        checkpoint: Path,
        perturbation: float,
        index: int,
    ) -> None:
        self.model, self.seed, self.checkpoint = model, seed, checkpoint
        self.trainer = Trainer(model, variant, device, seed, perturbation, index)
        self.text = example().Text(model.vocabulary, device)
        self.settings = {
            "model": model.as_measured().model_dump_json(),
            "variant": variant,
            "seed": seed,
            "text": self.text.digest,
            "perturbation": perturbation,
            "index": index,
            "code": _code(),
        }
        self.losses: list[float] = []
        self.seconds = 0.0
        if checkpoint.is_file():
            self._load()

    def train(self, stop: Callable[[], bool]) -> bool:
        """Train until the last step, and return whether it was reached. A run that must stop saves first."""
        saved = since = time.monotonic()
        while (begin := len(self.losses)) < self.model.steps:
            steps = range(begin, min(begin + READ_EVERY, self.model.steps))
            self.losses += torch.stack([self._step(step) for step in steps]).tolist()  # waits for the device
            now = time.monotonic()
            self.seconds, since = self.seconds + now - since, now
            left, stopped = len(self.losses) < self.model.steps, stop()
            if left and (stopped or now - saved > SAVE_SECONDS):
                self._save()
                saved = since = time.monotonic()
            if left and stopped:
                return False
        return True

    def _step(self, step: int) -> torch.Tensor:
        """Train one step, and return its loss without waiting for the device."""
        trainer = self.trainer
        for group in trainer.optimizer.param_groups:
            group["lr"] = self.model.rate * min(1.0, (step + 1) / WARM_UP)
        rows = example().batch_of(self.text.train, self.model.batch, self.model.length, self.seed, step)
        loss = trainer.loss(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(trainer.module.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        return loss.detach().float()

    def _save(self) -> None:
        """Write the checkpoint; it replaces the last one when it is complete."""
        state = {"settings": self.settings, "losses": self.losses, "seconds": self.seconds}
        state |= {"weights": self.trainer.module.state_dict(), "optimizer": self.trainer.optimizer.state_dict()}
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".tmp")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def _load(self) -> None:
        """Continue from the checkpoint, unless it is of another model, seed, text or commit."""
        state = torch.load(self.checkpoint, map_location=self.trainer.device, weights_only=True)
        if state["settings"] != self.settings:
            return
        self.trainer.module.load_state_dict(state["weights"])
        self.trainer.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds = state["losses"], state["seconds"]
