"""Data flow of each operation: what every launch reads and writes in device memory, and what stays on chip.

``tools/draw_data_flow.py`` draws the flows. They describe the forward pass at a shape of a study, without initial and final
states. Bytes follow from the shape of the case. ``tests/test_data_flow.py`` compares the sums with the operation's own cost of
each variant, so that a change of a contract, a cost or a variant's launches fails there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from onelaunch.operation import Case, Operation, find_operation

Kind = Literal["argument", "between", "result"]
"""Role of a tensor in memory: an argument of the call, an intermediate between two launches, or a result."""


@dataclass(frozen=True)
class Tensor:
    """Tensor in device memory, or several with the same readers and writers."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Launch:
    """One launch, or a step for which PyTorch decides the launches."""

    name: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    on_chip: tuple[str, ...] = ()
    """Short phrases about what stays on chip."""
    times: int = 1
    """Number of launches of this kind; a tensor of ``reads`` in ``shared`` is read by each of them."""
    shared: tuple[Tensor, ...] = ()

    def read_bytes(self, tensor: Tensor) -> int:
        """Return the bytes that are read of a tensor."""
        return tensor.bytes * (self.times if tensor in self.shared else 1)


@dataclass(frozen=True)
class Panel:
    """Launches of one variant."""

    title: str
    variant: str
    launches: tuple[Launch, ...]
    uncounted: tuple[Tensor, ...] = ()
    """Tensors that a later launch reads again, which the cost of the operation does not count."""
    intermediates: tuple[Tensor, ...] = ()
    """Tensors that a launch writes and another one reads, and that are no results."""

    @property
    def read(self) -> int:
        """Bytes that are read."""
        return sum(launch.read_bytes(tensor) for launch in self.launches for tensor in launch.reads)

    @property
    def written(self) -> int:
        """Bytes that are written."""
        return sum(tensor.bytes for launch in self.launches for tensor in launch.writes)

    def kind(self, tensor: Tensor) -> Kind:
        """Return the role of a tensor: what no launch writes is an argument, and what only launches read an intermediate."""
        if not any(tensor in launch.writes for launch in self.launches):
            return "argument"
        return "between" if tensor in self.intermediates else "result"


@dataclass(frozen=True)
class Flow:
    """Data flow of an operation at a shape."""

    operation: Operation
    case: Case
    about: str
    """Sentence on the picture."""
    panels: tuple[Panel, ...]
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For a composition, the variants of its parts by panel; the costs of the parts are added up."""


CUBLAS = "by cuBLAS"
PYTORCH = "by PyTorch, in one or more kernels"


def _nbytes(case: Case, *extent: int, item: int = 0) -> int:
    count = item or case.dtype.itemsize
    for each in extent:
        count *= each
    return count


def _scan(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return v, log-decays, states, gate and y of a scan; all are ``[B, T, V]``."""
    size = _nbytes(case, case.sizes["B"], case.sizes["T"], case.sizes["V"])
    v, decays, states, gate, y = (Tensor(name, size) for name in ("v", "log_decay", "states", "gate", "y"))
    return v, decays, states, gate, y


SCAN_APART = (
    ("decays and states: registers, float32", "from CTA to CTA: 64-bit words with a flag in the data"),
    ("elements: registers, float32",),
)
"""What stays on chip in the kernels of the variant ``separate``: the scan and the gate."""


def gated_scan() -> Flow:
    """Return the flow of ``gated_scan``."""
    operation = find_operation("gated_scan")
    case = operation.case("bfloat16", B=4, T=2048, V=1024, initial_state=False, final_state=False)
    v, decays, states, gate, y = _scan(case)
    apart = (
        Launch("scan", (v, decays), (states,), SCAN_APART[0]),
        Launch("gate", (states, gate), (y,), SCAN_APART[1]),
    )
    one = Launch("scan and gate", (v, decays, gate), (y,), (*SCAN_APART[0], "gate: registers"))
    about = "Fused, the states of all steps stay in registers, and the gate is applied to them there."
    panels = (Panel("Two launches", "separate", apart, intermediates=(states,)), Panel("One launch", "fused", (one,)))
    return Flow(operation, case, about, panels)


