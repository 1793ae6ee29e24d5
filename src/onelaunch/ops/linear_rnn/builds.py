"""The kernels that each variant of ``linear_rnn`` launches, as a plain training call does, for the inspector."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.builds import Build, KernelBuild
from onelaunch.ops.copy_engine import descriptor_type
from onelaunch.ops.gated_scan import triton_variants as scan
from onelaunch.ops.linear_rnn.hopper import fused_hopper
from onelaunch.ops.linear_rnn.triton_variants import (
    fused_chunked,
    fused_stepwise,
    semi_fused,
    three_launch,
    three_launch_cublas,
)

FLAGS = {"INITIAL": False, "FINAL": False, "KEEP": True}


def matmul_build() -> KernelBuild:
    """The plain matrix product."""
    from onelaunch.ops.linear_rnn import kernels, launch

    tiles = launch.matmul_tiles(8192, 64, 2)
    constants = {
        "a_stride_k": 1, "b_stride_n": 1, "BM": tiles.m, "BN": tiles.n, "BK": tiles.k, "GROUP_M": tiles.group,
    }  # fmt: skip
    special = dict.fromkeys(("a", "b", "out"), "*fp16") | dict.fromkeys(constants, "constexpr")
    signature = {name: special.get(name, "i32:16") for name in kernels.matmul_kernel.arg_names}
    return KernelBuild("matmul", kernels.matmul_kernel, signature, constants, tiles.warps, tiles.stages, matrix=True)


def stepwise_build() -> KernelBuild:
    """The vector-matrix product per step."""
    from onelaunch.ops.linear_rnn import kernels, launch

    tiles = launch.project_tiles(4, 2048, 256, 64, 2)
    return scan.scan_build(
        "stepwise", kernels.stepwise_kernel, tiles.scan, launch.stepwise_warps(256),
        PACKED=False, **{**FLAGS, "BV": launch.STEPWISE_CHANNELS, "BD": 256},
    )  # fmt: skip


def chunked_build() -> KernelBuild:
    """The portable single launch."""
    from onelaunch.ops.linear_rnn import kernels, launch

    tiles = launch.project_tiles(4, 2048, 256, 64, 2)
    return scan.scan_build(
        "project_scan_gate", kernels.project_scan_gate_kernel, tiles.scan, tiles.scan.warps,
        BD=tiles.inner, EVEN_D=True, stages=tiles.stages, matrix=True, PACKED=False, **FLAGS,
    )  # fmt: skip


def hopper_build(name: str, kernel: Any, boxes: dict[str, list[int]], constants: dict[str, Any], warps: int) -> KernelBuild:
    """A kernel in Gluon; ``boxes`` are what its descriptors move at once."""
    constants = {**constants, "EVEN": True, "initial": None, **FLAGS}
    special = dict.fromkeys(("log_decay", "gate", "y", "v"), "*fp16") | dict.fromkeys(("final", "carries"), "*fp32")
    special |= {argument: descriptor_type(box, torch.float16) for argument, box in boxes.items()}
    special |= dict.fromkeys(("words", "counter"), "*i64") | dict.fromkeys(("T", "tiles", "pairs"), "i32")
    signature = {
        argument: "constexpr" if argument in constants else special.get(argument, "i32:16") for argument in kernel.arg_names
    }
    return KernelBuild(name, kernel, signature, constants, num_warps=warps, matrix=True)


def hopper_chunked_builds() -> list[KernelBuild]:
    """The single launch on Hopper, with narrow tiles and wide ones, and with more columns than its stages hold."""
    from onelaunch.ops.linear_rnn.hopper_chunked_kernels import project_scan_gate_chunked_hopper_kernel as kernel
    from onelaunch.ops.linear_rnn.hopper_launch import chunked_tiles

    builds = []
    for batch, width in ((1, 256), (16, 256), (16, 1024)):
        tiles = chunked_tiles(132, batch, 2048, width, 64)
        boxes = {"x": [tiles.scan.steps, tiles.inner], "weight": [tiles.inner, tiles.scan.channels]}
        constants = {
            "WIDTH": width, "CHANNELS": 64, "DECAY_STRIDE": 64, "GATE_STRIDE": 64,
            "STAGES": tiles.stages, "GROUP": tiles.scan.group,
        }  # fmt: skip
        name = f"project_scan_gate_chunked_hopper, {tiles.scan.channels} channels, D={width}"
        builds.append(hopper_build(name, kernel, boxes, constants, tiles.scan.warps))
    return builds


def hopper_persistent_build() -> KernelBuild:
    """The single launch for wide layers on Hopper."""
    from onelaunch.ops.linear_rnn.hopper_kernels import project_scan_gate_hopper_kernel as kernel
    from onelaunch.ops.linear_rnn.hopper_launch import PERSISTENT

    return hopper_build("project_scan_gate_hopper", kernel, PERSISTENT.boxes(2), PERSISTENT.options(), 4)


@three_launch.kernels
def _(architecture: str) -> list[Build]:
    return [matmul_build(), *scan.separate.builds(architecture)]


@three_launch_cublas.kernels
def _(architecture: str) -> list[Build]:
    return scan.separate.builds(architecture)


@semi_fused.kernels
def _(architecture: str) -> list[Build]:
    return scan.fused.builds(architecture)


@fused_stepwise.kernels
def _(architecture: str) -> list[Build]:
    return [stepwise_build(), *scan.fused.builds(architecture)[1:]]


@fused_chunked.kernels
def _(architecture: str) -> list[Build]:
    hopper = hopper_chunked_builds() if architecture == "sm_90a" else []
    return [*hopper, chunked_build(), *scan.fused.builds(architecture)[1:]]


@fused_hopper.kernels
def _(architecture: str) -> list[Build]:
    if architecture not in fused_hopper.tags["architectures"]:
        return []
    return [hopper_persistent_build(), *scan.fused.builds(architecture)[1:]]
