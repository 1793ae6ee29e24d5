"""Every error that a user can meet, each a class whose message says what to do.

All derive from :class:`OneLaunchError`, and from the built-in error that callers of such a function would expect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


class OneLaunchError(Exception):
    """Base of every error raised on purpose by onelaunch."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` when a known name is close to ``name``, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def listing(names: Iterable[str]) -> str:
    """Names in a readable row, or ``none``."""
    return ", ".join(names) or "none"


def in_a_line(problem: Exception) -> str:
    """What somebody else's error says, for a message of ours: without line breaks and a last full stop, and not at any length."""
    return " ".join(str(problem).split())[:300].removesuffix(".") or type(problem).__name__


# Arguments of an operation


class ArgumentError(OneLaunchError, ValueError):
    """An argument of an operation is wrong."""


class ShapeError(ArgumentError):
    """A tensor has a shape that the contract does not allow."""

    def __init__(self, argument: str, *, got: Sequence[int], want: str) -> None:
        super().__init__(f"{argument} has shape {tuple(got)}; it must be {want}.")
        self.argument = argument


class DTypeError(ArgumentError, TypeError):
    """A tensor has a dtype that the contract does not allow."""

    def __init__(self, argument: str, *, got: object, want: str) -> None:
        super().__init__(f"{argument} is {got}; it must be {want}.")
        self.argument = argument


class DeviceError(ArgumentError):
    """Tensors of one call lie on different devices."""

    def __init__(self, argument: str, *, got: object, want: object) -> None:
        super().__init__(f"{argument} is on {got}; it must be on {want}, like the first argument.")
        self.argument = argument


class ValueRangeError(ArgumentError):
    """A tensor holds values that the contract does not allow."""

    def __init__(self, argument: str, *, got: str, want: str) -> None:
        super().__init__(f"{argument} {got}; {want}.")
        self.argument = argument


class CostError(ArgumentError):
    """A field of an operation's cost holds a value that no work can have."""

    def __init__(self, field: str, *, got: object, want: str) -> None:
        super().__init__(f"{field} of the cost is {got!r}; it must be {want}. Look at the operation's cost function.")
        self.field = field


class PackingError(ArgumentError):
    """``cu_seqlens`` does not describe packed sequences."""

    def __init__(self, problem: str, *, want: str) -> None:
        super().__init__(f"cu_seqlens {problem}; it must {want}.")
        self.argument = "cu_seqlens"


# Names


class UnknownNameError(OneLaunchError, LookupError):
    """A name that nothing is registered under."""

    kind = "name"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(f"There is no {self.kind} {name!r}.{did_you_mean(name, known)} Known: {listing(known)}.")
        self.name = name


class UnknownOperation(UnknownNameError):
    """No operation of that name."""

    kind = "operation"


class UnknownVariant(UnknownNameError, ValueError):
    """The operation has no variant of that name."""

    kind = "variant"


class UnknownStudy(UnknownNameError):
    """No study of that name, and no file at that path."""

    kind = "study"


class UnknownShape(UnknownNameError):
    """The study has no shape of that name, at this scale."""

    kind = "shape"


class VariantUnsupported(OneLaunchError, RuntimeError):
    """The named variant cannot run this call."""

    def __init__(self, operation: str, variant: str, *, reason: str, instead: Iterable[str]) -> None:
        super().__init__(f"Variant {variant!r} of {operation} cannot run this call: it {reason}. These can: {listing(instead)}.")
        self.reason = reason


class CheckpointError(OneLaunchError, ValueError):
    """A checkpoint does not hold what is wanted from it."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"Checkpoint: {problem}.")


# Models


class ModelConfigError(OneLaunchError, ValueError):
    """A field of a model's configuration is missing or wrong."""

    def __init__(self, field: str, *, got: object, want: str) -> None:
        said = repr(got) if isinstance(got, str) and got != "missing" else got
        super().__init__(f"{field} of the model's configuration is {said}; it must be {want}.")
        self.field = field


class UnsupportedModel(OneLaunchError, ValueError):
    """A model of an architecture, or with a feature, that is not supported."""

    def __init__(self, what: str, *, supported: Iterable[str]) -> None:
        super().__init__(f"The model has {what}, which is not supported. Supported: {listing(supported)}.")


class PlanError(OneLaunchError, ValueError):
    """A plan of a token is not ordered, or cannot run here."""

    def __init__(self, plan: str, problem: str) -> None:
        super().__init__(f"Plan {plan!r}: {problem}.")
        self.problem = problem


