"""CUDA C++: compiled without a GPU, kept on disk; what cannot be compiled or addressed says why."""

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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and nothing remembered by this process."""
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    compile_source.cache_clear()
    yield tmp_path
    compile_source.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """The architectures that the compiler was called for."""
    asked = []

    def compile_and_count(source, architecture):
        asked.append(architecture)
        return compile_now(source, architecture)

    monkeypatch.setattr(compiler, "compile_now", compile_and_count)
    return asked


def as_another_process(architecture="sm_90a"):
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
def test_whatever_decides_the_code_decides_its_place(cache, compilations, monkeypatch):
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
    assert len(compilations) == 6
    assert len(list((cache / "cubins").iterdir())) == 6


@compiled
@pytest.mark.parametrize("harm", [lambda data: b"", lambda data: data[:-40], lambda data: b"\x7fELF" + b"\0" * len(data)])
def test_a_file_that_is_not_whole_is_compiled_again(harm, cache, compilations):
    whole = as_another_process()
    (path,) = (cache / "cubins").iterdir()
    kept = path.read_bytes()
    path.write_bytes(harm(kept))
    with pytest.warns(CacheNotice, match=path.name):
        assert as_another_process() == whole
    assert compilations == ["sm_90a"] * 2
    assert path.read_bytes() == kept


@compiled
def test_a_folder_that_cannot_be_written_is_done_without(cache, compilations, monkeypatch):
    (cache / "file").write_text("where the folder would be")
    monkeypatch.setenv("ONELAUNCH_CACHE", str(cache / "file"))
    with pytest.warns(CacheNotice, match="ONELAUNCH_CACHE") as said:
        assert as_another_process() == as_another_process()
    assert compilations == ["sm_90a"] * 2
    assert len(said) == 1


@compiled
def test_a_source_that_does_not_compile_shows_file_line_and_log(cache, prose):
    broken = replace(SCALE, name="broken.cu", text='extern "C" __global__ void scale() {\n  int x = unknown;\n}')
    with prose.raises(CompileError, match="broken.cu", mask={r"(?s)\n.*": "\n<log>"}) as raised:
        compile_source(broken, "sm_90a")
    assert 'broken.cu(2): error: identifier "unknown"' in raised.value.log
    assert not (cache / "cubins").exists()


@compiled
def test_an_architecture_that_nvrtc_does_not_know_is_named(prose):
    with prose.raises(CompileError, match="sm_1a", mask={r"(?s)\n.*": "\n<log>"}):
        compile_now(SCALE, "sm_1a")


def test_the_compiler_is_found_where_its_bindings_are():
    """Else all tests of CUDA C++ would be skipped, here and among the kernels, and nobody would notice."""
    pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")
    assert cuda.missing() is None


@pytest.fixture
def forgotten():
    """What was found out about the packages is found out again, during the test and after it."""
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
def test_what_the_copy_engine_cannot_address_says_why(wrong, message, prose):
    with prose.raises(ValueError, match=message):
        tensor_map(**MAP | wrong)


def test_arguments_lie_where_the_kernel_expects_them():
    layout, offsets = module._layout(("i32", "pointer", "f32", "map", "i32", "i64"))
    assert offsets == [0, 8, 16, 128, 256, 264]
    assert layout.size == 272
    packed = layout.pack(-1, 1 << 63, 1.0, b"\xab" * 128, 7, -2)
    assert packed[8:16] == (1 << 63).to_bytes(8, "little")
    assert packed[128:256] == b"\xab" * 128
    assert packed[264:] == (-2).to_bytes(8, "little", signed=True)
