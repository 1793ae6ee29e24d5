"""Configuration of the variant ``one_launch``: how CTAs share a layer, the layout of shared memory, and the kernel's source.

``launch_step.py`` asks for the configuration and the kernel of a call, and ``variants/one_launch.py`` for the reason why there is
none. The CUDA files are in ``kernels/``; their sizes and offsets are the constants of a header that :func:`header` generates.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from onelaunch import cuda
from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from onelaunch.kernels.common.layout import cdiv, power_of_2
from onelaunch.launch.launch import CudaKernel, Mma
from onelaunch.wording import listing

MOST_ROWS = 64
"""Most rows of x, B T. More would leave no room for the ring of weights, and cost more than reading the weights."""

HEAD_SIZES = (32, 64, 128, 256)
"""Sizes K and V that the kernel can divide among the CTAs, warps and lanes of a head."""

WARPS = 8
"""Number of consumer warps; a ninth warp copies the weights."""

CHUNK = 16 * 1024
"""Bytes of a stage of the ring. Bulk copies of this size reach the full bandwidth with one issuing thread."""

FEWEST_STAGES = 3
"""Least number of stages: 48 KB in flight on each SM are what the bandwidth of an H200 needs."""

_OPERAND_BYTES = 64 * 1024
"""Most bytes of a slab of the operand, the rows of x or of the gated o, in shared memory."""

_CTA_BYTES = 1024
"""Bytes of an SM's shared memory that each CTA takes beside its own."""

_STATE_FLOATS = 64
"""Most numbers of the state in a thread's registers."""

_MORE_BARRIERS = 6
"""Number of mbarriers beside those of the ring.

They are for 4 boxes of an operand; one says that all is read, and one that a first sequence is published.
"""

_BLOCK_ROWS, _BLOCK_SEQUENCES = 16, 4
"""Most rows whose q, k and decays are staged at once, and most sequences of a CTA that has whole ones."""

FLIGHT = 4
"""Most chunks on their way to a CTA at once. More of them delay those that are needed first, and what CTAs exchange."""

OVERLAP, AHEAD = True, 4
"""Flag that a launch may begin while the one before it ends, and number of chunks that a CTA prefetches into L2 until then.

On an H100 at D = 2048 steps of 1 to 16 sequences take 0.6 to 1.3 us less with it, one behind the other in a graph. With 8 chunks,
those of q and k but for the low-rank factor, most take longer than without.
"""

RESIDENT_ROWS = 2
"""Most rows of x with which an SM has room for two CTAs, so that one of the next launch starts beside one of this launch.

Each then has half of the shared memory, and at most 96 registers per thread. All times are of an H100 at D = 2048. When all CTAs
still polled tagged words for the gated o, launches that overlap took 0.2 us less at 1 row with two CTAs than with one, and 0.4
more at 2 rows (20.1 and 20.3; 22.8 and 22.4), where copied states leave two CTAs a ring of 4 stages. With a counter in place of
these words two took 18.3 and 20.0 us. Not measured with a counter are one CTA at 1 and 2 rows, and two at 3 and 4 rows, for which
only states that are not copied leave enough stages.
"""

TAGGED_ROWS = 16
"""Most rows of x whose exchange within a head takes place in tagged words.

They lie in the zeroed memory of which captured calls have a reserve. All CTAs exchange the gated o behind a grid barrier: on an
H100 polls of tagged words for it took 0.7 to 2.8 us more at 1 to 4 rows.
"""

COPIED_ROWS = 4
"""Most rows of x with which the states are copied to shared memory early, where value channels are divided among CTAs.

Loads into registers would have to land before q and k are asked for, see docs/notebook/gla_layer.md. Up to 4 rows that is not
timed by itself: with two other changes it took 0.1 us less at 1 row and 0.8 at 2 and 4 (H100). With more rows of several steps it
took 0.4 less at 16 steps, 1.2 at 64, and 0.1 more at 4 sequences of 4.
"""

BULK, PROXY_FENCES = True, False
"""Flags that CTAs with whole sequences store states from the ring, and order gated o for TMA by proxy fences alone.

On an H100 the latter takes 0.4 us less at 8 to 64 rows, but tests of chains with it have not run on a GPU. The former is not
timed by itself. It saves registers: at 8 rows two CTAs per SM do not spill with it, and took 26.7 us, both flags set, where one
took 27.5.
"""

