"""The process that ``ncu`` watches: ``python -m onelaunch.workbench.measure.count_child REQUESTS.json``.

For each request it compiles and rotates once through all input sets unwatched, then calls inside an NVTX range. What it did
(calls, sets, errors) goes into the report that the requests name, after every request: a crash leaves the earlier ones.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.operation import Operation, find_operation
from onelaunch.workbench.measure.count import RANGE
from onelaunch.workbench.measure.sampling import count_sets
from onelaunch.workbench.verify.calls import Callee, Inputs, draw_gradients, make_inputs, status_of

KERNELS = 300
"""Kernels of one request: enough calls to average over, few enough for a profiler that takes milliseconds a kernel."""

TOO_MANY_KERNELS = 2000
"""Operators of one call that are too many to profile."""


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators: about as many as the kernels they launch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def main(specification: Path) -> None:
    """Run all requests."""
    given = json.loads(specification.read_text(encoding="utf-8"))
    importlib.import_module(given["module"])
    operation = find_operation(given["operation"])
    device = torch.device(given["device"])
    outcomes: dict[str, dict[str, Any]] = {}
    # One thread, so that the backward pass launches inside the range too.
    with torch.autograd.set_multithreading_enabled(False):
        for index, request in enumerate(given["requests"]):
            try:
                outcomes[str(index)] = _run(operation, request, index, device, given["seed"])
            except Exception as error:  # noqa: BLE001 - the other requests go on
                outcomes[str(index)] = {"error": status_of(error)[1]}
            Path(given["report"]).write_text(json.dumps(outcomes), encoding="utf-8")


def _run(operation: Operation[..., Any], request: dict[str, Any], index: int, device: torch.device, seed: int) -> dict[str, Any]:
    case = operation.case(request["dtype"], **request["sizes"], **request["options"])
    name = request["name"]
    callee = Callee.control(operation, operation.controls[name]) if request["control"] else Callee.variant(operation, name)
    inputs = make_inputs(operation, case, device, seed, request["direction"])
    if request["direction"] == "forward_backward":
        inputs.output_gradients = draw_gradients(callee(Inputs(inputs.arguments)), case.dtype, seed)
    callee(inputs)
    with torch.compiler.set_stance("force_eager"), Operators() as operators:
        callee(inputs)
    if operators.count > TOO_MANY_KERNELS:
        return {"error": f"about {operators.count} kernels a call are too many to profile"}
    sets = [inputs.clone() for _ in range(count_sets(inputs.nbytes, inputs.nbytes, device)[0])]
    calls = max(1, min(len(sets), KERNELS // max(operators.count, 1)))
    kept = [callee(one) for one in sets]  # every call's results in memory of their own, as after a whole model
    torch.cuda.synchronize(device)
    torch.cuda.nvtx.range_push(f"{RANGE}{index}")
    for call in range(calls):
        kept[call] = callee(sets[call])
    torch.cuda.synchronize(device)
    torch.cuda.nvtx.range_pop()
    return {"calls": calls, "sets": len(sets)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
