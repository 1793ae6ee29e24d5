"""Every error that a user can meet, each a class whose message says what to do.

All derive from :class:`OneLaunchError`, and from the built-in error that callers of such a function would expect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from onelaunch.wording import UNSAFE, did_you_mean, escaped, in_a_line, listing, shown  # noqa: F401 - plug-ins import them from here


class OneLaunchError(Exception):
    """Base of every error raised on purpose by onelaunch."""

    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error: 2 for a wrong name or argument, 1 for what failed while working."""


class AdvisedError(OneLaunchError):
    """Base of errors whose advice names arguments. The command line names its own options in their place.

    Attributes:
        problem: what is wrong, as a sentence.
        advice: what to do, as a sentence with arguments in braces, such as ``Pass {force} to replace it.``
    """

    ARGUMENTS: ClassVar[Mapping[str, str]] = {"force": "force=True", "resume": "resume=True"}
    """Arguments that are spelled with a value; all others by their name."""

    def __init__(self, problem: str, *, advice: str) -> None:
        self.problem, self.advice = problem, advice
        super().__init__(self.told(self.ARGUMENTS))

    def told(self, spelling: Mapping[str, str]) -> str:
        """Return problem and advice, with the arguments spelled as the mapping says."""
        advice = re.sub(r"\{(\w+)\}", lambda found: spelling.get(found[1], found[1]), self.advice)
        return f"{self.problem} {advice}".strip()


# Arguments of an operation


class ArgumentError(OneLaunchError, ValueError):
    """An argument of an operation is wrong."""

    exit_code = 2


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


class UnknownKeyword(ArgumentError, TypeError):
    """A keyword argument that the function does not take."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(f"There is no argument {shown(name)}.{did_you_mean(name, known)} Known: {listing(known)}.")
        self.argument = name


class PackingError(ArgumentError):
    """``cu_seqlens`` does not describe packed sequences."""

    def __init__(self, problem: str, *, want: str) -> None:
        super().__init__(f"cu_seqlens {problem}; it must {want}.")
        self.argument = "cu_seqlens"


# Names


class UnknownNameError(OneLaunchError, LookupError):
    """A name that nothing is registered under."""

    exit_code = 2
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


class StudyFileMissing(UnknownStudy):
    """There is no study file at the path that was given."""

    def __init__(self, path: Path | str, known: Iterable[str]) -> None:
        known = sorted(known)
        meant = did_you_mean(Path(path).stem, known)
        OneLaunchError.__init__(
            self, f"There is no file {shown(str(path))}.{meant} Check the path, or give a study's name. Known: {listing(known)}."
        )
        self.name = str(path)


class UnknownShape(UnknownNameError):
    """The study has no shape of that name, at this scale."""

    kind = "shape"


class VariantUnsupported(OneLaunchError, RuntimeError):
    """The named variant cannot run this call."""

    def __init__(self, operation: str, variant: str, *, reason: str, instead: Iterable[str]) -> None:
        super().__init__(f"Variant {variant!r} of {operation} cannot run this call: it {reason}. These can: {listing(instead)}.")
        self.reason = reason


class VariantResultError(OneLaunchError, TypeError):
    """A variant returned something else than the results of its operation."""

    def __init__(self, operation: str, variant: str, *, problem: str) -> None:
        super().__init__(f"Variant {variant!r} of {operation} {problem}.")
        self.operation, self.variant = operation, variant


class TransformUnsupported(OneLaunchError, RuntimeError):
    """A kernel was called inside a transform of ``torch.func``, for which it has no rule."""

    def __init__(self, kernel: str) -> None:
        super().__init__(
            f"The kernel {kernel!r} has no rule for transforms of torch.func (vmap, grad, jvp...). Name a variant that is made "
            "of PyTorch's operations, such as variant='eager' or 'chunked', or batch the call along B."
        )


class PluginWarning(OneLaunchError, UserWarning):
    """A plug-in of another package cannot be loaded; everything else works without it."""

    def __init__(self, name: str, module: str, distribution: str, *, problem: str) -> None:
        super().__init__(
            f"The plug-in {name!r} ({module}, of {distribution}) is left out, since importing it raised {problem}. "
            "Repair or uninstall that package; what it registers is missing until then."
        )
        self.name, self.module, self.distribution, self.problem = name, module, distribution, problem


class CheckpointError(OneLaunchError, ValueError):
    """A checkpoint does not hold what is wanted from it."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"Checkpoint: {problem}.")


class UnknownModel(UnknownNameError, CheckpointError):
    """A model's name that is neither a folder, nor a name on the hub, nor the bundled model's."""

    kind = "model"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        OneLaunchError.__init__(
            self,
            f"There is no model {shown(name)}, and no folder of that name.{did_you_mean(name, known)} Give a folder that holds "
            "config.json, model.safetensors and tokenizer.json, a name on the hub such as Qwen/Qwen3-0.6B, or a bundled model, "
            f"which needs no network: {listing(known)}.",
        )
        self.name = name


