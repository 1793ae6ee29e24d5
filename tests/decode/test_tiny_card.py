"""Tests that the bundled model's card agrees with its files and training script, and ships with the training text's notice."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from onelaunch.decode import ModelConfig, load_weights
from onelaunch.decode.model.hub import BUNDLED, find_model

FOLDER = find_model(BUNDLED)
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")
ROOT = Path(__file__).parents[2]


def table(heading: str) -> dict[str, str]:
    """Return the facts in the table below a heading of the card."""
    section = re.split(r"^## ", CARD.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, flags=re.MULTILINE)
    return {fact: value.strip("`").replace("\\|", "|") for fact, value in rows if fact != "fact"}


def read(name: str) -> dict[str, Any]:
    """Return the content of a JSON file of the model's folder."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def digest(name: str) -> str:
    """Return the hexadecimal SHA-256 digest of a file of the model's folder."""
    return hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()


def said(value: object) -> str:
    """Return a value as the card writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}" if isinstance(value, float) else str(value)


def test_the_cards_model_facts_match_the_files():
    config, generation, tokenizer = read("config.json"), read("generation_config.json"), read("tokenizer.json")
    tensors = load_weights(FOLDER, ModelConfig.from_pretrained(FOLDER)).tensors()
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16"}
    with (FOLDER / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    kept = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert {entry["dtype"] for entry in kept.values()} == {"BF16"}
    assert sum(math.prod(entry["shape"]) for entry in kept.values()) == sum(tensor.numel() for tensor in tensors.values())
    assert tokenizer["model"]["type"] == "BPE"
    assert tokenizer["pre_tokenizer"]["type"] == "ByteLevel"
    vocabulary = tokenizer["model"]["vocab"]
    named = (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    expected = {name: said(config[name]) for name in named} | {
        "architecture": config["architectures"][0],
        "parameters": said(sum(tensor.numel() for tensor in tensors.values())),
        "tensors": said(len(kept)),
        "dtype of the weights": config["dtype"],
        "max_position_embeddings (context)": said(config["max_position_embeddings"]),
        "rope_theta": said(config["rope_parameters"]["rope_theta"]),
        "tokenizer": "byte-level BPE",
        "tokens of the tokenizer": said(len(vocabulary)),
        "end token": next(token for token, number in vocabulary.items() if number == config["eos_token_id"]),
        "chat template": str(read("tokenizer_config.json").get("chat_template")).lower(),
        "temperature by default": said(generation["temperature"]),
        "top_p by default": said(generation["top_p"]),
        "bytes of model.safetensors": said((FOLDER / "model.safetensors").stat().st_size),
        "SHA-256 of model.safetensors": digest("model.safetensors"),
        "SHA-256 of tokenizer.json": digest("tokenizer.json"),
    }
    assert table("The model") == expected
    assert not list(FOLDER.glob("*.jinja"))


def constants(path: Path) -> dict[str, Any]:
    """Return the literals that a script assigns at its top level, without importing what it needs. It may assign nothing else."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Tuple):
            found |= zip(
                (each.id for each in target.elts if isinstance(each, ast.Name)), ast.literal_eval(node.value), strict=True
            )
        elif isinstance(node, ast.Assign) and isinstance(target, ast.Name):
            found[target.id] = ast.literal_eval(node.value)
    return found


def test_the_cards_training_facts_match_the_script():
    script = constants(ROOT / "tools" / "train_tiny_qwen3.py")
    assert table("The training") == {
        "steps": said(script["STEPS"]),
        "seed": said(script["SEED"]),
        "sequences of a step": said(script["BATCH"]),
        "tokens of a sequence": said(script["LENGTH"]),
        "tokens seen": said(script["STEPS"] * script["BATCH"] * script["LENGTH"]),
        "largest learning rate": said(script["LEARNING_RATE"]),
        "steps of warm-up": said(script["WARM_UP"]),
    }
    config = read("config.json")
    assert {name: config[name] for name in script["SHAPE"]} == script["SHAPE"], "the files are those that the script writes"
    assert (config["vocab_size"], table("The model")["end token"]) == (script["VOCABULARY"], script["END"])
    for folder in script["LEFT_OUT"] & {"encodings", "pydoc_data", "lib2to3"}:
        assert f"`{folder}`" in CARD


def test_the_licenses_of_weights_and_training_text_are_stated():
    notice = (FOLDER / "NOTICE").read_text(encoding="utf-8")
    assert CARD.startswith("---\nlicense: apache-2.0\n")
    assert "PSF-2.0" in CARD
    for words in (
        "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2", "All Rights Reserved", "Summary of the changes",
        "Apache License, Version 2.0", "8. By copying, installing or otherwise using Python",
    ):  # fmt: skip
        assert words in notice
    numbers = re.findall(r"\d+(?:,\d{3})*", notice.split("-----")[0].split("Summary of the changes")[1])
    assert table("The model")["parameters"] in numbers
    assert "517" in numbers  # files of the training text
    assert "517 files" in CARD


@pytest.mark.parametrize("name", ["README.md", "NOTICE"])
def test_card_and_notice_are_distributed(name):
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    targets = built["tool"]["hatch"]["build"]["targets"]
    path = f"src/onelaunch/decode/{BUNDLED}/{name}"
    assert (ROOT / path).is_file()
    assert any(path.startswith(f"{root}/") for root in targets["wheel"]["packages"])
    assert any(f"/{path}".startswith(f"{root}/") for root in targets["sdist"]["include"])
    assert not any(set(target) & {"exclude", "only-include"} for target in targets.values())
    assert f"src/onelaunch/decode/{BUNDLED}/NOTICE" in built["project"]["license-files"]