MARKERS, ARRIVALS = 8, 40
"""Number of profile markers of a CTA: of its phases, and of the first chunks that it copies."""

_POINTERS: list[cuda.Kind] = ["pointer"] * 12
_MAPS: list[cuda.Kind] = ["map"] * 6
KINDS: tuple[cuda.Kind, ...] = (*_POINTERS, "i32", "i32", "f32", "f32", *_MAPS)
"""Kinds of the kernel's arguments, in the order of ``gla_layer_step`` in ``step.cu``."""


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Sizes of a layer, and how a launch divides it."""

    heads: int
    keys: int
    values: int
    width: int
    rank: int | None
    """Inner size R of the decay's factors; ``None`` with one decay per head."""
    float_norm: bool
    """Flag that the norm's weight is float32."""
    members: int
    """Number of CTAs that share a head."""
    rows: int
    """Rows of x that shared memory has room for: B T rounded up to a power of 2."""
    slots: int
    """Number of sequences whose states are in registers at once; ``8 / slots`` warps share one."""
    block_rows: int
    """Rows whose q, k and decays are in shared memory at once."""
    one_step: bool
    """Flag that every sequence has one step, T = 1."""
    by_sequence: bool = False
    """Flag that a CTA has whole sequences of its head, and not value channels of all of them."""
    flight: int = FLIGHT
    """Most chunks on their way at once."""
    tagged: bool = True
    """Flag that the CTAs of a head exchange tagged words, and do not count arrivals."""
    copied: bool = False
    """Flag that the first states are copied to shared memory early, and not loaded into registers; unless ``by_sequence``."""
    bulk: bool = False
    """Flag that a CTA with whole sequences stores their states by bulk copies from the ring; needs at most 128 values a head."""
    paired: bool = False
    """Flag that two CTAs share by multicast the gated o that they read; only where CTAs have whole sequences."""
    paired_x: bool = False
    """Flag that pairs of CTAs also share x."""
    early: bool = False
    """Flag that gated o of the first 8 of 9 to 16 sequences is published and copied before the others'; needs 8 CTAs a head."""
    proxy_fences: bool = False
    """Flag that writers and readers of whole sequences' gated o order it for TMA by proxy fences alone."""
    overlap: bool = OVERLAP
    """Flag that a launch may begin while the one before it ends (programmatic dependent launch)."""
    ahead: int = AHEAD
    """Chunks of weights that a CTA prefetches into L2 until the launch before has ended, if they overlap."""
    resident: int = 1
    """CTAs of an SM for which shared memory and registers have room."""
    profiled: bool = False
    """Flag that CTAs write profile markers."""

    def with_markers(self) -> StepConfig:
        """Return the configuration whose kernel writes profile markers."""
        return replace(self, profiled=True)

    @property
    def box_rows(self) -> int:
        """Rows of a box of an operand: all of them, or half if those of the first sequences are copied early."""
        return self.rows // (1 + self.publishes_early)

    @property
    def publishes_early(self) -> bool:
        """Flag that ``early`` suits the configuration."""
        return self.early and self.by_sequence and self.rows == 16 and self.members == 8 and self.block_rows == 2

    @property
    def counters(self) -> int:
        """Number of counters of arrivals."""
        return self.heads + 1 + self.publishes_early

    @property
    def cluster(self) -> int:
        """Number of CTAs of a cluster."""
        return 2 if self.by_sequence and (self.paired or self.paired_x) and self.ctas % 2 == 0 else 1

    @property
    def ctas(self) -> int:
        """Number of CTAs."""
        return self.heads * self.members

    @property
    def columns(self) -> int:
        """Rows of x rounded up to the columns of a matrix instruction."""
        return max(self.rows, 8)

    @property
    def boxed(self) -> bool:
        """Flag that operands lie in shared memory as TMA stores them."""
        return self.rows >= 8

    @property
    def exchanged(self) -> int:
        """Number of floats of a row that the CTAs of a head exchange."""
        ranks = 0 if self.rank is None else 4 * cdiv(self.rank, 4)
        return 2 * self.keys + ranks + (2 * self.values if self.by_sequence else 0)

    def tagged_words(self, rows: int) -> int:
        """Return the number of 32-bit words that the CTAs of heads exchange as tagged ones, for ``rows`` rows of x."""
        return self.heads * rows * self.exchanged if self.tagged else 0

    def operand_blocks(self, columns: int) -> int:
        """Return the 64-column blocks of a box of the operand, for slabs of ``columns``."""
        return min(CHUNK // (128 * max(self.box_rows, 8)), columns // 64)

    def operand_bytes(self, columns: int) -> int:
        """Return the bytes of a slab of the operand in shared memory: whole boxes, or padded rows."""
        if not self.boxed:
            return self.rows * (2 * columns + 64)
        blocks = self.operand_blocks(columns)
        return self.rows * 128 * blocks * cdiv(columns // 64, blocks)

    @property
    def slab(self) -> int:
        """Columns of x that are in shared memory at once."""
        return self._slab(self.width)

    @property
    def out_slab(self) -> int:
        """Columns of the gated o that are in shared memory at once."""
        return self._slab(self.heads * self.values)

    def _slab(self, columns: int) -> int:
        most = _OPERAND_BYTES // 2 // self.rows
        return columns if columns <= most else 1 << most.bit_length() - 1

    @property
    def out_tile(self) -> int:
        """Rows of a tile of the output weight: the most, up to 16, that leave every CTA a tile, and at least 4."""
        return next((rows for rows in (16, 8) if self.width // rows >= self.ctas), 4)

    @property
    def out_chunks(self) -> int:
        """Most chunks of the output weight of a CTA."""
        slabs, blocks = cdiv(self.heads * self.values, self.out_slab), self.chunk_blocks(self.out_tile, self.out_slab)
        return cdiv(self.width // self.out_tile, self.ctas) * slabs * cdiv(self.out_slab // 64, blocks)

    def chunk_blocks(self, rows: int, columns: int) -> int:
        """Return the 64-column blocks of a chunk, for tiles of ``rows`` rows and slabs of ``columns``."""
        return min(CHUNK // (128 * rows), columns // 64)

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Rows of a tile of q and k, of v and the gate, and of the decays' factor (``tile_rows`` of ``ring.cuh``)."""
        rank_rows = 1 if self.rank is None else cdiv(self.rank, self.members)
        return tuple(min(16, power_of_2(n)) for n in (self.keys // self.members, self.values // self.members, rank_rows))  # pyrefly: ignore[bad-return]


class _Sizes(NamedTuple):
    """Layout of a CTA's shared memory."""

    offsets: dict[str, int]
    """Offset of each array in bytes, by the name of its constant in the kernel."""
    stages: int
    """Number of stages of the ring, which takes what the arrays leave; below :data:`FEWEST_STAGES` if they do not fit."""
    bytes: int
    """Dynamic shared memory in bytes, with room to align it to 1024 bytes."""


def members_of(heads: int, keys: int, values: int, sms: int) -> int:
    """Return the number of CTAs per head, a power of 2: as many as there are SMs for, with 4 to 128 values each; 0 if none."""
    members = min(values // 4, keys, 1 << max(sms // heads, 1).bit_length() - 1) if heads <= sms else 0
    return members if members and values // members <= 128 else 0


def config_of(
    batch: int, length: int, width: int, heads: int, keys: int, values: int, rank: int | None, *, float_norm: bool, sms: int
) -> StepConfig | str:
    """Return the configuration of a call, or why there is none, as a predicate that completes "it ...".

    Args:
        batch: Number of sequences, B.
        length: Number of steps, T.
        width: Columns of x, D.
        heads: Number of heads, H.
        keys: Channels of a head's queries and keys, K.
        values: Channels of a head's values, V.
        rank: Inner size R of the decay's factors; ``None`` with one decay per head.
        float_norm: Flag that the norm's weight is float32.
        sms: Number of SMs; a cooperative launch has at most one CTA on each.
    """
    if not 0 < batch * length <= MOST_ROWS:
        return f"takes 1 to {MOST_ROWS} rows of x, B times T"
    if keys not in HEAD_SIZES or values not in HEAD_SIZES:
        return f"needs K and V to be one of {listing(map(str, HEAD_SIZES))}"
    if width % 64 or heads * values % 64 or width == 0:
        return "needs D and H times V in multiples of 64"
    members = members_of(heads, keys, values, sms)
    if not members:
        return f"needs one SM for each of the H heads, or two if V is 256; this GPU has {sms}"
    value_rows = values // members
    rows = power_of_2(batch * length)
    parts = max(WARPS // min(power_of_2(batch), WARPS), cdiv(keys * value_rows, 32 * _STATE_FLOATS))
    parts = min(parts, keys * value_rows // 128)  # a lane has at least one key channel
    if parts > WARPS:
        share = f"{keys * value_rows} with {members} CTAs per head"
        return f"needs at most 16384 numbers of a head's state for each CTA, and has {share}"
    slots = WARPS // parts
    by_sequence = length == 1 and batch >= members and rows >= 8
    least = 1 if by_sequence else slots
    block_rows = min(power_of_2(cdiv(batch, members)), _BLOCK_SEQUENCES) if by_sequence else max(slots, min(rows, _BLOCK_ROWS))
    sizes = (heads, keys, values, width, rank, float_norm, members, rows, slots)
    while True:
        config = StepConfig(*sizes, block_rows, length == 1, by_sequence, tagged=batch * length <= TAGGED_ROWS)
        for resident in (2, 1) if batch * length <= RESIDENT_ROWS else (1,):
            stages = _layout(replace(config, resident=resident)).stages
            if stages >= FEWEST_STAGES:
                config = replace(config, flight=min(FLIGHT, stages), resident=resident)
                copied, bulk = not by_sequence and batch * length <= COPIED_ROWS, BULK and by_sequence and values <= 128
                return with_settings(config, copied=copied, bulk=bulk, proxy_fences=PROXY_FENCES and by_sequence) or config
        if block_rows == least:
            return "needs more shared memory than an SM has: it takes fewer rows of x, a lower rank or smaller heads"
        block_rows //= 2


FEW_BY_SEQUENCE = {"rows": 8, "by_sequence": True, "block_rows": 1, "copied": False}
"""Settings with which CTAs have whole sequences although there are fewer of these than CTAs of a head, up to 8 of one step.

Some CTAs then have no state to advance. Operands have 8 rows, of which TMA fills the last with zeros. Not timed.
"""


def with_settings(config: StepConfig, **fields: Any) -> StepConfig | None:
    """Return the configuration with other settings, such as ``copied``; ``None`` if the ring has too few stages for them.

    With ``early`` it needs room for a CTA's rows of the output weight, behind which the first sequences' gated o is copied.
    """
    config = replace(config, **fields)
    stages = _layout(config).stages
    enough = max(FEWEST_STAGES, config.out_chunks if config.publishes_early else 0)
    return replace(config, flight=min(config.flight, stages)) if stages >= enough else None


@functools.lru_cache(maxsize=256)
def _layout(config: StepConfig) -> _Sizes:
    """Return the layout of shared memory: the ring first, so that its stages are aligned, then arrays, then mbarriers."""
    value_rows, key_rows = config.values // config.members, config.keys // config.members
    rank_rows = 1 if config.rank is None else cdiv(config.rank, config.members)
    ranks = 0 if config.rank is None else 4 * cdiv(config.rank, 4)
    parts, groups = WARPS // config.slots, WARPS // (2 if config.rows > 32 else 1)
    slabs = cdiv(config.heads * config.values, config.out_slab)
    out_rows = config.out_tile * cdiv(config.width // config.out_tile, config.ctas) if slabs > 1 else 0
    y_rows = max(2 * key_rows + rank_rows + 2 * value_rows, out_rows)
    block = config.block_rows
    if config.by_sequence:
        vectors, decays, low_rank, partial = block * config.exchanged, 4 * block * config.keys, 0, block * 4 * 32 * WARPS
        states = 0
    else:
        vectors, decays = max(block * 2 * config.keys, config.rows * config.heads), block * config.keys
        low_rank, partial = block * ranks, parts * block * value_rows
        states = config.slots * config.keys * value_rows if config.copied else 0
    arrays = {
        "OPERAND": max(config.operand_bytes(config.slab), config.operand_bytes(config.out_slab)),
        "SUMS": 4 * 2 * groups * 16 * (config.columns + 1),
        "Y": 4 * y_rows * (config.columns + 1),
        "QUERIES_KEYS": 4 * vectors,
        "DECAYS": 4 * decays,
        "LOW_RANK": 4 * low_rank,
        "STATES": 4 * states,
        "PARTIAL": 4 * partial,
        "DECAY_WEIGHT": 0 if config.rank is None else 2 * config.keys * config.rank,
        "DECAY_BIAS": 0 if config.rank is None else 2 * config.keys,
        "NORM_WEIGHT": (4 if config.float_norm else 2) * config.values,
    }
    arrays = {name: 16 * cdiv(size, 16) for name, size in arrays.items()}
    share = (HOPPER_SHARED_BYTES + _CTA_BYTES) // config.resident - _CTA_BYTES
    most = share - 1024 - 8 * _MORE_BARRIERS  # for the alignment to 1024 bytes
    stages = (most - sum(arrays.values())) // (CHUNK + 16)
    offsets, at = {}, max(stages, 0) * CHUNK
    for name, size in arrays.items():
        offsets[name], at = at, at + size
    offsets["FULL"] = at
    return _Sizes(offsets, stages, at + 16 * stages + 8 * _MORE_BARRIERS + 1024)


def header(config: StepConfig, timeout_cycles: int = 1 << 32) -> str:
    """Return the text of ``sizes.cuh``: sizes, flags and offsets of a configuration."""
    layout = _layout(config)
    numbers = {
        "HEADS": config.heads, "MEMBERS": config.members, "CTAS": config.ctas, "WIDTH": config.width, "KEYS": config.keys,
        "VALUES": config.values, "RANK": 1 if config.rank is None else config.rank, "ROWS": config.rows, "SLOTS": config.slots,
        "PARTS": WARPS // config.slots, "BLOCK_ROWS": config.block_rows, "STAGES": layout.stages, "SLAB": config.slab,
        "OUT_SLAB": config.out_slab, "OUT_TILE": config.out_tile, "MARKERS": MARKERS, "ARRIVALS": ARRIVALS, "MOST_PREFETCHED": 16,
        "FLIGHT": config.flight, "AHEAD": config.ahead, "RESIDENT": config.resident,
        **{f"{name}_AT": offset for name, offset in layout.offsets.items()},
    }  # fmt: skip
    flags = {
        "ONE_STEP": config.one_step,
        "BY_SEQUENCE": config.by_sequence,
        "COPIED": config.copied,
        "BULK": config.bulk,
        "EARLY": config.publishes_early,
        "PROXY_FENCES": config.proxy_fences,
        "PAIRED": config.cluster > 1 and config.paired,
        "PAIRED_X": config.cluster > 1 and config.paired_x,
        "BOXED": config.boxed,
        "TAGGED": config.tagged,
        "OVERLAP": config.overlap,
        "PER_HEAD": config.rank is None,
        "FLOAT_NORM": config.float_norm,
        "PROFILED": config.profiled,
    }
    lines = ["#pragma once", *(f"constexpr int {name} = {value};" for name, value in numbers.items())]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    lines += [f"constexpr long long TIMEOUT_CYCLES = {timeout_cycles}LL;"]
    return "\n".join([*lines, f"constexpr float QUERY_SCALE = {config.keys**-0.5:.9e}f;", ""])


_FILES = ("ring.cuh", "product.cuh", "recurrence.cuh", "way_out.cuh", "sequences.cuh")
"""Headers that ``step.cu`` includes, in the order in which they depend on each other."""


def source_of(config: StepConfig, **options: int) -> cuda.Source:
    """Return the source of a configuration's kernel; ``options`` are those of :func:`header`."""
    here = "onelaunch.ops.gla_layer.kernels"
    files = [cuda.include("hopper.cuh"), cuda.include("machine.cuh"), *((name, cuda.read(here, name)) for name in _FILES)]
    files.append(("sizes.cuh", header(config, **options)))
    return cuda.Source("step.cu", cuda.read(here, "step.cu"), "gla_layer_step", tuple(files))


def shared_bytes_of(config: StepConfig) -> int:
    """Return the dynamic shared memory of a CTA in bytes."""
    return _layout(config).bytes


def unwatched_of(config: StepConfig) -> tuple[int, int]:
    """Return the offset of the mbarriers in shared memory and their number, for tests that look for races before them."""
    layout = _layout(config)
    return layout.offsets["FULL"], 2 * layout.stages + _MORE_BARRIERS


@functools.lru_cache(maxsize=256)
def kernel_of(config: StepConfig) -> CudaKernel:
    """Return the kernel of a configuration, not compiled yet."""
    return CudaKernel(
        source_of(config), KINDS, threads=32 * (WARPS + 1), shared_bytes=shared_bytes_of(config), cooperative=True,
        cluster=config.cluster, overlap=config.overlap, mma=Mma.WARP,
    )  # fmt: skip
