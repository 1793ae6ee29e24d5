"""Follow README as a new user would, with a clock: from a wheel in an empty environment to a faster model of fla.

    python -m tools.time_first_visit --wheels wheels

``wheels`` is a folder with the wheel of onelaunch and those of packages that this Python lacks, such as fla's. The script makes
an environment that sees the packages of this Python, above all PyTorch and transformers, installs the wheels into it without an
index, and leaves the repository. There it runs ``onelaunch doctor``, README's first quick start on a GPU with training steps
after it, and ``onelaunch generate``. All caches are empty at first. Each line of output begins with the seconds since the start.
The exit status is 1 if a step fails. It needs a GPU, and is run by hand.
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"

STEPS = """
import time

import torch

model.to("cuda", torch.bfloat16)
ids = torch.randint(0, 32_000, (4, 2048), device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def seconds(count):
    begun = time.perf_counter()
    for _ in range(count):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


print(f"first step {seconds(1):.1f} s")
ours = seconds(20)
print(f"accelerated {1e3 * ours:.2f} ms a step")
report.undo()
print(f"first step of fla {seconds(1):.1f} s")
theirs = seconds(20)
print(f"fla {1e3 * theirs:.2f} ms a step, {theirs / ours:.2f} times as long")
"""
"""Training steps behind README's first quick start, which has made ``model`` and ``report``: accelerated, then undone."""


def quick_start(readme: Path = README) -> str:
    """Return the first block of Python in README."""
    return readme.read_text(encoding="utf-8").split("```python\n", 1)[1].split("```", 1)[0]


def environment(folder: Path) -> dict[str, str]:
    """Return this process' environment with a home and caches of its own, and without the paths of a repository."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("ONELAUNCH_")}
    caches = {"TRITON_CACHE_DIR": "triton", "ONELAUNCH_CACHE": "onelaunch", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    return {**kept, "HOME": str(folder), **{name: str(folder / place) for name, place in caches.items()}}


def make_environment(folder: Path) -> None:
    """Make a virtual environment that also sees the packages of this Python, which may be those of another environment."""
    venv.create(folder, system_site_packages=True, with_pip=True)
    (own,) = (folder / "lib").glob("python*/site-packages")
    (own / "packages_of_the_parent.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")


def visit(wheels: Path, folder: Path) -> bool:
    """Run all steps in a folder, and return whether all went well."""
    begun = time.monotonic()
    script, binaries = folder / "quick_start.py", folder / "env" / "bin"
    script.write_text(quick_start() + STEPS, encoding="utf-8")
    install = [
        str(binaries / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        *map(str, wheels.glob("*.whl")),
    ]
    make_environment(folder / "env")
    _say(begun, "an environment: done")
    steps = {
        "pip install": install,
        "onelaunch doctor": [str(binaries / "onelaunch"), "doctor"],
        "README's first quick start": [str(binaries / "python"), str(script)],
        "onelaunch generate": [str(binaries / "onelaunch"), "generate", "def main(", "--max-new-tokens", "40"],
    }
    well = True
    for name, command in steps.items():
        process = subprocess.Popen(
            command, cwd=folder, env=environment(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        for line in process.stdout:
            _say(begun, f"    {line.rstrip()}")
        _say(begun, f"{name}: {'done' if process.wait() == 0 else f'exit status {process.returncode}'}")
        well = well and process.returncode == 0
    return well


def _say(begun: float, text: str) -> None:
    sys.stdout.write(f"{time.monotonic() - begun:6.1f} s  {text}\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Run the script, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="folder with the wheels to install")
    asked = parser.parse_args(argv)
    if not list(asked.wheels.glob("onelaunch-*.whl")):
        parser.error(f"{asked.wheels} has no wheel of onelaunch; build one: pip wheel --no-deps --wheel-dir {asked.wheels} .")
    with tempfile.TemporaryDirectory() as folder:
        return 0 if visit(asked.wheels.absolute(), Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
