"""Tests of first calls on a GPU: what is compiled where, and that results, captures, ``torch.compile`` and errors are as ever.

Each test starts processes whose caches are in a folder of the test's: the first process of a folder finds them empty.
``test_first_call.py`` has the tests without a GPU.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.gpu

LOG = logging.getLogger(__name__)
"""Log of durations, shown by ``pytest -o log_cli=true -o log_cli_level=INFO``."""

BEGIN = """
import json, threading, time, warnings
import torch, triton
import onelaunch
from onelaunch import nn, ops
from onelaunch.errors import CompileNotice

alone, together = [], []

def listen(*, src, cache_hit, **_):
    if not cache_hit:
        (together if threading.current_thread().name.startswith("onelaunch-compile") else alone).append(src.name)

triton.knobs.compilation.listener = listen
torch.manual_seed(0)
torch.ones(8, device="cuda").sum().item()

def heads(grad=True, batch=2, length=256, width=64):
    made = [torch.randn(batch, length, 4, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    made.append(-torch.rand(batch, length, 4, width, device="cuda").bfloat16())
    return [each.requires_grad_(grad) for each in made]

def check(tensors):
    torch.cuda.synchronize()
    return [float(each.double().abs().sum()) for each in tensors]

begin = time.perf_counter()
"""

END = """
torch.cuda.synchronize()
print(json.dumps({"seconds": time.perf_counter() - begin, "alone": alone, "together": together, "found": found}))
"""

TRAINING = """
given = heads()
o, _ = ops.gla(*given)
o.sum().backward()
found = check([o, *(each.grad for each in given)])
"""

INFERENCE = """
with torch.no_grad():
    found = check([ops.gla(*heads(grad=False, length=4096))[0]])  # T in segments: two kernels
"""

LAYER = """
layer = nn.GatedLinearAttention(hidden_size=512, num_heads=4, expand_k=1.0).to("cuda", torch.bfloat16)
x = torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
out = layer(x)
out = out[0] if isinstance(out, tuple) else out
out.sum().backward()
found = check([out, x.grad])
"""

COMPILED = """
given = heads()
step = torch.compile(lambda *given: ops.gla(*given)[0] * 2, fullgraph=True)
o = step(*given)
o.sum().backward()
plain = [each.detach().clone().requires_grad_() for each in given]
ops.gla(*plain)[0].mul(2).sum().backward()
found = [float((a.grad.double() - b.grad.double()).norm() / b.grad.double().norm()) for a, b in zip(given, plain)]
"""

CAPTURED = """
given = heads(grad=False)
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.no_grad():
    # The first call of all: kernels are compiled and loaded during the capture, for which CUDA wants the relaxed mode.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        o = ops.gla(*given, variant="fused")[0]
    graph.replay()
    expected = ops.gla(*given, variant="fused")[0]
found = check([o - expected])
"""

THREADS = """
given = heads(grad=False, length=4096)
results = [None] * 4

def run(at):
    with torch.no_grad():
        results[at] = ops.gla(*given)[0]

threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
[each.start() for each in threads]
[each.join() for each in threads]
found = check([each - results[0] for each in results])
"""

SHORT_OF_MEMORY = """
given = heads(batch=8, length=4096, width=128)
torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory + 1e-4)
failed = 0
for _ in range(3):
    try:
        ops.gla(*given)[0].sum().backward()
    except torch.OutOfMemoryError:
        failed += 1
torch.cuda.set_per_process_memory_fraction(1.0)
for each in given:
    each.grad = None
o, _ = ops.gla(*given)
o.sum().backward()
found = [failed, *check([o, *(each.grad for each in given)])]
"""


def run(program, folder, *, jobs="16"):
    """Run a program in a process whose caches are in a folder, and return what it says about itself."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "ONELAUNCH_CACHE": str(folder / "onelaunch"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "ONELAUNCH_COMPILE_JOBS": jobs,
    }
    program = textwrap.dedent(BEGIN + program + END)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    LOG.info("%.1f s for %d kernels on their own and %d together", said["seconds"], len(said["alone"]), len(said["together"]))
    return said


@pytest.mark.parametrize("program", [TRAINING, INFERENCE, LAYER], ids=["training", "inference", "layer"])
def test_all_kernels_of_a_first_call_are_compiled_side_by_side(program, tmp_path):
    first = run(program, tmp_path)
    assert first["alone"] == []
    assert len(first["together"]) > 1
    again = run(program, tmp_path)
    assert (again["alone"], again["together"]) == ([], [])
    one = run(program, tmp_path / "one", jobs="1")
    assert one["together"] == []
    assert set(one["alone"]) <= set(first["together"])
    assert first["found"] == again["found"] == one["found"]


def test_compiled_code_gives_the_results_of_eager_code(tmp_path):
    assert all(error < 5e-3 for error in run(COMPILED, tmp_path)["found"])  # false for NaN


def test_a_first_call_can_be_captured(tmp_path):
    said = run(CAPTURED, tmp_path)
    assert said["found"] == [0.0]
    assert said["together"] == []


def test_threads_with_the_same_first_call_compile_once(tmp_path):
    said = run(THREADS, tmp_path)
    assert said["found"] == [0.0] * 4
    assert said["alone"] == []
    assert len(said["together"]) == len(set(run(INFERENCE, tmp_path / "one")["together"]))


def test_memory_that_runs_out_during_a_first_call_leaves_nothing_behind(tmp_path):
    failed, *found = run(SHORT_OF_MEMORY, tmp_path)["found"]
    plain = SHORT_OF_MEMORY.replace("range(3)", "range(0)")
    none, *expected = run(plain, tmp_path)["found"]
    assert (failed, none) == (3, 0)
    assert found == expected


def test_kernels_are_compiled_in_memory_where_the_cache_cannot_be_written(tmp_path):
    (tmp_path / "triton").write_text("a file in the place of the folder")
    said = run(TRAINING, tmp_path)
    assert len(said["together"]) > 1
    assert said["found"] == run(TRAINING, tmp_path / "other")["found"]
