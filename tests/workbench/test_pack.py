"""Tests of packed studies: which wheels are gathered, what the file's script checks and does, and a whole run of it.

pip downloads from a folder of made-up wheels: it reads ``PIP_NO_INDEX`` and ``PIP_FIND_LINKS``. The packs of most tests hold a
made-up onelaunch, whose command only writes down how it was called.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from onelaunch.errors import ArgumentError, PackError
from onelaunch.workbench.pack import build, script, wheels
from onelaunch.workbench.pack.wheels import Machine, gather, own_wheel, repacked
from onelaunch.workbench.result import Result
from onelaunch.workbench.study.read import find_study

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

STUDY = """
name = "small"
question = "Is the chunked form faster than the loop?"
operation = "linear_rnn"
baseline = "eager"
variants = ["eager", "chunked"]
rounds = 3
shapes = [{ name = "short", scale = "small", dtype = "float32", B = 1, T = 32, D = 16, V = 16 }]
"""

# The command of the made-up onelaunch. A pack's script ends by calling it.
COMMAND = """
import json, os, pathlib, sys
told = {"arguments": sys.argv[1:], "commit": os.environ["ONELAUNCH_COMMIT"], "file": __file__}
pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps(told))
raise SystemExit(7)
"""


def make_wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any", **files: str) -> Path:
    """Write a made-up wheel. The names of ``files`` are those of modules of its package."""
    metadata = f"{name}-{version}.dist-info"
    extras = "".join(f"Provides-Extra: {extra}\n" for extra in ("workbench", "peers", "more"))
    contents = {
        f"{name}/__init__.py": "",
        **{f"{name}/{module}.py": text for module, text in files.items()},
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extras}"
        + "".join(f"Requires-Dist: {each}\n" for each in requires),
        f"{metadata}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    contents[f"{metadata}/RECORD"] = "".join(f"{path},,\n" for path in (*contents, f"{metadata}/RECORD"))
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in contents.items():
            archive.writestr(member, text)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Return an empty folder, the only place from which pip downloads."""
    (folder := tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """Return a pack of a small study with the made-up onelaunch, in a folder of its own."""

    def made_up(folder):
        return make_wheel(folder, "onelaunch", "0.1", "torch>=2", "triton; extra == 'workbench'", __main__=COMMAND)

    monkeypatch.setattr(build, "own_wheel", made_up)
    monkeypatch.setattr(build, "commit", lambda: "0123456789ab")
    return pack(tmp_path)


def pack(tmp_path: Path) -> Path:
    """Pack the small study for this Python, into a folder of its own."""
    (tmp_path / "small.toml").write_text(STUDY)
    (tmp_path / "far").mkdir()
    out = tmp_path / "far" / "small.pyz"
    build.pack(*find_study(tmp_path / "small.toml"), out, Machine(HERE, "manylinux_2_28_x86_64"))
    return out


def changed(pack: Path, **manifest: object) -> Path:
    """Rewrite a pack with some keys of its manifest changed."""
    with zipfile.ZipFile(pack) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members[script.MANIFEST] = json.dumps({**json.loads(members[script.MANIFEST]), **manifest}).encode()
    with zipfile.ZipFile(pack, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return pack


def test_a_machine_takes_wheels_of_its_glibc_and_older_ones():
    tags = Machine("3.12", "manylinux_2_28_x86_64").tags
    assert tags[0] == "manylinux_2_28_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"} < set(tags)
    assert "manylinux_2_29_x86_64" not in tags
    assert Machine("3.12", "manylinux_2_28_aarch64").environment["platform_machine"] == "aarch64"


@pytest.mark.parametrize(
    ("python", "platform"), [("3", "manylinux_2_28_x86_64"), ("3.9", "manylinux_2_28_x86_64"), ("3.12", "win32")]
)
def test_another_form_of_a_machine_is_refused(python, platform, prose):
    with pytest.raises(ArgumentError) as caught:
        Machine(python, platform)
    prose(caught.value)


def test_gathered_wheels_are_those_that_the_machine_needs(index, tmp_path):
    """Markers count for that machine, not for this one; a requirement that comes later replaces a wheel; no PyTorch comes along.

    The index has no wheels of ``torch``, ``nowhere`` and ``windows``, so asking for one of them would fail.
    """
    fits, too_new = "cp310-cp310-manylinux_2_17_aarch64", "cp310-cp310-manylinux_2_31_aarch64"
    make_wheel(index, "onepack_a", "1.0", "onepack-b[more]>=1", 'windows; sys_platform == "win32"', "torch")
    make_wheel(index, "onepack_b", "1.5", "onepack_a", 'onepack_c<2; extra == "more"', "Triton>=3", tag=fits)
    make_wheel(index, "onepack_b", "1.6", "nowhere", tag=too_new)
    make_wheel(index, "onepack_c", "1.9")
    make_wheel(index, "onepack_c", "2.1", 'nowhere; extra == "more"')
    make_wheel(index, "onepack_old", "0.2")
    own = make_wheel(
        tmp_path / "wheels",
        "mine",
        "1.0",
        "torch>=2.10",
        "onepack_c>=1",
        'onepack_a; extra == "workbench"',
        'onepack_old; python_version < "3.11" and extra == "workbench"',
        'nowhere; python_version >= "3.11"',
        'nowhere; extra == "peers"',
    )
    gather(own, ["workbench"], Machine("3.10", "manylinux_2_28_aarch64"))
    found = {wheel.name for wheel in own.parent.iterdir()}
    others = {"onepack_a-1.0-py3-none-any.whl", "onepack_c-1.9-py3-none-any.whl", "onepack_old-0.2-py3-none-any.whl"}
    assert found == {own.name, f"onepack_b-1.5-{fits}.whl", *others}


def test_installed_versions_are_taken_where_they_have_a_wheel(monkeypatch, tmp_path):
    """pip is replaced: it finds every version but the installed one of ``second``, and writes wheels of what it was asked for."""
    asked = []

    def pip(*arguments):
        requirements = [each for each in arguments if each.startswith(("first", "second"))]
        asked.append(requirements)
        if "second==2.0" in requirements:
            return "No matching distribution"
        for each in requirements:
            make_wheel(tmp_path / "wheels", each[:6].rstrip("<="), each.partition("==")[2] or "1.0")
        return ""

    monkeypatch.setattr(wheels, "_pip", pip)
    monkeypatch.setattr(wheels, "installed_version", {"first": "3.0", "second": "2.0"}.get)
    own = make_wheel(tmp_path / "wheels", "mine", "1.0", "first>=1", "second")
    gather(own, [], Machine("3.12", "manylinux_2_28_x86_64"))
    assert asked == [["first==3.0", "second==2.0"], ["first==3.0"], ["second==2.0"], ["second"]]


def test_a_wheel_that_pip_does_not_find_is_an_error_with_its_words(index, tmp_path, prose):
    own = make_wheel(tmp_path / "wheels", "mine", "1.0", "no-such-package>=2")
    with pytest.raises(PackError) as caught:
        gather(own, [], Machine("3.12", "manylinux_2_28_x86_64"))
    prose(caught.value)


def test_a_wheel_is_made_of_an_installed_distribution(tmp_path, prose):
    with zipfile.ZipFile(make_wheel(tmp_path, "mine", "1.0", "torch", module="VALUE = 1")) as archive:
        archive.extractall(tmp_path / "site")
    metadata = tmp_path / "site" / "mine-1.0.dist-info"
    # pip adds these when it installs.
    (metadata / "INSTALLER").write_text("pip")
    with (metadata / "RECORD").open("a") as record:
        record.write("mine-1.0.dist-info/INSTALLER,,\n../../bin/mine,,\nmine/__pycache__/module.pyc,,\n")
    installed = importlib.metadata.Distribution.at(metadata)
    (tmp_path / "out").mkdir()
    wheel = repacked(installed, tmp_path / "out")
    assert wheel.name == "mine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {f"mine/{name}.py" for name in ("__init__", "module")}
        assert set(archive.namelist()) == names | {f"{metadata.name}/{name}" for name in ("METADATA", "WHEEL", "RECORD")}
        assert archive.read("mine/module.py") == b"VALUE = 1"
        assert b"mine/module.py,sha256=" in archive.read(f"{metadata.name}/RECORD")
    (tmp_path / "site" / "mine" / "module.py").unlink()
    with pytest.raises(PackError) as caught:
        repacked(installed, tmp_path / "out")
    prose(caught.value)
    (metadata / "RECORD").unlink()
    with pytest.raises(PackError) as caught:
        repacked(installed, tmp_path / "out")
    prose(caught.value)


def test_another_installation_than_the_one_that_runs_is_not_packed(monkeypatch, tmp_path, prose):
    monkeypatch.setattr(wheels, "PACKAGE", Path("elsewhere") / "onelaunch")
    with pytest.raises(PackError) as caught:
        own_wheel(tmp_path)
    prose(caught.value)


def test_a_pack_installs_its_wheels_once_and_runs_the_study(packed):
    with zipfile.ZipFile(packed) as archive:
        raw = archive.read(script.MANIFEST)
        manifest = json.loads(raw)
        assert set(archive.namelist()) - {"wheels/"} == {"__main__.py", script.MANIFEST, *manifest["members"]}
    assert manifest["result_schema"] == 3
    assert manifest["study_digest"] == find_study(packed.parents[1] / "small.toml")[1].digest()
    # The user's settings of pip must not redirect the installation.
    environment = {**os.environ, "PIP_USER": "1", "PIP_INDEX_URL": "http://127.0.0.1:9"}
    installed = packed.parent / f"small-{hashlib.sha256(raw).hexdigest()[:12]}"
    for again in (False, True):
        ended = subprocess.run(
            [sys.executable, packed, "--device", "cpu"], capture_output=True, text=True, check=False, env=environment, timeout=120
        )
        assert ended.returncode == 7, ended.stderr
        assert ("Installing" in ended.stderr) is not again
        told = json.loads((packed.parent / "small-result.json").read_text())
        assert Path(told["file"]) == installed / "site" / "onelaunch" / "__main__.py"
        assert told["commit"] == "0123456789ab"
        assert told["arguments"][:3] == ["study", "run", str(installed / "small.toml")]
        assert told["arguments"][-2:] == ["--device", "cpu"]
    assert (installed / "small.toml").read_text() == STUDY
    assert {each.name for each in packed.parent.iterdir()} == {"small.pyz", "small-result.json", installed.name}


@pytest.mark.parametrize(
    "manifest",
    [
        {"schema_version": 2},
        {"python": "3.9"},
        {"members": {"small.toml": "0" * 64}},
        {"members": {"gone.whl": "0" * 64}},
        {"members": None},
    ],
    ids=str,
)
def test_nothing_is_installed_from_a_pack_that_does_not_suit(packed, manifest, monkeypatch, prose):
    monkeypatch.setattr(script, "install", lambda *_: pytest.fail("installed"))
    with pytest.raises(SystemExit) as caught:
        script.main(changed(packed, **manifest), [])
    prose(str(caught.value).replace(str(packed.parent), "FOLDER").replace(HERE, "HERE"))


def test_a_damaged_pack_says_so(packed, prose):
    with zipfile.ZipFile(packed) as archive:
        name = "wheels/onelaunch-0.1-py3-none-any.whl"
        place = archive.getinfo(name).header_offset + 200
    data = bytearray(packed.read_bytes())
    data[place] ^= 1
    packed.write_bytes(data)
    with pytest.raises(SystemExit) as caught:
        script.main(packed, [])
    prose(str(caught.value).replace(str(packed.parent), "FOLDER"))


@pytest.mark.parametrize("package", ["torch", "pip"])
def test_pytorch_and_pip_must_be_there(packed, package, monkeypatch, prose):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None if name == package else True)
    with pytest.raises(SystemExit) as caught:
        script.main(packed, [])
    prose(str(caught.value).replace(sys.executable, "PYTHON"))