def linear_rnn() -> Flow:
    """Return the flow of ``linear_rnn``."""
    operation = find_operation("linear_rnn")
    case = operation.case("float16", B=4, T=2048, D=256, V=64, initial_state=False, final_state=False)
    batch, length, width, channels = (case.sizes[name] for name in operation.dimensions)
    x, weight = Tensor("x", _nbytes(case, batch, length, width)), Tensor("weight", _nbytes(case, width, channels))
    v, decays, states, gate, y = _scan(case)
    apart = (
        Launch("matrix product", (x, weight), (v,), (CUBLAS,)),
        Launch("scan", (v, decays), (states,), SCAN_APART[0]),
        Launch("gate", (states, gate), (y,), SCAN_APART[1]),
    )
    chip = (
        "tiles of x and weight: shared memory",
        "sums v, states, decays, gate: registers, float32",
        "from CTA to CTA: 64-bit words with a flag in the data",
    )
    one = Launch("product, scan and gate", (x, weight, decays, gate), (y,), chip)
    about = "Fused, a tile of the product stays in registers as float32 sums, is scanned and gated there, and only y is written."
    panels = (
        Panel("Three launches", "three_launch_cublas", apart, intermediates=(v, states)),
        Panel("One launch", "fused_chunked", (one,)),
    )
    return Flow(operation, case, about, panels)


