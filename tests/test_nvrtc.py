"""Tests of CUDA C++ without a GPU: compilation, the cache on disk, errors, tensor maps, and packed arguments.

``prose`` and ``prose.raises`` compare wording with the test's entries in ``tests/snapshots/prose.txt``. A test fails if it does
not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
``tests/test_nvrtc_launch.py`` imports ``SCALE``, ``SCALE_KINDS`` and ``compiled``, and launches ``scale`` on a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onelaunch import cuda
from onelaunch.cuda import Source, compile_now, compile_source, compiler, module, tensor_map
from onelaunch.errors import CacheNotice, CompileError, CompilerMissing

compiled = pytest.mark.skipif(cuda.missing() is not None, reason=f"{cuda.missing()}")

SCALE = Source(
    "scale.cu",
    """
    #include "twice.cuh"
    extern "C" __global__ void scale(const float* x, float* y, long long count, int offset, float factor, const float* shift) {
        const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
        if (i < count) y[i] = twice(x[i]) * factor * TIMES + offset + (shift ? *shift : 0.0f);
    }
    """,
    "scale",
    headers=(("twice.cuh", "__device__ float twice(float value) { return 2 * value; }"),),
    defines=(("TIMES", 3),),
)
SCALE_KINDS: tuple[cuda.Kind, ...] = ("pointer", "pointer", "i64", "i32", "f32", "pointer")
"""Kinds of the arguments of ``scale``, in their order."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Give the test an empty cache folder, and clear what this process has cached."""
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    compile_source.cache_clear()
    yield tmp_path
    compile_source.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """Return a list to which each call of the compiler appends its architecture; a source read from the cache adds nothing."""
    asked = []

    def compile_and_count(source, architecture):
        asked.append(architecture)
        return compile_now(source, architecture)

    monkeypatch.setattr(compiler, "compile_now", compile_and_count)
    return asked


def as_another_process(architecture="sm_90a"):
    """Compile ``SCALE``, or read it from the cache folder, as a process that has nothing in memory."""
    compile_source.cache_clear()
    return compile_source(SCALE, architecture)


# Compiling


@compiled
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_a_kernel_compiles_without_a_gpu(architecture):
    found = compile_now(SCALE, architecture)
    assert found.cubin.startswith(b"\x7fELF")
    assert f".target {architecture}" in found.ptx
    assert ".entry scale(" in found.ptx
    assert found.log == ""


@compiled
def test_the_second_process_reads_what_the_first_compiled(cache, compilations):
    first = as_another_process()
    assert as_another_process() == first
    assert compile_source(SCALE, "sm_90a") is compile_source(SCALE, "sm_90a")
    assert compilations == ["sm_90a"]


@compiled
def test_the_cache_key_covers_everything_that_determines_the_code(cache, compilations, monkeypatch):
    as_another_process()
    as_another_process("sm_100a")
    others = [
        replace(SCALE, text=SCALE.text + "\n"),
        replace(SCALE, defines=(("TIMES", 4),)),
        replace(SCALE, headers=(("twice.cuh", "__device__ float twice(float value) { return value + value; }"),)),
    ]
    for other in others:
        compile_source(other, "sm_90a")
    monkeypatch.setattr(compiler, "version", lambda: (99, 9))
    as_another_process()
    assert len(compilations) == 6  # two architectures, three other sources, and another compiler
    assert len(list((cache / "cubins").iterdir())) == 6


@compiled
# Ways to damage a file of the cache: empty it, cut off its end, or replace it by an ELF file's first bytes and zeros.
@pytest.mark.parametrize("harm", [lambda data: b"", lambda data: data[:-40], lambda data: b"\x7fELF" + b"\0" * len(data)])
def test_an_incomplete_cache_file_is_compiled_again(harm, cache, compilations):
    whole = as_another_process()
    (path,) = (cache / "cubins").iterdir()
    kept = path.read_bytes()
    path.write_bytes(harm(kept))
    with pytest.warns(CacheNotice, match=path.name):
        assert as_another_process() == whole
    assert compilations == ["sm_90a"] * 2
    assert path.read_bytes() == kept


