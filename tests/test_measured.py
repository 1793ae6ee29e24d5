"""Tests of tables of measured times: the user's override the package's, per device; an invalid table gives one warning.

A table is a JSON file, named after its device, from which the dispatcher chooses the fastest variant. The fixture ``scale``
registers the toy operation ``scale(x, factor=2.0)`` of ``tests/toys.py`` for one test. It has the variants ``loop``, ``vector``
(preferred, for at most 1000 elements), ``no_backward`` and ``elsewhere``, which no call can use. ``prose`` and ``prose.warns``
compare wording with the test's entries in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its
entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from onelaunch import dispatch, files
from onelaunch.device import hardware
from onelaunch.device.hardware import Device
from onelaunch.dispatch import choice, measured
from onelaunch.errors import TableNotice
from onelaunch.operation import Query

# Type, name, architecture, SMs or cores, bytes of the last-level cache, and bytes of memory. The names give the names of tables.
GPU = Device("cuda", "Some GPU", "sm_90", 132, 60 << 20, 150 << 30)
CPU = Device("cpu", "Some CPU", "x86_64", 2, 1 << 20, 1 << 30)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Make the package's folder of tables and the user's, both empty, and return them in this order."""
    package, user = tmp_path / "package", tmp_path / "user"
    package.mkdir(), user.mkdir()
    monkeypatch.setattr(measured, "TABLES", package)
    monkeypatch.setenv("ONELAUNCH_TABLES", str(user))
    forget()
    yield package, user
    forget()


def forget():
    """Discard cached tables, as in a process that has just started."""
    measured._rows.cache_clear()
    measured._warn.cache_clear()
    dispatch.choose.cache_clear()


def row(n=8, microseconds=None, **more):
    """Return a row of a table: the times by variant of a forward call with ``n`` elements. ``more`` replaces other keys."""
    facts = {"operation": "scale", "direction": "forward", "dtype": "float32", "sizes": {"N": n}}
    return {**facts, "microseconds": {"loop": 1.0} if microseconds is None else microseconds, **more}


def table(*rows, device="Some GPU"):
    """Return the content of a table with these rows."""
    return json.dumps({"device": device, "source": ["a study"], "rows": list(rows)})


def near(n=8, device=GPU, variants=("loop", "vector")):
    """Return the row for the most similar size within a factor of 8 of ``n``, with times of these variants only, or ``None``."""
    return measured.nearest(device, "scale", "forward", torch.float32, {"N": n}, variants=variants)


def test_rows_of_the_user_override_those_of_the_package(places):
    package, user = places
    (package / "some-gpu.json").write_text(table(row(8, {"loop": 1.0, "vector": 2.0}), row(64, {"loop": 3.0})))
    (user / "some-gpu.json").write_text(table(row(8, {"vector": 0.5}), row(512, {"loop": 7.0})))
    assert near(8).microseconds == {"vector": 0.5}
    assert near(8).path == user / "some-gpu.json"
    assert near(64).microseconds == {"loop": 3.0}
    assert near(64).path == package / "some-gpu.json"
    assert near(512).microseconds == {"loop": 7.0}


def test_a_new_table_is_read_by_the_next_process(places):
    assert near() is None
    (places[1] / "some-gpu.json").write_text(table(row()))
    assert near() is None
    forget()
    assert near() is not None


@pytest.mark.parametrize("folder", [0, 1], ids=["package", "user"])
def test_a_table_of_one_cpu_is_never_used_on_another(places, folder):
    path = places[folder] / "cpu-some-cpu.json"
    path.write_text(table(row(), device="Some CPU"))
    assert near(device=CPU).device == "Some CPU"
    assert near(device=replace(CPU, name="Another CPU")) is None
    with pytest.warns(TableNotice, match="Some CPU.*Some-CPU"):
        assert near(device=replace(CPU, name="Some-CPU")) is None  # another CPU model whose file has the same name


@pytest.mark.parametrize("folder", [0, 1], ids=["package", "user"])
def test_the_table_of_another_gpu_under_this_ones_file_name_is_ignored(places, folder):
    (places[folder] / "some-gpu.json").write_text(table(row(), device="Some-GPU"))
    with pytest.warns(TableNotice, match="'Some-GPU', and this GPU is 'Some GPU'"):
        assert near() is None


