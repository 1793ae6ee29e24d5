"""Errors and warnings that every part of onelaunch raises. Each message says what is wrong and, if possible, what to do about it.

All derive from :class:`OneLaunchError`, most also from a fitting built-in class. Attributes such as ``argument`` are for callers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from onelaunch.wording import UNSAFE, did_you_mean, escaped, in_a_line, listing, shown  # noqa: F401 - plug-ins import them from here


class OneLaunchError(Exception):
    """Base class of all errors in this file. Wrong registrations and misuse of inner functions raise Python's own errors."""

    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error: 2 for a wrong name or argument, 1 for a failure during the work."""


class AdvisedError(OneLaunchError):
    """Base class of errors whose advice names arguments. The command line replaces these by its own options.

    Attributes:
        problem: Sentence that says what is wrong.
        advice: Sentence that says what to do, with arguments in braces, such as ``Pass {force} to replace it.``
    """

    ARGUMENTS: ClassVar[Mapping[str, str]] = {name: f"{name}=True" for name in ("force", "resume", "across_commits")}
    """Spelling of those arguments that are shown with a value. All others are shown by their name."""

    def __init__(self, problem: str, *, advice: str = "") -> None:
        self.problem, self.advice = problem, advice
        super().__init__(self.told(self.ARGUMENTS))

    def told(self, spelling: Mapping[str, str]) -> str:
        """Return problem and advice, with each argument replaced by its spelling in the mapping."""
        advice = re.sub(r"\{(\w+)\}", lambda found: spelling.get(found[1], found[1]), self.advice)
        return f"{self.problem} {advice}".strip()


# Arguments of an operation, and unknown names


class ArgumentError(OneLaunchError, ValueError):
    """Error for a wrong argument of an operation, a layer or another public function. Base class of the more specific ones."""

    exit_code = 2


class ShapeError(ArgumentError):
    """Error for a tensor whose shape the contract does not allow."""

    def __init__(self, argument: str, *, got: Sequence[int], want: str) -> None:
        super().__init__(f"{argument} has shape {tuple(got)}; it must be {want}.")
        self.argument = argument


class DTypeError(ArgumentError, TypeError):
    """Error for a tensor whose dtype the contract does not allow."""

    def __init__(self, argument: str, *, got: object, want: str) -> None:
        super().__init__(f"{argument} is {got}; it must be {want}.")
        self.argument = argument


class DeviceError(ArgumentError):
    """Error for a call whose tensors are on different devices."""

    def __init__(self, argument: str, *, got: object, want: object) -> None:
        super().__init__(f"{argument} is on {got}; it must be on {want}, like the first argument.")
        self.argument = argument


class ValueRangeError(ArgumentError):
    """Error for an argument whose value, or one of whose elements, is not allowed."""

    def __init__(self, argument: str, *, got: str, want: str) -> None:
        super().__init__(f"{argument} {got}; {want}.")
        self.argument = argument


class CostError(ArgumentError):
    """Error for an impossible value in a field of an operation's cost."""

    def __init__(self, field: str, *, got: object, want: str) -> None:
        super().__init__(f"{field} of the cost is {got!r}; it must be {want}. Look at the operation's cost function.")
        self.field = field