def _gla_tensors(case: Case) -> dict[str, Tensor]:
    """Return q, k, v, g and o of ``gla``, and the states of all chunks that the portable kernels pass on."""
    batch, length, heads, keys, values = (case.sizes[name] for name in ("B", "T", "H", "K", "V"))
    chunks = -(-length // find_operation("gla").get("fused").tags["chunk"])
    sizes = {"q": keys, "k": keys, "v": values, "g": keys, "o": values}
    tensors = {name: Tensor(name, _nbytes(case, batch, length, heads, size)) for name, size in sizes.items()}
    return tensors | {"states": Tensor("chunk states", _nbytes(case, batch, chunks, heads, keys, values))}


ONE_PASS = (
    "state: registers, float32",
    "tiles of q, k, v, g (by TMA) and scores: shared memory",
    "decayed q and k replace q and k there",
)
"""What stays on chip in gla's Hopper kernel."""


def gla() -> Flow:
    """Return the flow of ``gla``; so many heads fill the chip that T is not cut into segments."""
    operation = find_operation("gla")
    case = operation.case("bfloat16", B=8, T=4096, H=16, K=128, V=128)
    q, k, v, g, o, states = _gla_tensors(case).values()
    apart = (
        Launch("chunk state pass, along time", (k, v, g), (states,), ("state: registers, float32",)),
        Launch("outputs of all chunks at once", (q, k, v, g, states), (o,), ("scores and o: registers, float32",)),
    )
    one = Launch("one pass along time", (q, k, v, g), (o,), ONE_PASS)
    about = (
        "In one launch the state of a head stays in registers from the first chunk to the last, and each tensor moves once. In "
        "two launches the state at every chunk goes through memory, and k, v and g are read twice."
    )
    panels = (
        Panel("Two launches, portable", "fused", apart, uncounted=(k, v, g), intermediates=(states,)),
        Panel("One launch, Hopper", "hopper", (one,)),
    )
    return Flow(operation, case, about, panels)


def _chain_tensors(case: Case) -> tuple[Tensor, ...]:
    """Return h, gate, norm weight, output weight, the normalized heads, the activated gate, their product a, and out."""
    batch, length, heads, values, width = (case.sizes[name] for name in ("B", "T", "H", "V", "D"))
    rows, inner = batch * length, heads * values
    passed = _nbytes(case, rows, inner)
    sizes = {
        "h": passed,
        "gate": passed,
        "norm weight": _nbytes(case, values),
        "output weight": _nbytes(case, width, inner),
        "normalized h": passed,
        "SiLU of gate": passed,
        "a": passed,
        "out": _nbytes(case, rows, width),
    }
    return tuple(Tensor(name, size) for name, size in sizes.items())


def _chain(tensors: tuple[Tensor, ...]) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
    """Return the launches of ``unfused`` and of ``norm_gate``."""
    h, gate, norm_weight, weight, normalized, silu, a, out = tensors
    product = Launch("matrix product", (a, weight), (out,), (CUBLAS,))
    apart = (
        Launch("RMSNorm of heads", (h, norm_weight), (normalized,), (PYTORCH,)),
        Launch("SiLU", (gate,), (silu,), (PYTORCH,)),
        Launch("multiplication", (normalized, silu), (a,), (PYTORCH,)),
        product,
    )
    one = Launch("norm and gate", (h, norm_weight, gate), (a,), ("whole heads: registers, float32",))
    return apart, (one, product)


def output_chain() -> Flow:
    """Return the flow of ``output_chain``."""
    operation = find_operation("output_chain")
    case = operation.case("bfloat16", B=8, T=4096, H=16, V=128, D=2048)
    tensors = _chain_tensors(case)
    apart, fused = _chain(tensors)
    normalized, silu, a = tensors[4:7]
    about = "Fused, a head is read once, normalized and gated in registers, and only the operand of the product is written."
    panels = (
        Panel("Unfused", "unfused", apart, intermediates=(normalized, silu, a)),
        Panel("Two launches", "norm_gate", fused, intermediates=(a,)),
    )
    return Flow(operation, case, about, panels)


PRODUCT_ON_CHIP = (
    "tiles of x and weight (by TMA): shared memory",
    "sums: registers, float32; activations are applied to them there",
)
"""What stays on chip in the projections' Hopper kernel."""


def projections() -> Flow:
    """Return the flow of ``projections``."""
    operation = find_operation("projections")
    case = operation.case("bfloat16", B=8, T=4096, D=2048, H=16, K=128, V=128)
    batch, length, width, heads, keys, values = (case.sizes[name] for name in ("B", "T", "D", "H", "K", "V"))
    rows, activated, plain = batch * length, heads * (2 * keys + values + 1), heads * values
    x = Tensor("x", _nbytes(case, rows, width))
    weight = Tensor("packed weight", _nbytes(case, activated + plain, width))
    z = Tensor("products", _nbytes(case, rows, activated))
    v = Tensor("v", _nbytes(case, rows, plain))
    results = Tensor("q, k, gate, decay", _nbytes(case, rows, activated))
    apart = (
        Launch("5 matrix products", (x, weight), (z, v), (CUBLAS, "x is read 5 times"), times=5, shared=(x,)),
        Launch("4 activations", (z,), (results,), (PYTORCH,)),
    )
    one = Launch("one product, activations in its epilogue", (x, weight), (results, v), PRODUCT_ON_CHIP)
    about = (
        "Fused, one product with the packed weight reads x once, and activations (normalized heads of q and k, SiLU of the gate, "
        "a sigmoid of the decays) are applied to its sums before they leave the chip."
    )
    panels = (
        Panel("Unfused", "unfused", apart, intermediates=(z,)),
        Panel("One launch, Hopper", "epilogue_persistent", (one,)),
    )
    return Flow(operation, case, about, panels)


def rms_norm() -> Flow:
    """Return the flow of ``rms_norm`` with a residual and a weight."""
    operation = find_operation("rms_norm")
    case = operation.case("bfloat16", M=8192, D=2048)
    rows, channels = (case.sizes[name] for name in operation.dimensions)
    x, residual, total, y = (Tensor(name, _nbytes(case, rows, channels)) for name in ("x", "residual", "sum", "y"))
    weight = Tensor("weight", _nbytes(case, channels))
    apart = (
        Launch("addition", (x, residual), (total,), ("by PyTorch",)),
        Launch("RMSNorm", (total, weight), (y,), ("by PyTorch's rms_norm",)),
    )
    one = Launch("addition and norm", (x, residual, weight), (total, y), ("whole rows: registers, float32",))
    about = "Fused, the sum is normalized in registers while it is written, and is not read again. It is a result in both."
    panels = (Panel("Two steps of PyTorch", "functional", apart), Panel("One launch", "fused", (one,)))
    return Flow(operation, case, about, panels)


def swiglu() -> Flow:
    """Return the flow of ``swiglu``."""
    operation = find_operation("swiglu")
    case = operation.case("bfloat16", M=512, N=4096, K=7168)
    rows, columns, inner = (case.sizes[name] for name in operation.dimensions)
    x, result = Tensor("x", _nbytes(case, rows, inner)), _nbytes(case, rows, columns)
    w_gate, w_up = (Tensor(name, _nbytes(case, columns, inner)) for name in ("gate weight", "up weight"))
    gate, up, h = (Tensor(name, result) for name in ("gate", "up", "h"))
    apart = (
        Launch("matrix product", (x, w_gate), (gate,), (CUBLAS,)),
        Launch("matrix product", (x, w_up), (up,), (CUBLAS,)),
        Launch("SiLU and product", (gate, up), (h,), ("elements: registers, float32",)),
    )
    chip = ("tiles of x and both weights (by TMA): shared memory", "sums of gate and up: registers, float32; SiLU there")
    one = Launch("both products, gate in the epilogue", (x, w_gate, w_up), (h,), chip)
    about = (
        "Fused, a CTA computes the same tile of both products, and the gate is applied to the sums in registers. At few rows the "
        "weights are nearly all of the bytes, so that less is saved than at many."
    )
    panels = (
        Panel("Three launches", "three_node", apart, intermediates=(gate, up)),
        Panel("One launch, Hopper", "persistent", (one,)),
    )
    return Flow(operation, case, about, panels)


def gla_layer() -> Flow:
    """Return the flow of ``gla_layer``, whose parts are ``projections`` (twice), ``gla`` and ``output_chain``."""
    operation = find_operation("gla_layer")
    case = operation.case("bfloat16", B=8, T=4096, D=2048, H=16, K=128, V=128)
    batch, length, width, heads, keys, values = (case.sizes[name] for name in operation.dimensions)
    rank, rows = operation.option(case, "rank"), batch * length
    x = Tensor("x", _nbytes(case, rows, width))
    weight = Tensor("packed weight", _nbytes(case, 2 * heads * (keys + values) + rank, width))
    low = Tensor("low rank", _nbytes(case, rows, rank))
    second = Tensor("decay weight", _nbytes(case, heads * keys, rank) + _nbytes(case, heads * keys))
    z = Tensor("product", _nbytes(case, rows, heads * keys))
    q, k, v, g, o, _ = _gla_tensors(case).values()
    qkv = Tensor("q, k, v", q.bytes + k.bytes + v.bytes)
    gate, chain = Tensor("gate", v.bytes), _chain_tensors(case)
    chain = (o, gate, *chain[2:])
    apart_end, fused_end = _chain(chain)
    recurrence = Launch("gla: one pass along time", (qkv, g), (o,), ONE_PASS[:1])
    apart = (
        Launch("5 matrix products", (x, weight), (qkv, gate, low), (CUBLAS, "x is read 5 times"), times=5, shared=(x,)),
        Launch("matrix product", (low, second), (z,), (CUBLAS,)),
        Launch("log-sigmoid", (z,), (g,), (PYTORCH,)),
        recurrence,
        *apart_end,
    )
    fused = (
        Launch("one product", (x, weight), (qkv, gate, low), ("sums: registers, float32",)),
        Launch("product, log-sigmoid in its epilogue", (low, second), (g,), ("sums: registers, float32",)),
        recurrence,
        *fused_end,
    )
    normalized, silu, a = chain[4:7]
    about = (
        "The layer is a composition: its parts are fused (shown with the variants `epilogue_persistent`, `hopper` and "
        "`norm_gate`), and what they pass to one another still goes through memory. Unfused, PyTorch computes all but the "
        "recurrence. For at most 64 rows the variant `one_launch` runs the whole layer in one launch."
    )
    handed = (qkv, gate, low, g, o)
    panels = (
        Panel("Unfused", "unfused", apart, intermediates=(*handed, z, normalized, silu, a)),
        Panel("Composed of fused parts", "composed", fused, intermediates=(*handed, a)),
    )
    parts: dict[str, tuple[str, ...]] = {
        "unfused": ("unfused", "hopper", "unfused"),
        "composed": ("epilogue_persistent", "hopper", "norm_gate"),
    }
    return Flow(operation, case, about, panels, parts)


def flows() -> Iterator[Flow]:
    """Return the flows of all operations that have a page of their own."""
    for make in (gated_scan, gla, gla_layer, linear_rnn, output_chain, projections, rms_norm, swiglu):
        yield make()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
