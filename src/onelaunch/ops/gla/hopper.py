"""The variant ``hopper`` of ``gla``: walks along time with the state in registers, and decays under matrix products."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.device.hardware import is_hopper
from onelaunch.kernels.tma import descriptor_type
from onelaunch.launch.build import KernelBuild
from onelaunch.operation import Query
from onelaunch.operation.requirements import cannot_scan
from onelaunch.ops.gla.contract import GlaCall, gla
from onelaunch.ops.gla.triton_variants import Results, attend, no_value_gate

KEYS = (64, 128, 256)
"""Sizes K of heads: a warpgroup's registers hold at most 64 values of 256 channels."""


@gla.variant(
    "hopper", launches=1, backward_launches=3, fuses=("decay", "scores", "states"), hands=(), chunk=64,
    backward_hands=("rounded_states", "rounded_states"), gemm="gluon", architectures=("sm_90a",),
)  # fmt: skip
def hopper(call: GlaCall) -> Results:
    """One launch along time, or two where T is cut into parts to fill the chip: decays under products, states in registers.

    Backward three: two walks and the gradients of all chunks; one more for each walk of parts, and two of PyTorch's that add up
    what panels give one decay per head.
    """
    return attend(call, "hopper")


hopper.supports(cannot_scan)
hopper.supports(no_value_gate)


@hopper.supports
def fits(query: Query) -> str | None:
    """What the copy engine, the registers and the gate allow."""
    if not is_hopper(torch.device(query.device)):
        return "needs a Hopper GPU (compute capability 9.x)"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "needs float16 or bfloat16"
    batch, length, heads, keys, values = query.sizes
    if keys not in KEYS or values % 64:
        return "needs K of 64, 128 or 256 and V that is a multiple of 64"
    if not batch * length * heads:
        return "needs at least one step"
    if "final_state" in query.flags:
        return "returns no final state: float32 is more than its products of 16-bit numbers are good for"
    if "float32_decay" in query.flags and "scalar_decay" not in query.flags:
        return "needs log-decays per channel in the dtype of q"
    return why_no_gradients(query) if query.grad else None


def why_no_gradients(query: Query) -> str | None:
    """What the backward pass leaves to others: float32 results, and a dtype whose range is too narrow for its products."""
    if query.dtype is torch.float16:
        return "trains in bfloat16 alone: products of gradients leave the range of float16"
    if "initial_state" in query.flags:
        return "has no gradient of an initial state"
    if "float32_decay" in query.flags:
        return "has no gradient of float32 log-decays"
    return None


def box_of(columns: int) -> str:
    """The type of a descriptor of boxes of a chunk's steps, in bfloat16."""
    return descriptor_type([64, columns], torch.bfloat16)


def build(name: str, kernel: Any, boxes: dict[str, str], constants: dict[str, Any], warps: int) -> KernelBuild:
    """A kernel as an unpacked call in bfloat16 launches it."""
    numbers = dict.fromkeys(("T", "heads", "segments", "part_steps", "sequences", "rows", "values"), "i32") | {"scale": "fp32"}
    numbers |= dict.fromkeys(("pitch", "out_pitch"), "i32:16")
    wide = dict.fromkeys(("part_states", "part_decays"), "*fp32")
    known = {**numbers, **wide, **boxes}
    signature = {
        argument: "constexpr" if argument in constants else known.get(argument, "*bf16") for argument in kernel.arg_names
    }
    return KernelBuild(name, kernel, signature, constants, num_warps=warps, matrix=True)


def walk_build(
    name: str, keys: int, values: int, *, scalar: bool, read: bool, reverse: bool, keep: bool, parts: bool = False,
    spread: bool = False,
) -> KernelBuild:  # fmt: skip
    """A walk along all of T, or along parts of it."""
    from onelaunch.ops.gla import hopper_launch
    from onelaunch.ops.gla.hopper_walk_kernels import walk_kernel

    tiles = hopper_launch.walk_tiles(keys, values, scalar=scalar, keep=keep, read=read)
    boxes = {"adders": box_of(keys), "v": box_of(64)}
    absent = ["initial", "offsets", *(["g"] if scalar else ["log_decay"])]
    absent += [] if parts else ["part_states", "part_decays"]
    boxes |= dict.fromkeys(("states", "states_low"), box_of(keys)) if tiles.staged else {}
    absent += [] if keep else ["states"]
    absent += [] if keep and scalar and not reverse else ["states_low"]
    boxes |= {} if scalar else {"g": box_of(keys)}
    if read:
        boxes |= {"readers": box_of(keys), "out_tiles": box_of(64)}
    else:
        absent += ["readers", "o", "out_tiles"]
    constants = {
        "SLICES": values // (64 * tiles.groups), "LIMIT": 40.0, "PACKED": False,
        "READ": read, "REVERSE": reverse, "KEEP": keep, "STAGED": keep and tiles.staged, "SPREAD": spread,
        "INITIAL": False,
        "PARTS": parts, "EXACT": keep or not scalar, "SCORES": tiles.scores,
        **tiles.options("ATTEND", "PREPARE"), **dict.fromkeys(absent),
    }  # fmt: skip
    return build(name, walk_kernel, boxes, constants, 4)


