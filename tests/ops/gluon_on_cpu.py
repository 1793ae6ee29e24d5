"""Emulation of the part of Gluon that ``gla``'s Hopper kernels use, so that their sources run on a CPU.

``emulate`` runs the sources of these kernels with PyTorch in place of ``kernels/gluon/compat.py``. Registers are tensors without
a layout. The warpgroups of ``warp_specialize`` are threads, and an mbarrier is a condition variable with a phase, pending
arrivals and pending bytes; a wait that takes too long fails. Shared memory is bytes in the order of panels 128 bytes wide, since
some tiles lie over others, and begins as NaN. TMA loads and stores are complete when they are issued: they fill what lies outside
of a tensor with zeros, and drop it. WGMMA multiplies 16-bit numbers exactly and adds in float32.

What a GPU does besides is not seen here: fences, swizzling, the time at which a copy lands, and what the compiler makes of it.
Tests of these kernels without a GPU call ``emulate``.
"""

from __future__ import annotations

import ast
import importlib
import math
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

TIMEOUT = 60.0
"""Seconds that a wait for an mbarrier may take."""

PANEL_BYTES = 128
"""Bytes of a row of a panel: the width of the swizzle."""

cta = threading.local()
"""Index of the CTA that this thread works for (``cta.index``)."""


class Barrier:
    """mbarrier: it waits for arrivals and for bytes, then changes its phase and starts again."""

    def __init__(self):
        self.changed = threading.Condition()
        self.phase = self.count = self.pending = self.bytes = 0
        self.stopped = False

    def init(self, count):
        self.count = self.pending = count

    def arrive(self, count=0, *, announced=0, landed=0):
        with self.changed:
            self.pending -= count
            self.bytes += announced - landed
            assert self.pending >= 0, "more arrivals than expected"
            if self.pending == self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, phase):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != phase or self.stopped, TIMEOUT), "deadlock"
            assert self.phase != phase, "another warpgroup failed"

    def stop(self):
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


class Barriers:
    """Array of mbarriers in shared memory."""

    def __init__(self, count):
        self.items = [Barrier() for _ in range(count)]
        self.shape = [count, 1]

    def index(self, i):
        return self.items[int(i)]

    def _keep_alive(self):
        pass


