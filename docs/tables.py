"""Make the generated parts of the documentation: tables of variants and study keys, which the pages hold, and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate_tables
import experiment_tables
import rank_tables
import study_keys
import torch
from study_keys import tomllib

from onelaunch.model_studies.judge import judged
from onelaunch.model_studies.report import to_document
from onelaunch.model_studies.result import ModelResult
from onelaunch.operation import Operation, Variant, operations
from onelaunch.workbench.report.documents import code, docs_overview, docs_section, markdown_table
from onelaunch.workbench.report.sizes import docs_sizes
from onelaunch.workbench.result import Result

NOTHING_MEASURED = "Nothing has been measured yet: there is no result of this operation under `results/`.\n"

NO_MODEL = "No model has been measured yet: there is no result of a study of models under `results/`.\n"

FLA_ARGUMENTS = Path(__file__).with_name("fla_arguments.toml")
"""Signatures of fla's functions, and what each argument is here."""

ELSEWHERE = {"decode_step": "decode.md"}
"""Page of each operation whose page is not ``operations/NAME.md``."""


def parts(root: Path) -> dict[str, str]:
    """Return the written parts of pages by their names, from the registry, ``results/`` and ``studies/`` of the repository.

    They stand in the pages themselves, where GitHub shows them: ``python -m tools.write_pages`` writes them.
    """
    stored = _stored(root / "results")
    known = list(operations())
    notes = sorted(path.stem for path in (root / "docs" / "notebook").glob("*.md") if path.stem != "index")
    return {
        **{f"variants-{operation.name}": _variants(operation) for operation in known},
        "stated-errors": _stated_errors(known),
        **{f"fla-arguments-{operation}": text for operation, text in _fla_arguments(FLA_ARGUMENTS).items()},
        "overview": docs_overview(stored.values(), _page),
        "notebook": "\n".join(f"- [{name}]({name}.md)" for name in notes),
        **study_keys.parts(root / "studies"),
        **experiment_tables.parts(stored),
        **accelerate_tables.parts(stored),
        **rank_tables.parts(root / "results"),
    }


def write(folder: Path, root: Path) -> None:
    """Write the generated files, which are too long for the pages themselves: times and plots by operation, and criteria."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = _stored(root / "results")
    named = [(result, f"results/{name}.json") for name, result in stored.items()]
    for operation in operations():
        measured = "\n".join(docs_section(result, path) for result, path in named if result.study.operation == operation.name)
        _replace(folder / f"measured-{operation.name}.md", measured or NOTHING_MEASURED)
        shown = [each for each in named if operation.name in each[0].study.operation_names()]
        _replace(folder / f"sizes-{operation.name}.md", docs_sizes(shown, operation.name))
    models = [
        to_document(judged(ModelResult.load(path)), str(path.relative_to(root)))
        for path in sorted(root.glob("results/*/models/*.json"))
    ]
    _replace(folder / "measured-models.md", "\n".join(models) or NO_MODEL)
    for name, text in experiment_tables.criteria(stored).items():
        _replace(folder / name, text)


def _stored(results: Path) -> dict[str, Result]:
    """Return the stored results by name, such as ``nvidia-h200/040-linear-rnn``."""
    paths = sorted(results.glob("*/*.json")) if results.is_dir() else []
    return {path.relative_to(results).with_suffix("").as_posix(): Result.load(path) for path in paths}


def _page(operation: str) -> str:
    """Return the page of an operation, relative to the folder of the pages."""
    return ELSEWHERE.get(operation, f"operations/{operation}.md")


def _replace(path: Path, text: str) -> None:
    """Write a file unless it already has this content, so that Sphinx does not read its page again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _variants(operation: Operation) -> str:
    """Return the table of an operation's variants; the column on matrix products only if a variant names theirs."""
    products = any("gemm" in variant.tags for variant in operation.variants.values())
    rows = [
        [
            code(variant.name),
            "many" if variant.launches is None else str(variant.launches),
            ", ".join(variant.tags.get("fuses", ())) or "-",
            *([variant.tags.get("gemm", "PyTorch" if _rank(variant) == 1 else "-")] if products else []),
            variant.summary.replace("|", "\\|"),
        ]
        for variant in sorted(operation.variants.values(), key=_rank)
    ]
    heads = ["variant", "launches", "steps in one kernel", *(["matrix product"] if products else []), "what it is"]
    return markdown_table(heads, rows)


def _fla_arguments(path: Path) -> dict[str, str]:
    """Return for each operation the table of the arguments of fla's functions, and what each is here."""
    stored = tomllib.loads(path.read_text(encoding="utf-8"))
    tables = {}
    for operation, modules in stored["modules"].items():
        names = [name for functions in modules.values() for name in functions]
        rows = [
            [code(argument), ", ".join(code(name) for name in names if argument in _taken(stored, name)), meaning]
            for argument, meaning in stored["arguments"][operation].items()
        ]
        tables[operation] = markdown_table(["argument", "functions", "here"], rows)
    return tables


def _taken(stored: Mapping[str, Any], function: str) -> list[str]:
    """Return the arguments that a function of fla takes: its parameters, and its keywords among ``**kwargs``."""
    parameters = [each.partition("=")[0] for each in stored["signatures"][function].split(", ")]
    return [*parameters, *stored["keywords"].get(function, ())]


def _stated_errors(known: list[Operation]) -> str:
    """Return the table of the errors that operations state for float32 results of calls whose inputs have 16 bits."""
    rows = [
        [code(operation.name), ", ".join(map(code, names)), *(f"{errors[dtype]:g}" for dtype in (torch.bfloat16, torch.float16))]
        for operation in known
        for errors, names in _by_errors(operation)
    ]
    return markdown_table(["operation", "float32 results", "bfloat16", "float16"], rows)


def _by_errors(operation: Operation) -> list[tuple[Mapping[torch.dtype, float], list[str]]]:
    """Return the stated errors of an operation, each with the names of the results that it is stated for."""
    stated = operation.stated_errors
    distinct = [errors for index, errors in enumerate(stated.values()) if errors not in list(stated.values())[:index]]
    return [(errors, [name for name, its in stated.items() if its == errors]) for errors in distinct]


def _rank(variant: Variant) -> int:
    """Return the sort key of a variant: a stated number of launches (0), then "many", as PyTorch has (1), then libraries (2)."""
    return 2 if variant.capabilities.requires else int(variant.launches is None)
