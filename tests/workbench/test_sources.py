"""Tests of the digests of variants' sources, and of resuming a run whose code has changed since.

``package`` writes a package ``acme`` to a folder on the path, whose module ``acme.sums`` registers a variant of ``toy_sum``.
``study`` and ``run`` are those of ``runs.py``: ``toy_sum`` at the shapes ``first`` and ``second``. ``prose`` compares a text
with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not compare one of
its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``quick`` is a fixture that makes runs fast in an empty folder, for every test of the file. ``statuses`` returns the status of
each variant at a shape. ``interrupted_at`` presses Ctrl-C at a shape.
"""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from onelaunch.errors import ResultMismatch
from onelaunch.operation import entry_points as loading
from onelaunch.operation import sources as code
from onelaunch.operation.sources import module_digest
from onelaunch.workbench.result import Result, VariantSource, provenance, sources
from onelaunch.workbench.result.sources import source_of
from tests.workbench.runs import interrupted_at, quick, run, statuses, study
from tests.workbench.toy import toy_sum

__all__ = ["quick"]  # an automatic fixture: an empty working directory, short samples, no warm-up

SUMS = """
from . import scaling
from acme.parts.tables import WIDTH

def run(call):
    sums = (call.x.float() * call.weight.float()).cumsum(1) * scaling.ONE
    return sums.to(call.x.dtype), sums[:, -1].contiguous()
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that changes files of the package ``acme``, and loads it and the variant ``acme`` anew.

    Keywords name the files, with ``__`` for a slash and ``_dot_`` for the dot of a suffix.
    """
    folder = tmp_path / "site" / "acme"
    (folder / "parts" / "kernels").mkdir(parents=True)
    (folder / "kernels").mkdir()
    monkeypatch.syspath_prepend(folder.parent)

    def write(**changed):
        for name, text in changed.items():
            (folder / name.replace("__", "/").replace("_dot_", ".")).write_text(text, encoding="utf-8")
        for name in [each for each in sys.modules if each.partition(".")[0] == "acme"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        code.forget()
        toy_sum.variants.pop("acme", None)
        return toy_sum.variant("acme", launches=1)(importlib.import_module("acme.sums").run)

    (folder / "__init__.py").write_text("")
    write(sums_dot_py=SUMS, scaling_dot_py="ONE = 1", parts__tables_dot_py="WIDTH = 4", other_dot_py="A = 1")
    yield write
    toy_sum.variants.pop("acme", None)
    for name in [each for each in sys.modules if each.partition(".")[0] == "acme"]:
        del sys.modules[name]
    code.forget()


@pytest.mark.parametrize(
    "file", ["sums_dot_py", "scaling_dot_py", "parts__tables_dot_py", "parts__sum_dot_cu", "parts__kernels__sum_dot_cuh"]
)
def test_a_digest_covers_all_that_the_variants_module_uses(package, file):
    before = module_digest("acme.sums")
    text = SUMS + "# faster" if file == "sums_dot_py" else "ONE = WIDTH = 1.0"
    package(**{file: text})
    assert len(before) == 64
    assert module_digest("acme.sums") != before


@pytest.mark.parametrize("file", ["kernels__sum_dot_cuh", "parts__kernels__sum_dot_cuh"])
def test_a_digest_covers_native_files_of_one_name_in_two_folders(package, file):
    package(kernels__sum_dot_cuh="one", parts__kernels__sum_dot_cuh="two")
    before = module_digest("acme.sums")
    package(**{file: "three"})
    assert module_digest("acme.sums") != before


def test_a_digest_ignores_what_the_variants_module_does_not_use(package):
    before = module_digest("acme.sums")
    package(other_dot_py="A = 2")
    assert module_digest("acme.sums") == before


def test_a_digest_is_that_of_the_code_that_was_loaded(package, tmp_path):
    before = module_digest("acme.sums")
    (tmp_path / "site" / "acme" / "scaling.py").write_text("ONE = 3")
    assert module_digest("acme.sums") == before


def test_a_digest_of_a_variant_with_kernels_covers_them():
    reached = code._reached("onelaunch.ops.linear_rnn.variants.triton", code._folders("onelaunch"))
    assert {"onelaunch.ops.linear_rnn.kernels.matmul", "onelaunch.kernels.scan.forward"} <= reached.keys()
    assert not {name for name in reached if ".swiglu" in name or ".decode" in name or ".workbench" in name}


def test_variants_of_all_operations_have_a_digest_and_a_distribution():
    import onelaunch
    from onelaunch.operation import operations

    found = [source_of(each) for one in operations() if one.__module__.startswith("onelaunch.") for each in one.variants.values()]
    assert len({each.source for each in found}) > 15
    assert {each.distribution for each in found} == {f"onelaunch {onelaunch.__version__}"}


def test_a_function_without_a_file_has_the_digest_of_its_code():
    spaces = [{"__name__": "nowhere"} for _ in range(3)]
    for space, factor in zip(spaces, (2, 2, 3), strict=True):
        exec(f"def run(call):\n    return call * {factor}", space)
    variant = toy_sum.get("parallel")
    digests = []
    for space in spaces:
        made = type(variant)(toy_sum, "made", space["run"], {})
        digests.append(source_of(made).source)
    assert digests[0] == digests[1] != digests[2]
    assert source_of(type(variant)(toy_sum, "made", print, {})).source == ""


def test_a_result_holds_the_source_of_each_variant_and_names_plug_ins(package, monkeypatch):
    plugin = loading.Plugin("sums", "acme.sums", "acme-kernels 1.2")
    monkeypatch.setattr(sources, "plugins", lambda: (plugin,))
    result = run(study(variants=("eager", "parallel", "acme")))
    assert result.provenance.variants["acme"] == VariantSource(source=module_digest("acme.sums"), distribution="acme-kernels 1.2")
    assert result.provenance.variants.keys() == {"eager", "parallel", "acme"}
    assert Result.model_validate_json(result.stored()) == result


def test_results_without_sources_are_written_as_before():
    result = run(study())
    facts = result.provenance.model_copy(update={"variants": {}, "package": ""})
    older = result.model_copy(update={"provenance": facts})
    assert not {'"variants"', '"package"', '"probes"'} & set(re.findall(r'"\w+"(?=:[{"])', facts.model_dump_json()))
    assert '"probes"' not in older.stored()


# Resuming


@pytest.mark.parametrize("commit", ["abc", "abc-dirty", ""])
def test_code_exchanged_before_a_run_is_resumed(package, monkeypatch, commit, prose):
    """A plug-in is in no commit, and a commit with changes does not say which."""
    monkeypatch.setattr(provenance, "commit", lambda: commit)
    monkeypatch.setattr(sources, "plugins", lambda: (loading.Plugin("sums", "acme.sums", "acme-kernels 1.2"),))
    declared = study(variants=("eager", "acme"))
    run(declared, steps=interrupted_at("begin", "second"))
    package(scaling_dot_py="ONE = 1.0")
    with prose.raises(ResultMismatch, match="source of the variant acme", mask={"[0-9a-f]{12}": "<digest>"}):
        run(declared, resume=True)
    package(scaling_dot_py="ONE = 1")  # as it was
    assert statuses(run(declared, resume=True), "second") == {"eager": "ok", "acme": "ok"}


def test_another_version_of_a_plug_in_is_not_resumed(package, monkeypatch):
    installed = ["acme-kernels 1.2"]
    monkeypatch.setattr(sources, "plugins", lambda: (loading.Plugin("sums", "acme.sums", installed[0]),))
    declared = study(variants=("eager", "acme"))
    run(declared, steps=interrupted_at("begin", "second"))
    installed[0] = "acme-kernels 1.3"
    with pytest.raises(ResultMismatch, match=r"distribution of the variant acme acme-kernels 1\.2 then, acme-kernels 1\.3 now"):
        run(declared, resume=True)


def test_a_changed_checkout_of_the_package_is_not_resumed(monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda: "abc-dirty")
    run(study(), steps=interrupted_at("begin", "second"))
    monkeypatch.setattr(provenance, "package_digest", lambda: 64 * "0")
    with pytest.raises(ResultMismatch, match="files of onelaunch"):
        run(study(), resume=True)


def test_a_dirty_commit_of_an_older_result_is_not_resumed(monkeypatch, tmp_path, prose):
    monkeypatch.setattr(provenance, "commit", lambda: "abc-dirty")
    path = tmp_path / "mine.json"
    older = run(study(), save_to=path, steps=interrupted_at("begin", "second"))
    facts = older.provenance.model_copy(update={"variants": {}, "package": ""})
    older.model_copy(update={"provenance": facts}).save(path, force=True)
    with prose.raises(ResultMismatch, match="abc-dirty"):
        run(study(), save_to=path, resume=True)
