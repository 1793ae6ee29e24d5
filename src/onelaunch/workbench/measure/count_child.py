"""Process that runs under ``ncu``: ``python -m onelaunch.workbench.measure.count_child REQUESTS.json``.

For each request it compiles and calls once on every input set, which is not counted, and then calls inside an NVTX range. After
every request it rewrites its report, the file that the requests name, with the number of calls and input sets or the error. A
crash therefore leaves the reports of the earlier requests. ``count.py`` starts the process and reads the report.
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
from onelaunch.workbench.measure.rotation import count_sets
from onelaunch.workbench.verify.calls import Candidate, Inputs, draw_gradients, make_inputs, status_of

KERNELS = 300
"""Number of kernels to profile for one request: enough calls for a mean, few enough at several milliseconds per kernel."""

_TOO_MANY_KERNELS = 2000
"""Number of PyTorch operators above which a call is not profiled, because it would take minutes."""


class Operators(TorchDispatchMode):
    """Dispatch mode that counts PyTorch's operators, as an estimate of the number of kernels."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def main(specification: Path) -> None:
    """Run all requests of a specification, the JSON file that :func:`onelaunch.workbench.measure.count.count_all` writes."""
    given = json.loads(specification.read_text(encoding="utf-8"))
    importlib.import_module(given["module"])  # registers an operation that is neither ours nor a plug-in's
    operation = find_operation(given["operation"])
    device = torch.device(given["device"])
    outcomes: dict[str, dict[str, Any]] = {}
    # With one thread the backward pass is launched inside the NVTX range too, which belongs to a thread.
    with torch.autograd.set_multithreading_enabled(False):
        for index, request in enumerate(given["requests"]):
            try:
                outcomes[str(index)] = _run(operation, request, index, device, given["seed"])
            except Exception as error:  # noqa: BLE001 - the other requests are still run
                outcomes[str(index)] = {"error": status_of(error)[1]}
            Path(given["report"]).write_text(json.dumps(outcomes), encoding="utf-8")


def _run(operation: Operation[..., Any], request: dict[str, Any], index: int, device: torch.device, seed: int) -> dict[str, Any]:
    """Run one request, and return the number of profiled calls and of input sets, or the reason why it is not profiled."""
    case = operation.case(request["dtype"], **request["sizes"], **request["options"])
    name = request["name"]
    candidate = (
        Candidate.control(operation, operation.controls[name]) if request["control"] else Candidate.variant(operation, name)
    )
    inputs = make_inputs(operation, case, device, seed, request["direction"])
    if request["direction"] == "forward_backward":
        inputs.output_gradients = draw_gradients(candidate(Inputs(inputs.arguments)), case.dtype, seed, inputs.through)
    candidate(inputs)
    # Compiled functions run eagerly here, because Dynamo never compiles a function again that it tried under a dispatch mode.
    with torch.compiler.set_stance("force_eager"), Operators() as operators:
        candidate(inputs)
    if operators.count > _TOO_MANY_KERNELS:
        return {"error": f"about {operators.count} kernels a call are too many to profile"}
    # The size of the outputs is estimated as that of the inputs.
    sets = [inputs.clone() for _ in range(count_sets(inputs.nbytes, inputs.nbytes, device)[0])]
    calls = max(1, min(len(sets), KERNELS // max(operators.count, 1)))
    outputs = [candidate(one) for one in sets]  # stay alive, so that each call writes to memory of its own, as in a model
    torch.cuda.synchronize(device)
    torch.cuda.nvtx.range_push(f"{RANGE}{index}")
    for call in range(calls):
        outputs[call] = candidate(sets[call])
    torch.cuda.synchronize(device)
    torch.cuda.nvtx.range_pop()
    return {"calls": calls, "sets": len(sets)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