class UnknownKeyword(ArgumentError, TypeError):
    """Error for a keyword argument that the function does not have."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(f"There is no argument {shown(name)}.{did_you_mean(name, known)} Known: {listing(known)}.")
        self.argument = name


class PackingError(ArgumentError):
    """Error for ``cu_seqlens`` that does not describe packed sequences."""

    def __init__(self, problem: str, *, want: str) -> None:
        super().__init__(f"cu_seqlens {problem}; it must {want}.")
        self.argument = "cu_seqlens"


class UnknownNameError(OneLaunchError, LookupError):
    """Error for an unknown name. The message suggests a similar known one."""

    exit_code = 2
    kind = "name"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(f"There is no {self.kind} {name!r}.{did_you_mean(name, known)} Known: {listing(known)}.")
        self.name = name


class UnknownOperation(UnknownNameError):
    """Error for a name that no operation has."""

    kind = "operation"


class UnknownVariant(UnknownNameError, ValueError):
    """Error for a name that no variant of the operation has."""

    kind = "variant"


class UnknownStudy(UnknownNameError):
    """Error for a study that is neither a known name nor the path of a file."""

    kind = "study"


class StudyFileMissing(UnknownStudy):
    """Error for the path of a study file that does not exist."""

    def __init__(self, path: Path | str, known: Iterable[str]) -> None:
        known = sorted(known)
        meant = did_you_mean(Path(path).stem, known)
        OneLaunchError.__init__(
            self, f"There is no file {shown(str(path))}.{meant} Check the path, or give a study's name. Known: {listing(known)}."
        )
        self.name = str(path)


class UnknownShape(UnknownNameError):
    """Error for a name that no shape of the study has at this scale."""

    kind = "shape"


# Variants and plug-ins


class VariantUnsupported(OneLaunchError, RuntimeError):
    """Error for a call that the named variant cannot run. ``reason`` completes "it ...", ``instead`` names variants that can."""

    def __init__(self, operation: str, variant: str, *, reason: str, instead: Iterable[str]) -> None:
        super().__init__(f"Variant {variant!r} of {operation} cannot run this call: it {reason}. These can: {listing(instead)}.")
        self.reason = reason


class VariantResultError(OneLaunchError, TypeError):
    """Error for a variant that did not return the results of its operation."""

    def __init__(self, operation: str, variant: str, *, problem: str) -> None:
        super().__init__(f"Variant {variant!r} of {operation} {problem}.")
        self.operation, self.variant = operation, variant


class TransformUnsupported(OneLaunchError, RuntimeError):
    """Error for a kernel called inside a transform of ``torch.func``, for which it has no rule."""

    def __init__(self, kernel: str) -> None:
        super().__init__(
            f"The kernel {kernel!r} has no rule for transforms of torch.func (vmap, grad, jvp...). Name a variant that consists "
            "of PyTorch operations, such as variant='eager' or 'chunked', or batch the call along B."
        )


class PluginWarning(OneLaunchError, UserWarning):
    """Warning for a plug-in that is left out. ``problem`` is what importing it raised, or, without ``raised``, a clause."""

    def __init__(self, name: str, module: str, distribution: str, *, problem: str, raised: bool = True) -> None:
        super().__init__(
            f"The plug-in {name!r} ({module}, of {distribution}) is left out, since {'importing it raised ' * raised}{problem}. "
            "Repair or uninstall that package. Until then the operations and variants that it registers are missing."
        )
        self.name, self.module, self.distribution, self.problem = name, module, distribution, problem


# Models and decoding


class CheckpointError(OneLaunchError, ValueError):
    """Error for a checkpoint that does not hold what is read from it."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"Checkpoint: {problem}.")


class UnknownModel(UnknownNameError, CheckpointError):
    """Error for a model that is neither a folder, nor a name on the Hugging Face hub, nor the bundled model."""

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


class ModelConfigError(OneLaunchError, ValueError):
    """Error for a field of a model's configuration that is missing or wrong."""

    def __init__(self, field: str, *, got: object, want: str) -> None:
        said = "missing" if got == "missing" else shown(got)
        super().__init__(f"{field} of the model's configuration is {said}; it must be {want}.")
        self.field = field


class UnsupportedModel(OneLaunchError, ValueError):
    """Error for a model whose architecture, or one of whose features, is not supported."""

    def __init__(self, what: str, *, supported: Iterable[str]) -> None:
        super().__init__(f"The model has {what}, which is not supported. Supported: {listing(supported)}.")


class PlanError(OneLaunchError, ValueError):
    """Error for a decode plan that is not correct, for example without a needed ordering, or that cannot run on this device."""

    def __init__(self, plan: str, problem: str) -> None:
        super().__init__(f"Plan {plan!r}: {problem}.")
        self.problem = problem


class DecodeStalled(OneLaunchError, RuntimeError):
    """Error for a launch that timed out because its CTAs waited for one another for too long."""

    def __init__(self, variant: str) -> None:
        super().__init__(
            f"A launch of {variant!r} timed out: its CTAs waited for one another for seconds. Its results are lost. Another "
            "process may occupy a part of the GPU. Try again, or use the variant 'captured', which has no such waits."
        )


