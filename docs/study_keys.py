"""Generate the tables of a study file's keys and of the measures, from the models and the registry that read the file."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sphinx.pycode import ModuleAnalyzer

from onelaunch.operation import find_operation
from onelaunch.workbench.report.documents import code, markdown_table
from onelaunch.workbench.study import Criterion, Prediction, Shape, Study, measures

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyrefly: ignore[missing-import]

MODELS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("study", "Keys of a study", Study),
    ("shape", "Keys of a shape: `[[shapes]]`", Shape),
    ("criterion", "Keys of a criterion: `[[criteria]]`", Criterion),
    ("prediction", "Keys of a prediction: `[[predictions]]`", Prediction),
)
"""Name of the part without ``keys-``, heading and model of each table."""

PREDICTION = {
    "by": "write-up 040",
    "measure": "speedup",
    "of": "semi_fused",
    "over": "three_launch",
    "at": "target",
    "direction": "forward_backward",
    "regime": "warm",
    "value": 1.3,
    "why": "One HBM round trip and one launch are saved.",
}
"""Prediction whose keys are the examples as long as no study declares one."""

LONGEST = 48
"""Largest number of characters of a string in an example; longer ones are cut. Other values are never cut."""

NAMES = {str: "string", int: "integer", float: "number", bool: "true or false"}
"""Words for a type in the column "type"."""


def parts(studies: Path) -> dict[str, str]:
    """Return the written parts of pages by their names: one table for each of the four models, and one of the measures."""
    raw = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(studies.glob("*.toml"))]
    tables: dict[type[BaseModel], list[dict[str, Any]]] = {
        Study: raw,
        Shape: [_shape(table, study["operation"]) for study in raw for table in study["shapes"]],
        Criterion: [table for study in raw for table in study["criteria"]],
        Prediction: [table for study in raw for table in study.get("predictions", ())] or [PREDICTION],
    }
    keys = {f"keys-{name}": f"### {title}\n\n{_table(model, tables[model])}" for name, title, model in MODELS}
    rows = [[code(measure.name), measure.meaning] for measure in measures()]
    return {**keys, "measures": markdown_table(["`measure`", "value that is compared with the bound"], rows)}


def _shape(table: Mapping[str, Any], operation: str) -> dict[str, Any]:
    """Return a shape's table with its sizes and options under the names of the model's fields."""
    sizes = {key: table[key] for key in find_operation(operation).dimensions if key in table}
    own = {key: value for key, value in table.items() if key in Shape.model_fields}
    options = {key: value for key, value in table.items() if key not in sizes and key not in own}
    return {**own, "sizes": sizes, "options": options}


def _table(model: type[BaseModel], declared: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a model's keys; examples are taken from the tables that study files have for it."""
    meanings = ModuleAnalyzer.for_module(model.__module__).find_attr_docs()
    rows = []
    for key, field in model.model_fields.items():
        meaning = " ".join(meanings[model.__name__, key]).strip()  # a field without a docstring stops the build
        kind = ", ".join(code(json.dumps(measure.name)) for measure in measures()) if key == "measure" else _type(field)
        rows.append([code(key), meaning, kind, _default(field), _example(key, field, declared)])
    return markdown_table(["key", "meaning", "type", "default", "example"], rows)


def _type(field: FieldInfo) -> str:
    """Return the type of a key and its limits in words."""
    limits = [f"at least {limit.ge}" for limit in field.metadata if hasattr(limit, "ge")]
    limits += [f"at least {limit.min_length}" for limit in field.metadata if getattr(limit, "min_length", None)]
    limits += [f"at most {limit.max_length} characters" for limit in field.metadata if getattr(limit, "max_length", None)]
    limits += [f"matching {code(limit.pattern)}" for limit in field.metadata if getattr(limit, "pattern", None)]
    return ", ".join([_words(field.annotation), *limits])


def _words(annotation: Any) -> str:
    """Return a type as someone who writes TOML calls it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(code(json.dumps(value)) for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(each) for each in inner if each is not type(None)))
    if origin is tuple:
        of = _words(inner[0])
        return f"{of}s" if of == "table" else f"list of {of}" if of.startswith("`") else f"list of {of}s"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    return NAMES[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "none" if value is None else code(_toml(value))


def _example(key: str, field: FieldInfo, declared: Iterable[Mapping[str, Any]]) -> str:
    """Return the shortest use of a key in the study files, with another value than its default; empty if there is none.

    Values of one or two characters are taken only if there are no longer ones.
    """
    default = field.get_default(call_default_factory=True)
    used = [table[key] for table in declared if table.get(key) not in (None, default, {}, [])]
    if not used and _words(field.annotation) == "tables":  # no study has such a table yet
        return code(f"[[{key}]]")
    written = sorted({_assigned(key, value) for value in used}, key=lambda text: (len(text) < len(key) + 6, len(text), text))
    return code(written[0]) if written else ""


def _assigned(key: str, value: Any) -> str:
    """Return the use of a key as it is written in a study file."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"[[{key}]]"
    if key in ("sizes", "options"):
        return ", ".join(f"{name} = {_toml(each)}" for name, each in value.items())
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{key} = {json.dumps(value.strip().splitlines()[0][:LONGEST] + '…', ensure_ascii=False)}"
    return f"{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    """Return a value in the syntax of TOML."""
    if isinstance(value, dict):
        inner = ", ".join(f"{name} = {_toml(each)}" for name, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return json.dumps(value, ensure_ascii=False)
