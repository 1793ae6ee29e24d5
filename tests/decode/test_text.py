"""Tests of streaming text: characters and stop strings that span several tokens, prompts, and chat templates.

``prose.raises`` compares the message of an error with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it
does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone. With
``foreign`` the part of the message that comes from another library is masked, since it changes with versions.

``SMALL`` is a small float32 model.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from onelaunch.decode.model.prompts import tokens_of
from onelaunch.decode.model.tokenizer import Detokenizer, StopStrings, TextCodec
from onelaunch.errors import ArgumentError, CheckpointError, TokenizerMissing
from tests.decode.models import SMALL

pytest.importorskip("tokenizers", reason="needs the extra decode")


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> TextCodec:
    """Return a tokenizer with a token for every byte and the special token ``<end>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: at for at, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


def pieces(codec: TextCodec, tokens) -> list[str]:
    """Return the text that each token completes, and the rest at the end."""
    detokenizer = Detokenizer(codec)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


def test_a_character_comes_with_its_last_byte(codec):
    text = "né €😀\n"
    tokens = codec.encode(text)
    assert len(tokens) == len(text.encode())
    found = pieces(codec, tokens)
    assert "".join(found) == text
    assert found == ["n", "", "é", " ", "", "", "€", "", "", "", "😀", "\n", ""]


def test_invalid_bytes_do_not_delay_later_text(codec):
    euro = codec.encode("€")
    assert pieces(codec, (*codec.encode("a"), *euro[:2], *codec.encode("bc"))) == ["a", "", "", "\ufffdb", "c", ""]
    assert pieces(codec, euro[:2]) == ["", "", "\ufffd"]


def test_special_tokens_have_no_text(codec):
    assert pieces(codec, (*codec.encode("a"), *codec.encode("<end>"), *codec.encode("b"))) == ["a", "", "b", ""]


def held(stops, *texts) -> tuple[list[str], str | None]:
    """Push texts through stop strings. Return what each push and the end let through, and the stop string that was found."""
    strings = StopStrings(stops)
    return [strings.push(text) for text in texts] + [strings.finish()], strings.found


@pytest.mark.parametrize(
    ("stops", "texts", "expected", "found"),
    [
        ((), ["ab", "c"], ["ab", "c", ""], None),
        (["\n\n"], ["a\n", "\nb"], ["a", "", ""], "\n\n"),
        (["\n\n"], ["a\n", "b\n"], ["a", "\nb", "\n"], None),
        (["END"], ["xE", "N", "Dy", "z"], ["x", "", "", "", ""], "END"),
        (["END"], ["xE", "N", "E", "ND"], ["x", "", "EN", "", ""], "END"),
        (["aab"], ["aa", "a", "ab"], ["", "a", "a", ""], "aab"),
        (["lo w", "low"], ["hello w"], ["hel", ""], "lo w"),
        (["b", "abc"], ["ab", "c"], ["a", "", ""], "b"),
        (["x"], ["x"], ["", ""], "x"),
        (["cd", "bcd"], ["abcd"], ["a", ""], "bcd"),
    ],
)  # fmt: skip
def test_stop_strings_that_span_pieces(stops, texts, expected, found):
    assert held(stops, *texts) == (expected, found)


def test_stop_strings_do_not_depend_on_how_text_is_cut():
    text, stops = "one two three STOP four", ["STOP", "three!", "e t"]
    whole, _ = held(stops, text)
    for width in range(1, len(text)):
        cut = [text[at : at + width] for at in range(0, len(text), width)]
        assert "".join(held(stops, *cut)[0]) == "".join(whole) == "on"


