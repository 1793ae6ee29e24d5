"""Variants of ``rms_norm`` from other libraries, fla and Liger, called the way their own modules call them.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel,
``maker`` is the library, and ``usual`` marks functions that the library's own modules call; studies select variants by tags.
``requires`` is the package to import. Other keywords are capabilities, which the class ``Capabilities`` of
``onelaunch.operation`` explains: ``own_tolerance`` is the error up to which a peer that fails the gate is timed.
"""

from __future__ import annotations

from onelaunch.operation import Query
from onelaunch.operation.accuracy import FLA_TESTS
from onelaunch.operation.requirements import not_installed
from onelaunch.ops.rms_norm.autograd import Results
from onelaunch.ops.rms_norm.contract import RMSNormCall, rms_norm


@rms_norm.variant(
    "fla",
    launches=None,
    fuses=("add", "norm"),
    hands=(),
    maker="fla",
    requires="fla",
    own_tolerance=FLA_TESTS,
    usual=True,
    tunes=True,
)
def fla(call: RMSNormCall) -> Results:
    """Run ``rms_norm`` of flash-linear-attention, as its module ``RMSNorm`` does, with ``prenorm`` if there is a residual.

    Its kernel for rows of more than 512 channels rounds the gradient of a float32 residual to the dtype of x: 1.7e-3 of it in
    bfloat16, more than the gate allows. fla's tests allow 1e-2 to such a gradient, behind a norm and a linear layer in one
    function, and 1e-3 to norms of float32 rows without residual; none is of 16-bit rows alone. The tolerance is that of its
    recurrences, which lies between.
    """
    from fla.modules.layernorm import rms_norm as theirs  # pyrefly: ignore[missing-import]

    added = call.residual is not None
    found = theirs(call.x, call.weight, None, residual=call.residual, eps=call.eps, prenorm=added)
    return found if added else (found, None)


@rms_norm.variant("liger", launches=None, fuses=("add", "norm"), hands=(), maker="liger", requires="liger_kernel", usual=True)
def liger(call: RMSNormCall) -> Results:
    """Run the function of Liger's ``LigerFusedAddRMSNorm``, or of its ``LigerRMSNorm`` if there is no residual.

    Its gradients are not written over those that come in, as ``LigerRMSNorm`` does by default: other users may read these.
    """
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction  # pyrefly: ignore[missing-import]
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyrefly: ignore[missing-import]

    rest = (call.weight, call.eps, 0.0, "llama", False)  # offset, casting mode, in_place
    if call.residual is None:
        return LigerRMSNormFunction.apply(call.x, *rest), None
    return LigerFusedAddRMSNormFunction.apply(call.x, call.residual, *rest)


@fla.supports
def what_fla_can(query: Query) -> str | None:
    """Return why fla 0.6.0 cannot run a call, or ``None``."""
    return not_installed("fla") or _on_a_gpu(query)


@liger.supports
def what_liger_can(query: Query) -> str | None:
    """Return why Liger 0.8 cannot run a call, or ``None``."""
    if (reason := not_installed("liger_kernel") or _on_a_gpu(query)) is not None:
        return reason
    if "weight" not in query.flags:
        return "needs a weight"
    return "takes a residual of the dtype of x alone" if "float32_residual" in query.flags else None


def _on_a_gpu(query: Query) -> str | None:
    """Return why neither library can run a call: its device, or an empty dimension; or ``None``."""
    if query.device_type != "cuda":
        return "needs a CUDA or ROCm device"
    return "needs at least one element in every dimension" if 0 in query.sizes else None