# Models


class ModelConfigError(OneLaunchError, ValueError):
    """A field of a model's configuration is missing or wrong."""

    def __init__(self, field: str, *, got: object, want: str) -> None:
        said = "missing" if got == "missing" else shown(got)
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


class BusyDeviceNotice(OneLaunchError, UserWarning):
    """Peaks of a device were measured while other work held it, so they may be too low."""

    def __init__(self, device: str, *, apart: float) -> None:
        super().__init__(
            f"{device} was busy while its peaks were measured: the fastest samples differ by more than {apart:.0%}. The peaks "
            "may be too low, and are measured again the next time. Measure them on an idle machine: onelaunch doctor --refresh."
        )
        self.device = device


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

    exit_code = 2

    def __init__(self, device: str, *, present: Iterable[str]) -> None:
        super().__init__(f"There is no device {device!r} here. Present: {listing(present)}. Name one of these, or 'auto'.")


class InspectionError(OneLaunchError, RuntimeError):
    """A kernel cannot be compiled or taken apart for the architecture."""


class UnknownArchitecture(UnknownNameError, InspectionError):
    """No architecture of that name that kernels can be compiled for."""

    kind = "architecture"


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


class StudyError(AdvisedError, ValueError):
    """A study file is wrong."""

    def __init__(self, path: Path | str, problem: str, *, advice: str = "") -> None:
        super().__init__(escaped(f"{path}: {problem}"), advice=advice)


class FolderNotice(OneLaunchError, UserWarning):
    """A folder that was named for files to be found in is not there, or is no folder."""


class ExtraMissing(OneLaunchError, ImportError):
    """A package of an optional part of onelaunch is not installed."""

    def __init__(self, part: str, *, package: str, extra: str) -> None:
        super().__init__(f'{part} needs {package}. Install the extra {extra}: pip install "onelaunch[{extra}]"')
        self.package, self.extra = package, extra


class ResultExists(AdvisedError, FileExistsError):
    """A result would overwrite another.

    Args:
        path: the file that is there already.
        argument: the argument that chose it.
        resumable: whether it is what an interrupted run left, which can be continued.
    """

    def __init__(self, path: Path | str, *, argument: str = "path", resumable: bool = False) -> None:
        problem = f"{path} exists already; results are never overwritten silently."
        advice = f"Choose another {{{argument}}}, or pass {{force}} to replace it."
        if resumable:
            problem = f"{path} exists already: an interrupted run left it."
            advice = f"Pass {{resume}} to continue that run, {{force}} to begin again, or choose another {{{argument}}}."
        super().__init__(problem, advice=advice)
        self.path, self.resumable = Path(path), resumable


class ResultMissing(OneLaunchError, FileNotFoundError):
    """There is no file where a result was to be read."""

    exit_code = 2

    def __init__(self, path: Path | str) -> None:
        super().__init__(f"There is no file {path}. Results lie where a run said, such as results/DEVICE/STUDY.json.")


class ResultCorrupt(OneLaunchError, ValueError):
    """A results file cannot be read."""

    def __init__(self, path: Path | str, problem: str, *, remedy: str = "Run the study again, or restore the file.") -> None:
        super().__init__(escaped(f"{path} is not a result of onelaunch: {problem}. {remedy}"))


class ResultTooNew(ResultCorrupt):
    """A result was written by a newer onelaunch, in a schema that this one does not know."""

    def __init__(self, path: Path | str, *, schema: int, newest: int) -> None:
        OneLaunchError.__init__(
            self, f"{path} was written by a newer onelaunch (schema {schema}; this one reads up to {newest}). Update onelaunch."
        )
        self.schema, self.newest = schema, newest


class OutputUnwritable(OneLaunchError, OSError):
    """A file or folder cannot be written at the place that was asked for."""

    def __init__(self, path: Path | str, problem: str, *, remedy: str = "Choose another place for it.") -> None:
        super().__init__(escaped(f"{path} cannot be written: {problem}. {remedy}"))
        self.path, self.reason = Path(path), problem


class TableCorrupt(OneLaunchError, ValueError):
    """A table of measured times cannot be merged into, since it is none."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path} is no table of measured times: {problem}. Delete it, or name another folder with --into.")


class TableFolderError(ArgumentError):
    """A table of measured times would be written where it does not belong."""

    def __init__(self, path: Path | str, problem: str, *, remedy: str) -> None:
        super().__init__(escaped(f"{path} {problem}. {remedy}"))


class ResultMismatch(AdvisedError, ValueError):
    """Results that do not belong together, or hold nothing of what is wanted from them."""

    def __init__(self, problem: str, *, advice: str = "") -> None:
        super().__init__(problem, advice=advice)