def test_prompts_are_not_truncated_or_padded_by_tokenizer_settings(codec, tmp_path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(codec.folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, direction="left")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for text in ("ab", "longer than four"):
        assert TextCodec(tmp_path).encode(text) == codec.encode(text)


def test_invalid_unicode_is_refused(codec, prose):
    with prose.raises(ArgumentError, match="'.udce9'"):
        codec.encode("caf\udce9")


# Conversations

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def talking(codec, tmp_path) -> Path:
    """Return the folder of a tokenizer that begins every text with ``<end>`` and whose chat template does so too."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(codec.folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<end>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", end)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<end>"}')
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_special_tokens_of_a_conversation_are_not_doubled(talking):
    transformers = pytest.importorskip("transformers", reason="needs the extra decode")
    messages = [{"role": "user", "content": "hi"}]
    codec = TextCodec(talking)
    expected = transformers.AutoTokenizer.from_pretrained(talking).apply_chat_template(messages, tokenize=True, return_dict=False)
    assert codec.chat(messages) == "<end>hi"
    assert list(codec.encode(codec.chat(messages))) == expected
    assert list(codec.encode("hi")) == expected, "this tokenizer adds them to other text"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("chat_template.jinja", "{% for m in messages %}{{m.role}", ""),
        ("chat_template.jinja", "{{ raise_exception('no way') }}", ""),
        ("tokenizer_config.json", "{", r"config\.json"),
        ("tokenizer_config.json", '{"a": 1, "a": 2}', "'a'"),
        ("tokenizer_config.json", '{"model_max_length": NaN}', "JSON"),
        ("tokenizer_config.json", '{"a":' * 10**5, "JSON"),
        ("tokenizer_config.json", " " * 9_000_000, "9,000,000"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', ""),
        ("special_tokens_map.json", "[", ""),
        ("chat_template.jinja", "\udcff", "UTF"),
    ],
)  # fmt: skip
def test_a_failing_chat_template_is_reported(file, content, message, talking, prose):
    pytest.importorskip("transformers", reason="needs the extra decode")
    (talking / file).write_text(content, errors="surrogateescape")
    with prose.raises(CheckpointError, match=message, foreign=not message) as caught:
        TextCodec(talking).chat([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)


MESSAGES = [{"role": "user", "content": "hi"}]
# Several chat templates by name, as a tokenizer's configuration may hold them.
NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}!"}]


def describe(folder: Path, template: object) -> TextCodec:
    """Write a chat template into a folder's ``tokenizer_config.json`` and return the folder's tokenizer."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return TextCodec(folder)


@pytest.mark.parametrize("template", [NAMED, NAMED[::-1], NAMED[1]["template"]], ids=["last", "first", "text"])
def test_the_default_of_several_chat_templates_is_used(talking, template):
    pytest.importorskip("transformers", reason="needs the extra decode")
    assert describe(talking, template).chat(MESSAGES) == "hi!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (["{{ messages }}"], "chat_template"),
        ([{"name": "default"}], "chat_template"),
        ([{"name": "default", "template": 3}], "chat_template"),
        ({"default": "x"}, "chat_template"),
        (3, "chat_template"),
        (True, "chat_template"),
        (NAMED[:1], ""),
    ],
)
def test_a_chat_template_of_a_wrong_type_is_refused(talking, template, message, prose):
    with prose.raises(CheckpointError, match=message):
        describe(talking, template).chat(MESSAGES)


@pytest.mark.parametrize("template", [None, "", []])
def test_a_missing_chat_template_is_reported(talking, template, prose):
    pytest.importorskip("transformers", reason="needs the extra decode")
    with prose.raises(CheckpointError):
        describe(talking, template).chat(MESSAGES)


def test_a_folder_cannot_bring_code_or_refer_to_other_files(talking, tmp_path_factory, prose):
    pytest.importorskip("transformers", reason="needs the extra decode")
    marker = tmp_path_factory.mktemp("marker") / "ran"
    (talking / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    described = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (talking / "tokenizer_config.json").write_text(json.dumps(described))
    with contextlib.suppress(CheckpointError):  # transformers may use its own class instead of the folder's
        TextCodec(talking).chat(MESSAGES)
    assert not marker.exists()
    secret = marker.parent / "secret"
    secret.write_text("secret")
    (talking / "chat_template.jinja").unlink()
    (talking / "chat_template.jinja").symlink_to(secret)
    with prose.raises(CheckpointError, match=r"template\.jinja"):
        TextCodec(talking).chat(MESSAGES)


@pytest.mark.parametrize("name", ["tokenize", "return_dict", "add_generation_prompt", "conversation"])
def test_template_options_that_callers_may_not_set(talking, name, prose):
    with prose.raises(ArgumentError, match=name):
        TextCodec(talking).chat(MESSAGES, **{name: True})


@pytest.mark.parametrize(
    "messages", ["hello", [], ["hello"], None, [{"content": "x"}], [{"role": 3, "content": "x"}], {"role": "user"}]
)
def test_invalid_messages_are_refused(messages, talking, prose):
    with prose.raises(ArgumentError, match="messages"):
        TextCodec(talking).chat(messages)


def test_a_folder_without_a_tokenizer(tmp_path, prose):
    with prose.raises(TokenizerMissing, match=r"tokenizer\.json"):
        TextCodec(tmp_path)
    for content in ("{}", "[]", "", "[" * 10**6, '{"version": NaN}', "{" * 10, "null", '{"model": {"type": "BPE", "vocab": 3}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with prose.raises(CheckpointError, match=r"tokenizer\.json", foreign=True):
            TextCodec(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)
    with prose.raises(CheckpointError, match=r"tokenizer\.json"):
        TextCodec(tmp_path)


def test_a_tokenizer_of_another_model_is_named(codec, prose):
    """A token that the model does not have is the tokenizer's fault, not that of the prompt, which holds no token ids."""
    config = replace(SMALL, vocab_size=200)
    with prose.raises(CheckpointError, match="220") as caught:
        tokens_of("a \u00ff", replace(config, eos_token_ids=()), lambda what: codec)
    assert not isinstance(caught.value, ArgumentError)
    assert tokens_of("a", config, lambda what: codec) == codec.encode("a")


def test_a_tokenizer_that_fails_is_named(tmp_path, prose):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="missing")).save(str(tmp_path / "tokenizer.json"))
    with prose.raises(CheckpointError, foreign=True):
        TextCodec(tmp_path).encode("b")