class DecodeStalled(OneLaunchError, RuntimeError):
    """A kernel's CTAs waited for each other longer than they may."""

    def __init__(self, variant: str) -> None:
        super().__init__(
            f"A launch of {variant!r} waited for seconds and gave up; what it made is lost. Another process may hold a part of "
            "the GPU. Try again, or take the variant 'captured', which waits for nothing."
        )


class DecodeOverflow(OneLaunchError, ArithmeticError):
    """What a layer adds to the residual stream is no number, or beyond what the kernel's words hold."""

    def __init__(self, variant: str) -> None:
        super().__init__(
            f"A layer of the model added to the residual stream what is no number, or millions; {variant!r} adds in integers of "
            "2^-28 and holds up to 67108864. Look at the weights, or take the variant 'captured', which adds in float32."
        )


class LogitsNotFinite(OneLaunchError, ArithmeticError):
    """What tokens are chosen from are no numbers."""

    def __init__(self) -> None:
        super().__init__(
            "Logits of the model are infinite, or no numbers. Look at its weights, or take a dtype that holds more: float32."
        )


class ContextExceeded(OneLaunchError, ValueError):
    """A text would be longer than the model's context."""

    def __init__(self, positions: int, *, context: int, said: str = "The text") -> None:
        super().__init__(f"{said} takes {positions} positions; the model's context has {context}.")
        self.positions, self.context = positions, context


class FallbackNotice(OneLaunchError, UserWarning):
    """What would be fastest cannot run here, and something slower does."""


class CacheNotice(OneLaunchError, UserWarning):
    """The folder of files that can be made again cannot be used as it is."""


class TableNotice(OneLaunchError, UserWarning):
    """A table of measured times, or a part of it, cannot be believed and is left out."""

    def __init__(self, path: Path | str | None, problem: str, *, part: str = "it is") -> None:
        super().__init__(
            f"Table of measured times {path}: {problem}, so {part} left out. Delete the file, or write it again with "
            "onelaunch study adopt."
        )
        self.path = path


class TokenizerMissing(OneLaunchError, ImportError):
    """Text was given or asked for, and what makes tokens of it is not here."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. Do: pip install 'onelaunch[decode]', or pass token ids and ask for none but them.")


class DeviceMemoryError(OneLaunchError, RuntimeError):
    """A device has too little free memory for what was to be kept there."""

    def __init__(self, what: str, *, device: object, need: int | None = None, free: int | None = None) -> None:
        numbers = "" if need is None or free is None else f" It takes {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free."
        super().__init__(f"There is no room on {device} for {what}.{numbers} Free memory there, or use another device.")
        self.need, self.free = need, free


# Devices and tools


class NoDeviceError(OneLaunchError, RuntimeError):
    """A device was asked for that is not here."""

    def __init__(self, device: str, *, present: Iterable[str]) -> None:
        super().__init__(f"There is no device {device!r} here. Present: {listing(present)}. Leave --device out to use it.")


class InspectionError(OneLaunchError, RuntimeError):
    """A kernel cannot be compiled or taken apart for the architecture."""


class CompilerMissing(OneLaunchError, ImportError):
    """The packages that compile CUDA C++ are not installed, or do not find their library."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"CUDA C++ cannot be compiled here: {problem}. Do: pip install 'onelaunch[cuda]'.")


class CompileError(OneLaunchError, RuntimeError):
    """NVRTC refused a source."""

    def __init__(self, name: str, architecture: str, *, log: str) -> None:
        super().__init__(f"{name} does not compile for {architecture}:\n{log}")
        self.log = log


class DriverError(OneLaunchError, RuntimeError):
    """The CUDA driver refused a call."""

    def __init__(self, call: str, *, got: str, about: str) -> None:
        super().__init__(f"{call} returned {got} for {about}.")


# Studies and results


class StudyError(OneLaunchError, ValueError):
    """A study file is wrong."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class ResultExists(OneLaunchError, FileExistsError):
    """A result would overwrite another."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(f"{path} exists already; results are never overwritten silently. Choose another --out or add --force.")


class ResultCorrupt(OneLaunchError, ValueError):
    """A results file cannot be read."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path} is not a result of onelaunch: {problem}. Run the study again, or restore the file.")


class TableCorrupt(OneLaunchError, ValueError):
    """A table of measured times cannot be merged into, since it is none."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path} is no table of measured times: {problem}. Delete it, or name another folder with --into.")


class TableFolderError(ArgumentError):
    """A table of measured times would be written where it does not belong."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path} {problem}. Leave --into out for the user's own folder, or name a folder of yours.")


class ResultMismatch(OneLaunchError, ValueError):
    """Results that do not belong together, or hold nothing of what is wanted from them."""