class Tile:
    """Tile or array of tiles in shared memory: a view of bytes in the order of the hardware, or plain row by row.

    ``view`` is ``[..., panels, rows, width]`` if the tile has ``panels``.
    """

    def __init__(self, view, *, panels, transposed=False):
        self.view, self.panels, self.transposed, self.dtype = view, panels, transposed, view.dtype
        shape = list(view.shape)
        if panels:
            *lead, count, rows, width = shape
            shape = [*lead, rows, count * width]
        self.shape = shape[::-1] if transposed else shape
        self.rank = len(self.shape)

    @classmethod
    def allocate(cls, dtype, shape, layout, memory=None):
        shape = [int(size) for size in shape]
        size = math.prod(shape) * dtype.itemsize
        memory = torch.full((size,), 0xFF, dtype=torch.uint8) if memory is None else memory
        assert memory.numel() == size
        if layout != "panels":
            return cls(memory.view(dtype).view(shape), panels=False)
        *lead, rows, columns = shape
        width = min(columns, PANEL_BYTES // dtype.itemsize)
        return cls(memory.view(dtype).view(*lead, columns // width, rows, width), panels=True)

    def index(self, i):
        assert 0 <= int(i) < self.view.shape[0]
        return Tile(self.view[int(i)], panels=self.panels)

    def slice(self, start, length, dim=0):
        if not self.panels:
            return Tile(self.view.narrow(dim, start, length), panels=False)
        if dim == 0:
            return Tile(self.view[:, start : start + length], panels=True)
        width = self.view.shape[2]
        assert start % width == length % width == 0
        return Tile(self.view[start // width : (start + length) // width], panels=True)

    def permute(self, order):
        assert tuple(order) == (1, 0)
        return Tile(self.view, panels=self.panels, transposed=not self.transposed)

    def reshape(self, shape):
        """Return the tile itself: shapes differ by dimensions of size 1, for TMA."""
        assert [size for size in shape if size > 1] == [size for size in self.shape if size > 1]
        return self

    def _reinterpret(self, dtype, shape, layout):
        assert self.view.is_contiguous()
        return Tile.allocate(dtype, shape, layout, self.view.reshape(-1).view(torch.uint8))

    def load(self, layout=None):
        x = self.view.transpose(-3, -2).flatten(-2) if self.panels else self.view
        return (x.mT if self.transposed else x).clone()

    def store(self, value):
        assert (list(value.shape), value.dtype) == (self.shape, self.dtype)
        value = value.mT if self.transposed else value
        if self.panels:
            panels, rows, width = self.view.shape
            value = value.reshape(rows, panels, width).transpose(0, 1)
        self.view.copy_(value)

    def _keep_alive(self):
        pass


class Pointer:
    """Address in the memory of a tensor, with offsets in elements."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, tensor):
        elements = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        return cls(tensor.as_strided((elements,), (1,)))

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)

    def resolve(self, mask):
        """Return offsets and a mask of equal shape, and require that no address that is used lies outside of the memory."""
        offset, mask = torch.broadcast_tensors(tensor_of(self.offset).long(), tensor_of(True if mask is None else mask))
        assert (((offset >= 0) & (offset < self.memory.numel())) | ~mask).all(), "an address is out of bounds"
        return offset, mask


class Descriptor:
    """TMA descriptor of a tensor."""

    def __init__(self, tensor, box):
        assert tensor.stride(-1) == 1
        assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        self.tensor, self.box, self.dtype = tensor, list(box), tensor.dtype
        self.block_type = SimpleNamespace(shape=self.box, nbytes=math.prod(box) * tensor.element_size())
        self.layout = SimpleNamespace(rank=len(self.box))

    def overlap(self, coordinates):
        """Return the indices of the part of a box that lies in the tensor: in the tensor, and in the box."""
        at = [int(each) for each in coordinates]
        spans = [(max(a, 0), max(min(a + b, n), 0)) for a, b, n in zip(at, self.box, self.tensor.shape, strict=True)]
        if any(first >= end for first, end in spans):
            return None
        inside = tuple(slice(*span) for span in spans)
        return inside, tuple(slice(first - a, end - a) for (first, end), a in zip(spans, at, strict=True))


def tensor_of(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def tma_load(source, coordinates, bar, tile, pred=True):
    if not bool(pred):
        return
    box = torch.zeros(source.box, dtype=source.dtype)
    if (found := source.overlap(coordinates)) is not None:
        box[found[1]] = source.tensor[found[0]]
    tile.store(box.reshape(box.shape[0], -1))
    bar.arrive(landed=source.block_type.nbytes)


def tma_store(target, coordinates, tile):
    if (found := target.overlap(coordinates)) is not None:
        target.tensor[found[0]] = tile.load().reshape(target.box)[found[1]]


def tma_store_wait(pendings):
    pass


def warpgroup_mma(a, b, acc, use_acc=True, is_async=True):
    a, b = (x.load() if isinstance(x, Tile) else x for x in (a, b))
    assert a.dtype == b.dtype
    assert a.dtype.itemsize == 2
    product = a.float() @ b.float()
    assert product.shape == acc.shape
    return acc + product if use_acc else product


def warpgroup_mma_wait(num_outstanding=0, deps=()):
    return deps[0] if len(deps) == 1 else deps


def load(pointer, mask=None, other=0.0):
    offset, used = pointer.resolve(mask)
    found = pointer.memory[torch.where(used, offset, 0)]
    return torch.where(used, found, torch.tensor(other, dtype=found.dtype))


def store(pointer, value, mask=None):
    offset, used = pointer.resolve(mask)
    value = value.expand(offset.shape).to(pointer.memory.dtype)
    pointer.memory[offset[used]] = value[used]


def inline_assembly(text, constraints, arguments, dtype, is_pure=True, pack=1):
    """Compute what the kernels' lines of PTX compute, told apart by an instruction in each."""
    if "ex2.approx.ftz" in text:
        y = torch.exp2(arguments[0])
        return torch.where(y < 2.0**-126, 0.0, y)
    if "rcp.approx" in text:
        return 1 / arguments[0]
    if "max.NaN" in text:
        return torch.maximum(*arguments)
    if "prefetch" in text:
        pointer, mask = arguments
        return pointer.resolve(mask != 0)[0]
    assert "sub.f32" in text  # a number as the sum of two of 16 bits
    high = arguments[0].to(dtype[0])
    return high, (arguments[0] - high.float()).to(dtype[1])


def warp_specialize(partitions, warps, registers):
    """Run every partition in a thread of its own; if one fails, stop the others at their next wait and raise its error."""
    errors, index = [], cta.index

    def run(function, arguments):
        cta.index = index
        try:
            with torch.no_grad():  # a setting of the thread; an operator launches kernels without gradients
                function(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            for bar in barriers_in(arguments):
                bar.stop()

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def barriers_in(arguments):
    for each in arguments:
        if isinstance(each, Barriers):
            yield from each.items
        elif isinstance(each, tuple):
            yield from barriers_in(each)


def constexpr(value):
    return value


def language() -> SimpleNamespace:
    """Return the names of ``gl`` that the kernels use. Layouts of registers are None."""
    no_layout = dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout"), lambda *_: None)
    return SimpleNamespace(
        **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int32", "int64", "abs")},
        **no_layout,
        constexpr=constexpr,
        SwizzledSharedLayout=lambda *_: "plain",
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: "panels"),
        allocate_shared_memory=lambda dtype, shape, layout: (
            Barriers(shape[0]) if layout == "barriers" else Tile.allocate(dtype, shape, layout)
        ),
        arange=lambda first, end, layout=None: torch.arange(first, end, dtype=torch.int32),
        associative_scan=lambda x, axis, combine: x.cumsum(axis),  # the kernels only add
        cdiv=lambda a, b: (a + b - 1) // b,
        convert_layout=lambda x, layout: x,
        exp2=lambda x: torch.exp2(tensor_of(x)),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value).to(dtype),
        inline_asm_elementwise=inline_assembly,
        join=lambda a, b: torch.stack((a, b), -1),
        load=load,
        max=lambda x, axis: x.amax(axis),
        maximum=lambda a, b: torch.maximum(tensor_of(a), tensor_of(b)),
        minimum=lambda a, b: torch.minimum(tensor_of(a), tensor_of(b)),
        num_warps=lambda: 4,
        permute=lambda x, order: x.permute(order),
        program_id=lambda axis: torch.tensor(cta.index, dtype=torch.int32),
        reshape=lambda x, shape: x.reshape(shape),
        split=lambda x: (x[..., 0], x[..., 1]),
        static_assert=lambda condition: None,
        static_range=lambda *bounds: range(*bounds),
        store=store,
        sum=lambda x, axis: x.sum(axis),
        warp_specialize=warp_specialize,
        where=lambda condition, a, b: torch.where(tensor_of(condition), tensor_of(a), tensor_of(b)),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    )


def arrive(bar, count=1, pred=True):
    if bool(pred):
        single(bar).arrive(count)


def expect(bar, size, pred=True):
    if bool(pred):
        single(bar).arrive(1, announced=size)


def wait(bar, phase, pred=True):
    if bool(pred):
        single(bar).wait(int(phase))


def single(bar):
    return bar.index(0) if isinstance(bar, Barriers) else bar


def compatible() -> ModuleType:
    """Return a module with the names of ``kernels/gluon/compat.py``."""
    module = ModuleType("onelaunch.kernels.gluon.compat")
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=lambda bar, count: single(bar).init(count),
        arrive=arrive,
        expect=expect,
        wait=wait,
    )
    vars(module).update(
        gl=language(), mbarrier=mbarrier, tma_load=tma_load, tma_store=tma_store, tma_store_wait=tma_store_wait,
        warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait, fence_async_shared=lambda: None,
        keep_barriers=lambda bars: None,
        gluon=SimpleNamespace(jit=lambda function=None, **_: (lambda kernel: kernel) if function is None else function),
    )  # fmt: skip
    return module


class Rewrite(ast.NodeTransformer):
    """Make ``x += y`` of a kernel ``x = x + y``, since tensors would change in place, and ``x.type.layout`` a string."""

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        assert isinstance(node.target, ast.Name)
        total = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([node.target], total)

    def visit_Attribute(self, node):
        self.generic_visit(node)
        of_type = isinstance(node.value, ast.Attribute) and node.value.attr == "type"
        return ast.Constant("panels") if of_type and node.attr == "layout" else node


def load_emulated(name: str, folder: Path, emulated: dict[str, ModuleType]) -> None:
    """Add the module ``name`` of kernels to ``emulated``, after the modules in its folder that it imports."""
    package = name.rpartition(".")[0]
    tree = ast.parse((folder / f"{name.rpartition('.')[2]}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.rpartition(".")[0] == package and module not in emulated:
            load_emulated(module, folder, emulated)
    emulated[name] = sys.modules[name] = ModuleType(name)
    exec(compile(ast.fix_missing_locations(Rewrite().visit(tree)), f"{name}, emulated", "exec"), vars(emulated[name]))


class EmulatedLaunch:
    """Launch that runs the CTAs of a kernel one after the other, with the interface of ``launch.launch.Launch``."""

    def __init__(
        self, kernel: Callable[..., None], grid: Sequence[int], *arguments: Any, mma: Any, num_warps: int, **constants: Any
    ):
        self.kernel, self.grid, self.constants = kernel, grid, constants
        self.arguments = [Pointer.to(each) if isinstance(each, torch.Tensor) else each for each in arguments]

    def run(self):
        for cta.index in range(self.grid[0]):
            self.kernel(*self.arguments, **self.constants)


def emulate(monkeypatch: pytest.MonkeyPatch, *, segments: int = 1, groups: int = 2, recompute: bool = False) -> ModuleType:
    """Replace ``gla``'s Hopper kernels by their emulation for the length of a test, and return the module that launches them.

    T is cut into ``segments``; with ``recompute`` a pass that can do so recomputes the states at their starts. CTAs have
    ``groups`` warpgroups that multiply where V and K allow two.
    """
    pytest.importorskip("triton", reason="launches import portable kernels too, which import Triton")
    launch_hopper = importlib.import_module("onelaunch.ops.gla.launch_hopper")
    package = importlib.import_module("onelaunch.ops.gla.kernels")
    monkeypatch.setitem(sys.modules, "onelaunch.kernels.gluon.compat", compatible())
    names = [f"{package.__name__}.{path.stem}" for path in Path(package.__path__[0]).glob("hopper_*.py")]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # restored after the test
    emulated: dict[str, ModuleType] = {}
    for name in names:
        if name not in emulated:
            load_emulated(name, Path(package.__path__[0]), emulated)
    monkeypatch.setattr(launch_hopper, "Launch", EmulatedLaunch)
    for module in (launch_hopper, importlib.import_module("onelaunch.ops.gla.boxes")):
        monkeypatch.setattr(module, "described", Descriptor)
    monkeypatch.setattr(launch_hopper, "processors", lambda device: 132)
    configure = importlib.import_module("onelaunch.ops.gla.configure_hopper")

    def pass_segments(ctas, chunks, multiprocessors, chunk, rate):
        return configure.recomputed_segments(chunks, segments, rate)[1] if recompute and rate else configure.Segments(segments)

    monkeypatch.setattr(launch_hopper, "pass_segments", pass_segments)
    monkeypatch.setattr(launch_hopper, "pass_groups", lambda *_: groups)
    return launch_hopper