def test_a_stale_row_of_the_user_does_not_hide_the_packages(places):
    package, user = places
    (package / "some-gpu.json").write_text(table(row(8, {"vector": 2.0})))
    (user / "some-gpu.json").write_text(table(row(8, {"loop": 1.0}, software={"torch": "1.0"}), row(64, {"loop": 3.0})))
    with pytest.warns(TableNotice, match="1.0"):
        assert near(8).microseconds == {"vector": 2.0}
    assert near(64).microseconds == {"loop": 3.0}
    assert (near(8).whose(), near(64).whose()) == ("the package's table", "your own table, written by onelaunch study adopt")


def test_at_equal_distances_the_users_row_comes_first(places):
    package, user = places
    (package / "some-gpu.json").write_text(table(row(4)))
    (user / "some-gpu.json").write_text(table(row(16)))
    assert near(8).sizes == {"N": 16}


@pytest.mark.parametrize("folder", [0, 1], ids=["package", "user"])
def test_the_old_table_of_all_cpus_is_used_on_the_cpu_that_it_names(places, folder, recwarn):
    (places[folder] / "cpu.json").write_text(table(row(), device="Some CPU"))
    assert near(device=CPU) is not None
    assert near(device=replace(CPU, name="Another CPU")) is None
    assert not recwarn.list