def sum_build(name: str, keys: int, values: int, *, scalar: bool, reverse: bool) -> KernelBuild:
    """What parts of T add to the state."""
    from onelaunch.ops.gla import hopper_launch
    from onelaunch.ops.gla.hopper_sum_kernels import sum_kernel

    tiles = hopper_launch.sum_tiles(keys, values)
    boxes = {"adders": box_of(keys), "v": box_of(64), "g": box_of(keys)}
    constants = {
        "SLICES": values // (64 * tiles.groups), "PACKED": False, "REVERSE": reverse, "EXACT": True,
        **tiles.options("ADD", "FADE"), **dict.fromkeys(["offsets", "g" if scalar else "log_decay"]),
    }  # fmt: skip
    return build(name, sum_kernel, boxes, constants, 4)


def gradients_build(
    name: str, keys: int, values: int, *, scalar: bool, normalizer: float | None = None, spread: bool = False
) -> KernelBuild:
    """Gradients of q, k and g, or of what log-decays with a ``normalizer`` were made of."""
    from onelaunch.ops.gla import hopper_launch
    from onelaunch.ops.gla.hopper_gradient_kernels import gradients_kernel

    block = min(values, 128)
    square = dict.fromkeys(("q", "k", "g", "dq_tiles", "dk_tiles", "dg_tiles"), box_of(64))
    boxes = {
        **square,
        **dict.fromkeys(("v", "do"), box_of(block)),
        **dict.fromkeys(("states", "dstates", "states_low"), descriptor_type([64 if spread else block, 64], torch.bfloat16)),
    }
    absent = ["offsets", *(["g", "dg_tiles"] if scalar else ["log_decay", "states_low"])]
    boxes |= {"dg": "*fp32"} if scalar else {}
    constants = {
        "PANELS": keys // 64, "STEPS": 0, "LIMIT": 40.0, "NORMALIZER": normalizer, "SPREAD": spread, "PACKED": False,
        **dict.fromkeys(absent),
    }  # fmt: skip
    return build(name, gradients_kernel, boxes, constants, hopper_launch.GRADIENT_WARPS)


@hopper.kernels
def _(architecture: str) -> list[KernelBuild]:
    """For the heads of most models, and for the largest K: more registers, other tiles."""
    if architecture not in hopper.tags["architectures"]:
        return []
    builds = []
    for keys, values in ((128, 128), (256, 256)):
        for scalar in (False, True):
            said = f"K = {keys}, V = {values}, decay per {'head' if scalar else 'channel'}"
            for parts in (False, True):
                of = f"of parts, {said}" if parts else said
                builds += [
                    walk_build(f"walk, {of}", keys, values, scalar=scalar, read=True, reverse=False, keep=False, parts=parts),
                    walk_build(
                        f"walk for states, {of}", keys, values, scalar=scalar, read=False, reverse=False, keep=True, parts=parts
                    ),
                    walk_build(f"walk back, {of}", keys, values, scalar=scalar, read=True, reverse=True, keep=True, parts=parts),
                ]
            builds += [
                sum_build(f"sums, {said}", keys, values, scalar=scalar, reverse=False),
                sum_build(f"sums back, {said}", keys, values, scalar=scalar, reverse=True),
                gradients_build(f"gradients, {said}", keys, values, scalar=scalar),
            ]
        said = f"K = {keys}, V = {values}"
        builds += [
            walk_build(f"walk that keeps states, {said}", keys, values, scalar=False, read=True, reverse=False, keep=True),
            gradients_build(f"gradients through logsigmoid, {said}", keys, values, scalar=False, normalizer=16.0),
        ]
    for keys in (64, 128):
        said = f"K = {keys}, V = 128"
        for reverse in (False, True):
            name = f"walk {'back ' if reverse else ''}for states in lent room, {said}"
            builds.append(walk_build(name, keys, 128, scalar=False, read=reverse, reverse=reverse, keep=True, spread=True))
        name = f"gradients from states in lent room, {said}"
        builds.append(gradients_build(name, keys, 128, scalar=False, normalizer=16.0, spread=True))
    return builds