class DecodeOverflow(OneLaunchError, ArithmeticError):
    """Error for a layer output that is NaN, or outside the range of the kernel's fixed-point residual stream."""

    def __init__(self, variant: str) -> None:
        super().__init__(
            f"A layer added a value to the residual stream that is NaN or too large: {variant!r} accumulates in integer "
            "multiples of 2^-28, up to 67108864. Check the weights, or use the variant 'captured', which accumulates in float32."
        )


class LogitsNotFinite(OneLaunchError, ArithmeticError):
    """Error for logits that are NaN or infinite, so that no token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "Logits of the model are NaN or infinite. Check its weights, or use a dtype with a larger range, such as float32."
        )


class ContextExceeded(OneLaunchError, ValueError):
    """Error for a sequence that would be longer than the model's context; ``said`` is the subject of the message."""

    def __init__(self, positions: int, *, context: int, said: str = "The sequence") -> None:
        super().__init__(f"{said} takes {positions} positions; the model's context has {context}.")
        self.positions, self.context = positions, context


# Warnings about slower paths, the cache and measurements


class FallbackNotice(OneLaunchError, UserWarning):
    """Warning that the fastest path cannot run here, or gave a wrong result, so that another one is used."""


class CacheNotice(OneLaunchError, UserWarning):
    """Warning about the cache folder or a file in it that cannot be used as it is."""


class CompileNotice(OneLaunchError, UserWarning):
    """Warning that the first call of a kind waits for a compiler."""


class BusyDeviceNotice(OneLaunchError, UserWarning):
    """Warning that a device's peaks were measured while other work used it, so that they may be too low."""

    def __init__(self, device: str, *, apart: float) -> None:
        super().__init__(
            f"{device} was busy while its peaks were measured: the fastest samples differ by more than {apart:.0%}. The peaks "
            "may be too low, and the next command measures them again. On an idle machine, run: onelaunch doctor --refresh."
        )
        self.device = device


class TableNotice(OneLaunchError, UserWarning):
    """Warning about a table of measured times that is not valid, so that it or a part of it is ignored.

    ``part`` is what is ignored with its verb, such as "these rows are", and ``again`` the command that writes it anew.
    """

    def __init__(self, path: Path | str | None, problem: str, *, part: str = "it is", again: str = "study adopt") -> None:
        super().__init__(
            f"Table of measured times {path}: {problem}, so {part} left out. Delete the file, or write it again with "
            f"onelaunch {again}."
        )
        self.path = path


# Devices, packages and tools


class TokenizerMissing(OneLaunchError, ImportError):
    """Error for text without a tokenizer: the ``reason`` as a clause, and the ``remedy`` beside passing token ids."""

    def __init__(self, reason: str, remedy: str = "Do: pip install 'onelaunch[decode]'") -> None:
        super().__init__(f"{reason}. {remedy}, or pass token ids and ask for token ids only.")
        self.reason, self.remedy = reason, remedy


class DeviceMemoryError(OneLaunchError, RuntimeError):
    """Error for a device with too little free memory for what was to be allocated there."""

    def __init__(self, what: str, *, device: object, need: int | None = None, free: int | None = None) -> None:
        numbers = "" if need is None or free is None else f" It takes {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free."
        super().__init__(f"There is no room on {device} for {what}.{numbers} Free memory there, or use another device.")
        self.need, self.free = need, free


class NoDeviceError(OneLaunchError, RuntimeError):
    """Error for a device name that PyTorch does not see on this machine."""

    exit_code = 2

    def __init__(self, device: str, *, present: Iterable[str]) -> None:
        super().__init__(f"There is no device {device!r} here. Present: {listing(present)}. Name one of these, or 'auto'.")


class InspectionError(OneLaunchError, RuntimeError):
    """Error for a kernel that cannot be compiled or disassembled for an architecture."""


class UnknownArchitecture(UnknownNameError, InspectionError):
    """Error for a name that no supported architecture has."""

    kind = "architecture"


