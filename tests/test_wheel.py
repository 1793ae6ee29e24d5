"""Tests of the built package: wheel and source distribution are reproducible, and the wheel works without the repository.

The environment is empty but for the wheel. What the wheel depends on comes from the environment of the tests, by its folder of
packages alone, in which an editable onelaunch does not count.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from onelaunch.workbench.result import Result

pytest.importorskip("hatchling", reason="the tests build the package")

ROOT = Path(__file__).parents[1]


STUDY = """
name = "small"
question = "Is the chunked form faster than the loop?"
operation = "linear_rnn"
baseline = "eager"
variants = ["eager", "chunked"]
rounds = 3
shapes = [{ name = "short", scale = "small", dtype = "float32", B = 1, T = 32, D = 16, V = 16 }]
"""

ACCELERATED = """
import torch, transformers
import onelaunch

config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
model = transformers.LlamaForCausalLM(config).eval()
tokens = torch.tensor([[1, 2, 3]])
before = model(tokens).logits
report = onelaunch.accelerate(model)
torch.testing.assert_close(model(tokens).logits, before)
print(report)
report.undo()
assert torch.equal(model(tokens).logits, before)
"""


def build(kind: str, out: Path) -> Path:
    """Build the wheel or the source distribution (``kind``) of a copy of the repository whose files are all new."""
    copy = out / "copy"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in tracked:
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    code = f"from hatchling.build import build_{kind} as build; print(build({str(out)!r}))"
    made = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=True, env=clean())
    shutil.rmtree(copy)
    return out / made.stdout.split()[-1]


def clean() -> dict[str, str]:
    """Return the environment variables without those that name a checkout, or that would change a build."""
    dropped = ("PYTHONPATH", "SOURCE_DATE_EPOCH", "ONELAUNCH_CACHE")
    return {name: value for name, value in os.environ.items() if name not in dropped}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Return the folder of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("empty") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, env=clean())
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(environment: Path, *command: str) -> str:
    """Run a command of the environment in an empty folder, and return what it printed."""
    (folder := environment.parent / "elsewhere").mkdir(exist_ok=True)
    variables = clean() | {"ONELAUNCH_CACHE": str(environment.parent / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [environment / "bin" / command[0], *command[1:]], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_build_of_the_same_files_has_the_same_bytes(kind, tmp_path):
    built = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        built.append(build(kind, tmp_path / name))
    assert built[0].name == built[1].name
    assert len({hashlib.sha256(path.read_bytes()).hexdigest() for path in built}) == 1


@pytest.mark.thorough
def test_the_wheel_holds_what_users_need_and_nothing_of_the_repository(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "studies/040-linear-rnn.toml",
        "examples/train_lm.py",
        "decode/tiny/model.safetensors",
        "dispatch/measured",
        "py.typed",
    ):
        assert any(name.startswith(f"onelaunch/{wanted}") for name in names), wanted
    assert {name.split("/")[0].split("-")[0] for name in names} == {"onelaunch"}
    assert not [name for name in names if "test" in name.lower().split("/")[-1] or "__pycache__" in name]


@pytest.mark.thorough
def test_the_source_distribution_holds_the_tests(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = archive.getnames()
    for wanted in (
        "pyproject.toml",
        "LICENSE",
        "tests/test_layout.py",
        "src/onelaunch/__init__.py",
        "studies/040-linear-rnn.toml",
    ):
        assert any(name.endswith("/" + wanted) for name in names), wanted


@pytest.mark.thorough
def test_the_installed_package_is_the_wheels(environment):
    found = run(environment, "python", "-c", "import onelaunch; print(onelaunch.__file__)").strip()
    assert Path(found).is_relative_to(environment)


@pytest.mark.thorough
def test_doctor_and_generate_work_outside_of_the_repository(environment):
    assert "onelaunch" in run(environment, "onelaunch", "doctor")
    assert run(environment, "onelaunch", "generate", "def main(", "--max-new-tokens", "4", "--device", "cpu").strip()


@pytest.mark.thorough
def test_a_study_of_ones_own_runs_outside_of_the_repository(environment):
    assert "040-linear-rnn" in run(environment, "onelaunch", "study", "list")
    (environment.parent / "elsewhere" / "small.toml").write_text(STUDY)
    run(
        environment, "onelaunch", "study", "run", "small.toml", "--device", "cpu", "--time-cap", "0.5", "--out", "result.json",
        "--report-dir", "report",
    )  # fmt: skip
    result = Result.load(environment.parent / "elsewhere" / "result.json")
    assert [cell.status for cell in result.cells] == ["ok", "ok"]
    assert (environment.parent / "elsewhere" / "report" / "report.html").exists()


@pytest.mark.thorough
def test_accelerate_works_outside_of_the_repository(environment):
    pytest.importorskip("transformers", reason="needs the extra decode")
    assert "LlamaMLP" in run(environment, "python", "-c", ACCELERATED)


def test_the_documented_versions_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    table = (ROOT / "docs" / "start.md").read_text().partition("### Supported versions")[2]
    rows = {
        cells[1].strip(): [each.strip() for each in cells[2:5]] for cells in (row.split("|") for row in table.splitlines()[2:7])
    }
    assert rows["PyTorch"][:2] == [re.findall(r'"torch>=([\d.]+)"', project)[0], pinned["torch"]]
    assert rows["Triton"][:2] == [re.findall(r'"triton>=([\d.]+)', project)[0], pinned["triton"]]
    assert rows["Python"][0] == re.findall(r'requires-python = ">=([\d.]+)"', project)[0]