BROKEN = {
    "empty": "",
    "cut off": '{"device": "Some GPU", "rows": [',
    "binary": b"\xff\xfe\x00",
    "a list": "[]",
    "a number": "7",
    "null": "null",
    "nothing in it": "{}",
    "nested without end": "[" * 100_000,
    "no device": json.dumps({"source": [], "rows": []}),
    "sources of a wrong type": json.dumps({"device": "Some GPU", "source": [1], "rows": []}),
    "rows of a wrong type": json.dumps({"device": "Some GPU", "source": [], "rows": {}}),
    "a row of a wrong type": table(3),
    "no operation": table(row(operation=None)),
    "a direction of a wrong type": table(row(direction=["forward"])),
    "flags of a wrong type": table(row(flags="packed")),
    "refusals of a wrong type": table(row(unsupported={"loop": "reason"})),
    "sizes of a wrong type": table(row(sizes=[8])),
    "a negative size": table(row(-1)),
    "a size that is no whole number": table(row(1.5)),
    "no times": table(row(microseconds={})),
    "times of a wrong type": table(row(microseconds=[1.0])),
    "a time that is text": table(row(microseconds={"loop": "1"})),
    "a time that is true": table(row(microseconds={"loop": True})),
    "a time that is NaN": table(row(microseconds={"loop": float("nan")})),
    "a time that is infinite": table(row(microseconds={"loop": float("inf")})),
    "a negative time": table(row(microseconds={"loop": -1.0})),
    "a time of zero": table(row(microseconds={"loop": 0})),
    "a variant of auto of a wrong type": table(row(auto=["loop"])),
    "a date of a wrong type": table(row(run=20261126)),
    "noise below 1": table(row(noise=0.02)),
    "software of a wrong type": table(row(software=["torch"])),
    "code of a wrong type": table(row(code={"loop": 7})),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_an_invalid_table_gives_one_warning_and_the_packages_is_used(places, text, prose):
    package, user = places
    (package / "some-gpu.json").write_text(table(row(8, {"vector": 2.0})))
    (user / "some-gpu.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    deep = {r"maximum recursion[^)]*": "<reason>"}
    with prose.warns(TableNotice, match=r"some-gpu\.json.*onelaunch study adopt", mask=deep) as said:
        assert near().microseconds == {"vector": 2.0}
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert near(9).microseconds == {"vector": 2.0}


def test_a_folder_in_place_of_a_table_gives_one_warning(places):
    (places[1] / "some-gpu.json").mkdir()
    with pytest.warns(TableNotice):
        assert near() is None


def test_a_file_in_place_of_the_folder_is_ignored(places, monkeypatch, recwarn):
    (places[1] / "file").write_text("")
    monkeypatch.setenv("ONELAUNCH_TABLES", str(places[1] / "file"))
    assert near() is None
    assert not recwarn.list


def test_rows_of_unknown_sizes_and_variants_are_ignored(places):
    package, user = places
    (package / "some-gpu.json").write_text(table(row(8, {"vector": 2.0}), row(64, {"vector": 3.0})))
    (user / "some-gpu.json").write_text(
        table(row(8, {"gone": 0.1}), row(64, {"gone": 0.1, "loop": 0.5}), row(sizes={"Q": 8}), row(sizes={"N": 8, "Q": 8}))
    )
    with pytest.warns(TableNotice) as said:
        found = near(8), near(64)
    assert [each.microseconds for each in found] == [{"vector": 2.0}, {"loop": 0.5}]
    assert len([one for one in said if "gone" in str(one.message)]) == 1


def test_calls_work_with_a_corrupt_table(places, scale):
    here = hardware.describe("cpu")
    (places[1] / f"{here.table}.json").write_text("")
    with pytest.warns(TableNotice):
        assert scale(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_an_explanation_names_the_measured_direction_and_the_table(places, scale, prose):
    here = hardware.describe("cpu")
    path = places[1] / f"{here.table}.json"
    path.write_text(table(row(), device=here.name))
    query = Query("scale", "cpu", torch.float32, (8,))
    found = dispatch.explain(query)
    assert (found.chosen, found.table) == ("loop", path)
    other = dispatch.explain(query._replace(grad=True))
    assert other.table is None
    assert "forward_backward" in other.because
    prose(other.because, mask={re.escape(here.name): "<device>"})
    nothing = dispatch.explain(query._replace(sizes=(1000,)))
    prose(nothing.because)
    path.write_text(table(row(direction="forward_backward"), device=here.name))
    forget()
    assert "forward_backward was measured" in dispatch.explain(query).because


@pytest.fixture
def lent(places, monkeypatch):
    """Dispatch calls on the CPU as on an H100 PCIe, which has no table while an H200 has one; return the device."""
    device = Device("cuda", "NVIDIA H100 PCIe", "sm_90", 114, 50 << 20, 80 << 30)
    rows = [row(microseconds={"loop": 1.0, "vector": 1.5}), row(n=512, microseconds={"vector": 1.0, "loop": 1.02})]
    rows.append(row(n=64, microseconds={"loop": 1.0}))
    (places[0] / "nvidia-h200.json").write_text(table(*rows, device="NVIDIA H200"))
    monkeypatch.setattr(choice, "describe", lambda name: device)
    return device


def test_a_hopper_gpu_without_a_table_takes_the_order_of_variants_from_the_most_similar_one(places, lent, scale, prose):
    query = Query("scale", "cpu", torch.float32, (8,))
    assert dispatch.choose(query).name == "loop"
    found = dispatch.explain(query)
    assert found.table is None
    assert {each.microseconds for each in found.standings} == {None}, "another GPU's times are not this one's"
    prose(found.because)
    assert dispatch.choose(query._replace(sizes=(512,))).name == "vector", "within 3 %, the operation's order decides"
    assert dispatch.choose(query._replace(sizes=(64,))).name == "vector", "the first in preference was not measured there"
    assert dispatch.choose(query._replace(grad=True)).name == "vector", "the other direction was not measured there either"
    (places[1] / f"{lent.table}.json").write_text(table(row(microseconds={"vector": 2.0, "loop": 3.0}), device=lent.name))
    forget()
    assert dispatch.choose(query).name == "vector", "its own times come first"
    assert dispatch.choose(query._replace(dtype=torch.float16)).name == "vector"


def test_another_architecture_borrows_nothing(lent, scale, monkeypatch):
    monkeypatch.setattr(choice, "describe", lambda name: replace(lent, name="NVIDIA A100", architecture="sm_80"))
    assert dispatch.choose(Query("scale", "cpu", torch.float32, (8,))).name == "vector"


def test_a_variant_of_another_package_is_not_chosen_by_times_of_another_gpu(lent, scale, monkeypatch):
    """Elsewhere a measured time shows that such a variant was right on this device. A borrowed one does not."""
    monkeypatch.setattr(choice, "is_trusted", lambda variant, query: variant.name != "loop")
    assert dispatch.choose(Query("scale", "cpu", torch.float32, (8,))).name == "vector"


def test_a_variant_that_compiles_anew_is_not_chosen_by_times_of_another_gpu(lent, scale, monkeypatch):
    loop = scale.get("loop")
    monkeypatch.setattr(loop, "capabilities", replace(loop.capabilities, recompiles=True))
    assert dispatch.choose(Query("scale", "cpu", torch.float32, (8,))).name == "vector"


def test_the_table_of_the_most_similar_hopper_gpu_is_borrowed(places, monkeypatch):
    monkeypatch.setattr(measured, "HOPPER_TABLES", {"nvidia-large": (132, 141 << 30), "nvidia-small": (132, 80 << 30)})
    for name, time in (("nvidia-large", 1.0), ("nvidia-small", 2.0)):
        (places[0] / f"{name}.json").write_text(table(row(microseconds={"loop": time})))

    def found(processors, gigabytes):
        device = Device("cuda", "Another GPU", "sm_90", processors, 50 << 20, gigabytes << 30)
        return measured.nearest(device, "scale", "forward", torch.float32, {"N": 8}, borrow=True).microseconds["loop"]

    assert [found(132, 144), found(132, 96), found(114, 80), found(78, 141), found(132, 79)] == [1.0, 2.0, 2.0, 1.0, 2.0]


def test_a_row_of_auto_alone_decides_nothing_among_our_variants(places, lent, scale, prose):
    """The nearest row holds the time of what ``auto`` chose. The choice is still that of a row which compares."""
    query = Query("scale", "cpu", torch.float32, (8,))
    alone = row(microseconds={"vector": 2.0, "elsewhere": 3.0}, auto="vector")
    (places[1] / f"{lent.table}.json").write_text(table(alone, device=lent.name))
    forget()
    assert dispatch.choose(query).name == "loop", "as the table of the H200 says"
    assert dispatch.choose(query._replace(sizes=(64,))).name == "vector", "the first in preference"
    found = dispatch.explain(query._replace(sizes=(64,)))
    assert {each.variant: each.microseconds for each in found.standings if each.microseconds} == alone["microseconds"]
    assert (found.table.name, found.whose) == (f"{lent.table}.json", "your own table, written by onelaunch study adopt")
    prose(found.because)
    assert dispatch.why_not_faster(query._replace(sizes=(64,)), "elsewhere") is None
    both = row(n=64, microseconds={"loop": 2.0, "vector": 2.5})
    (places[1] / f"{lent.table}.json").write_text(table(alone, both, device=lent.name))
    forget()
    assert dispatch.choose(query).name == "loop", "a row that compares counts, though it is farther"
    assert dispatch.explain(query).standings[0].microseconds == 2.0


def test_a_similar_gpu_whose_rows_compare_nothing_is_passed_over(places, lent, scale, monkeypatch):
    monkeypatch.setattr(measured, "HOPPER_TABLES", {"nvidia-h100": (132, 80 << 30), **measured.HOPPER_TABLES})
    alone = row(microseconds={"vector": 2.0, "elsewhere": 3.0}, auto="vector")
    (places[0] / "nvidia-h100.json").write_text(table(alone, device="NVIDIA H100"))
    forget()
    query = Query("scale", "cpu", torch.float32, (8,))
    assert dispatch.choose(query).name == "loop"
    assert "NVIDIA H200" in dispatch.explain(query).because
    assert dispatch.why_not_faster(query._replace(sizes=(64,)), "elsewhere") is None, "the H100's row compares with a peer"


def test_every_hopper_table_of_the_package_can_be_borrowed():
    """A Hopper GPU is named after the letter H, or GH with a CPU of NVIDIA's beside it."""
    tables = {path.stem for path in measured.TABLES.glob("*.json")}
    assert {name for name in tables if re.match(r"nvidia-g?h\d", name)} == set(measured.HOPPER_TABLES)


def test_tables_of_the_package_are_valid():
    for path in measured.TABLES.glob("*.json"):
        device, source, rows = measured.read(path)
        assert device
        assert source
        assert rows


def test_the_default_folder_is_the_users_data_folder(tmp_path):
    code = "from onelaunch.folders import tables_folder; print(tables_folder())"
    environment = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(tmp_path / ".local/share/onelaunch/tables")
    environment["XDG_DATA_HOME"] = str(tmp_path / "data")
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(tmp_path / "data/onelaunch/tables")


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a large file"])
def test_a_table_that_is_a_special_file_is_skipped_with_a_notice(places, kind, prose):
    """Reading a pipe once blocked forever, and a link to /dev/zero filled the memory."""
    path = places[1] / "some-gpu.json"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(files.MOST_BYTES + 1)
    with prose.warns(TableNotice, match=r"some-gpu\.json"):
        assert measured.nearest(GPU, "scale", "forward", torch.float32, {"N": 8}) is None