class CompilerMissing(OneLaunchError, ImportError):
    """Error for CUDA C++ without its compiler: cuda-bindings is not installed, or does not find NVRTC."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"CUDA C++ cannot be compiled here: {problem}. Do: pip install 'onelaunch[cuda]'.")


class CompileError(OneLaunchError, RuntimeError):
    """Error for a source that NVRTC does not compile. The message holds its log."""

    def __init__(self, name: str, architecture: str, *, log: str) -> None:
        super().__init__(f"{name} does not compile for {architecture}:\n{log}")
        self.log = log


class DriverError(OneLaunchError, RuntimeError):
    """Error for a call that the CUDA driver refused."""

    def __init__(self, call: str, *, got: str, about: str) -> None:
        super().__init__(f"{call} returned {got} for {about}.")


# Studies and results


class StudyError(AdvisedError, ValueError):
    """Error for a study file that is not valid."""

    def __init__(self, path: Path | str, problem: str, *, advice: str = "") -> None:
        super().__init__(escaped(f"{path}: {problem}"), advice=advice)


class FolderNotice(OneLaunchError, UserWarning):
    """Warning about a folder to search for files that does not exist, or is no folder."""


class ExtraMissing(OneLaunchError, ImportError):
    """Error for an optional part of onelaunch whose package is not installed."""

    def __init__(self, part: str, *, package: str, extra: str) -> None:
        super().__init__(f'{part} needs {package}. Install the extra {extra}: pip install "onelaunch[{extra}]"')
        self.package, self.extra = package, extra


class ResultExists(AdvisedError, FileExistsError):
    """Error for a result that would overwrite another one.

    Args:
        path: Path of the existing file.
        argument: Name of the argument that chose the path.
        resumable: Flag that an interrupted run left the file, so that the run can be continued.
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
    """Error for a result file that does not exist."""

    exit_code = 2

    def __init__(self, path: Path | str) -> None:
        super().__init__(f"There is no file {path}. A run prints where it writes its result, such as results/DEVICE/STUDY.json.")


class ResultCorrupt(OneLaunchError, ValueError):
    """Error for a result file that is not valid."""

    def __init__(self, path: Path | str, problem: str, *, remedy: str = "Run the study again, or restore the file.") -> None:
        super().__init__(escaped(f"{path} is not a result of onelaunch: {problem}. {remedy}"))


class ResultTooNew(ResultCorrupt):
    """Error for a result whose schema is newer than this version of onelaunch knows."""

    def __init__(self, path: Path | str, *, schema: int, newest: int) -> None:
        OneLaunchError.__init__(
            self, f"{path} was written by a newer onelaunch (schema {schema}; this one reads up to {newest}). Update onelaunch."
        )
        self.schema, self.newest = schema, newest


class OutputUnwritable(OneLaunchError, OSError):
    """Error for an output file or folder that cannot be written."""

    def __init__(self, path: Path | str, problem: str, *, remedy: str = "Choose another place for it.") -> None:
        super().__init__(escaped(f"{path} cannot be written: {problem}. {remedy}"))
        self.path, self.reason = Path(path), problem


class ResultBusy(OneLaunchError, OSError):
    """Error for a result that another run is writing at this moment."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(f"{path} is the result of another run that is not done. Wait for it, or choose another file.")
        self.path = Path(path)


class MeasuringFailed(OneLaunchError, RuntimeError):
    """Error for a process that ended, or raised, while it was to measure a study."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. Run the study in this process to see more (--in-process, or in_process=True).")
        self.problem = problem


class PackError(OneLaunchError, RuntimeError):
    """Error for a study that cannot be packed for another machine, or for a packed study where its result is needed."""


class TableCorrupt(OneLaunchError, ValueError):
    """Error for a file that is no table of measured times, so that rows cannot be merged into it."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path} is no table of measured times: {problem}. Delete it, or choose another folder with --into.")


class TableFolderError(ArgumentError):
    """Error for a folder into which a table of measured times must not be written."""

    def __init__(self, path: Path | str, problem: str, *, remedy: str) -> None:
        super().__init__(escaped(f"{path} {problem}. {remedy}"))


class AdoptNotice(OneLaunchError, UserWarning):
    """Warning about times of a result that are not adopted into a table, or that are adopted without a check."""


class ResultMismatch(AdvisedError, ValueError):
    """Error for results that do not belong together, or that lack what is needed from them."""