@compiled
def test_compilation_works_without_a_writable_cache(cache, compilations, monkeypatch):
    (cache / "file").write_text("where the folder would be")
    monkeypatch.setenv("ONELAUNCH_CACHE", str(cache / "file"))
    with pytest.warns(CacheNotice, match="ONELAUNCH_CACHE") as said:
        assert as_another_process() == as_another_process()
    assert compilations == ["sm_90a"] * 2
    assert len(said) == 1


@compiled
def test_compile_errors_show_file_line_and_log(cache, prose):
    broken = replace(SCALE, name="broken.cu", text='extern "C" __global__ void scale() {\n  int x = unknown;\n}')
    with prose.raises(CompileError, match="broken.cu", mask={r"(?s)\n.*": "\n<log>"}) as raised:
        compile_source(broken, "sm_90a")
    assert 'broken.cu(2): error: identifier "unknown"' in raised.value.log
    assert not (cache / "cubins").exists()


@compiled
def test_an_architecture_that_nvrtc_does_not_know_is_named(prose):
    with prose.raises(CompileError, match="sm_1a", mask={r"(?s)\n.*": "\n<log>"}):
        compile_now(SCALE, "sm_1a")


def test_the_compiler_is_found_if_its_bindings_are_installed():
    """Without the compiler, all tests of CUDA C++ would be skipped without notice, here and among the kernels."""
    pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")
    assert cuda.missing() is None


@pytest.fixture
def forgotten():
    """Clear what was found out about installed packages, before the test and after it."""
    for answer in (cuda.version, cuda.missing):
        answer.cache_clear()
    yield
    for answer in (cuda.version, cuda.missing):
        answer.cache_clear()


@pytest.mark.parametrize("name", ["cuda", "cuda.bindings", "cuda.bindings.nvrtc"])
def test_without_the_packages_the_message_says_what_to_install(name, forgotten, monkeypatch, prose):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setitem(sys.modules, name, None)
    with prose.raises(CompilerMissing, match=r"'onelaunch\[cuda\]'"):
        compile_now(SCALE, "sm_90a")
    prose(cuda.missing())


def test_bindings_without_their_library_are_reported(forgotten, monkeypatch, prose):
    def absent():
        raise RuntimeError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace(nvrtcVersion=absent))
    with prose.raises(CompilerMissing, match="NVRTC"):
        cuda.version()
    assert cuda.missing() is not None


def test_a_packaged_file_is_read():
    assert cuda.read("onelaunch.workbench.report", "page.css").strip()


# Tensor maps

# Valid arguments of tensor_map: sizes and box in elements, innermost dimension first; strides in bytes, of the outer dimensions.
MAP = {"dtype": torch.bfloat16, "address": 4096, "sizes": (256, 100), "strides": (512,), "box": (64, 100)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": torch.float64}, "dtype"),
        ({"sizes": (256,)}, "sizes"),
        ({"strides": (512, 512)}, "strides"),
        ({"address": 4100}, "address"),
        ({"strides": (520,)}, "strides"),
        ({"strides": (-512,)}, "strides"),
        ({"sizes": (256, 0)}, "sizes"),
        ({"box": (64, 257)}, "box"),
        ({"swizzle": 16}, "swizzle"),
        ({"box": (128, 100)}, "box"),
        ({"box": (4, 100), "swizzle": 0}, "box"),
    ],
)
def test_tensors_that_tma_cannot_address_are_refused_with_the_reason(wrong, message, prose):
    with prose.raises(ValueError, match=message):
        tensor_map(**MAP | wrong)


def test_packed_arguments_have_the_kernels_offsets():
    layout, offsets = module._layout(("i32", "pointer", "f32", "map", "i32", "i64"))
    assert offsets == [0, 8, 16, 128, 256, 264]
    assert layout.size == 272
    packed = layout.pack(-1, 1 << 63, 1.0, b"\xab" * 128, 7, -2)
    assert packed[8:16] == (1 << 63).to_bytes(8, "little")
    assert packed[128:256] == b"\xab" * 128
    assert packed[264:] == (-2).to_bytes(8, "little", signed=True)
