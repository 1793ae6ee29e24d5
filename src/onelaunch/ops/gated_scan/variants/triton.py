"""Variants of ``gated_scan`` in Triton: scan and gate in two launches, and in one.

Variants of ``linear_rnn`` run them too, after a product.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, and
``separates`` those that have a launch of their own in each pass; ``cost.py`` reads both. Other keywords are capabilities, which
the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import torch

from onelaunch.operation import Example
from onelaunch.operation.requirements import cannot_scan
from onelaunch.ops.gated_scan.autograd import scan_and_gate
from onelaunch.ops.gated_scan.contract import ScanCall, gated_scan


@gated_scan.variant("separate", compiles=True, launches=2, backward_launches=2, fuses=(), separates=("gate",))
def separate(call: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a scan kernel, then a gate kernel; the states between them go through memory in the dtype of ``v``.

    They did in the write-up of experiment 040, the source of this operation (docs/notebook/linear_rnn.md). On small cases this
    rounding may exceed the error tolerance: it did in one of twenty random cases of 200 elements. Without a gate there is no
    second launch.
    """
    return scan_and_gate(call, separate=True)


@gated_scan.variant("fused", compiles=True, launches=1, backward_launches=1, fuses=("scan", "gate"))
def fused(call: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan and gate in one launch, parallel over time by decoupled look-back (Merrill and Garland)."""
    return scan_and_gate(call, separate=False)


separate.supports(cannot_scan)
fused.supports(cannot_scan)


@fused.examples
@separate.examples
def training() -> list[Example]:
    """Return a training call without packing or states, for which the kernels are compiled and inspected."""
    case = gated_scan.case("float16", B=4, T=2048, V=64, initial_state=False, final_state=False)
    return [Example(case, "forward_backward")]