def test_wheels_of_another_platform_leave_nothing_behind(packed, tmp_path, prose):
    """pip itself refuses them. Its error becomes the script's."""
    wheel = make_wheel(tmp_path, "other", "1.0", tag="cp39-cp39-win32")
    with zipfile.ZipFile(packed, "a") as archive:
        archive.write(wheel, f"wheels/{wheel.name}")
        members = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist() if name.endswith(".whl")}
    with pytest.raises(SystemExit) as caught:
        script.main(changed(packed, members=members), [])
    prose(str(caught.value).replace(str(packed.parent), "FOLDER"))
    assert list(packed.parent.iterdir()) == [packed]


@pytest.mark.every
def test_a_real_pack_runs_its_study(tmp_path):
    """Build our wheel, download the others from the user's index, install them and measure."""
    packed = pack(tmp_path)
    arguments = ["--device", "cpu", "--time-cap", "0.5"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ONELAUNCH_COMMIT")}
    subprocess.run([sys.executable, packed, *arguments], check=True, cwd=tmp_path, env=environment, timeout=600)
    result = Result.load(packed.parent / "small-result.json")
    assert result.study_digest == find_study(tmp_path / "small.toml")[1].digest()
    assert [cell.status for cell in result.cells] == ["ok", "ok"]
    assert result.provenance.commit == build.commit()
    assert (packed.parent / "small-report" / "report.html").exists()
    (installed,) = packed.parent.glob("small-*/site")
    assert not (installed / "torch").exists()
    assert not (installed / "triton").exists()


@pytest.mark.every
def test_our_wheel_holds_the_package_and_the_built_in_studies(tmp_path):
    with zipfile.ZipFile(own_wheel(tmp_path)) as archive:
        assert {"onelaunch/__main__.py", "onelaunch/studies/039-overlap.toml"} <= set(archive.namelist())
