"""Text while its tokens come: characters and stop strings that several tokens share."""

from __future__ import annotations

from pathlib import Path

import pytest

from onelaunch.decode.text import Detokenizer, StopStrings, TextCodec
from onelaunch.errors import ArgumentError, CheckpointError

pytest.importorskip("tokenizers", reason="needs the extra decode")


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> TextCodec:
    """A token for every byte, and the special token ``<end>``."""
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
    detokenizer = Detokenizer(codec)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


def test_a_character_comes_with_its_last_byte(codec):
    text = "né €😀\n"
    tokens = codec.encode(text)
    assert len(tokens) == len(text.encode())
    found = pieces(codec, tokens)
    assert "".join(found) == text
    assert found == ["n", "", "é", " ", "", "", "€", "", "", "", "😀", "\n", ""]


def test_bytes_that_are_no_character_do_not_hold_up_what_follows(codec):
    euro = codec.encode("€")
    assert pieces(codec, (*codec.encode("a"), *euro[:2], *codec.encode("bc"))) == ["a", "", "", "\ufffdb", "c", ""]
    assert pieces(codec, euro[:2]) == ["", "", "\ufffd"]


def test_special_tokens_have_no_text(codec):
    assert pieces(codec, (*codec.encode("a"), *codec.encode("<end>"), *codec.encode("b"))) == ["a", "", "b", ""]


def held(stops, *texts) -> tuple[list[str], str | None]:
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
def test_stop_strings_across_pieces(stops, texts, expected, found):
    assert held(stops, *texts) == (expected, found)


def test_however_a_text_is_cut_it_stops_in_the_same_place():
    text, stops = "one two three STOP four", ["STOP", "three!", "e t"]
    whole, _ = held(stops, text)
    for width in range(1, len(text)):
        cut = [text[at : at + width] for at in range(0, len(text), width)]
        assert "".join(held(stops, *cut)[0]) == "".join(whole) == "on"


def test_prompts_are_whole_and_nothing_else_whatever_training_left(codec, tmp_path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(codec.folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, direction="left")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for text in ("ab", "longer than four"):
        assert TextCodec(tmp_path).encode(text) == codec.encode(text)


def test_text_that_is_none_is_refused(codec):
    with pytest.raises(ArgumentError, match=r"prompt has '.udce9', which is no character of Unicode"):
        codec.encode("caf\udce9")


# Conversations

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def talking(codec, tmp_path) -> Path:
    """The folder of a tokenizer that begins every text with ``<end>``, and whose template does so too."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(codec.folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<end>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", end)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<end>"}')
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_a_conversation_has_its_special_tokens_once(talking):
    transformers = pytest.importorskip("transformers", reason="needs the extra decode")
    messages = [{"role": "user", "content": "hi"}]
    codec = TextCodec(talking)
    expected = transformers.AutoTokenizer.from_pretrained(talking).apply_chat_template(messages, tokenize=True, return_dict=False)
    assert codec.chat(messages) == "<end>hi"
    assert list(codec.encode(codec.chat(messages))) == expected
    assert list(codec.encode("hi")) == expected, "other text gets them here"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("chat_template.jinja", "{% for m in messages %}{{m.role}", "the chat template of .* refuses these messages"),
        ("chat_template.jinja", "{{ raise_exception('no way') }}", "refuses these messages: no way"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", '{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ("tokenizer_config.json", '{"model_max_length": NaN}', "NaN is no number of JSON"),
        ("tokenizer_config.json", '{"a":' * 10**5, "nested too deeply"),
        ("tokenizer_config.json", " " * 9_000_000, "has 9,000,000 bytes; such a file may have"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', "the tokenizer of .* cannot be read"),
        ("special_tokens_map.json", "[", "the tokenizer of .* cannot be read"),
        ("chat_template.jinja", "\udcff", "is not text in UTF-8"),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_be_put_into_words(file, content, message, talking):
    pytest.importorskip("transformers", reason="needs the extra decode")
    (talking / file).write_text(content, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=message) as caught:
        TextCodec(talking).chat([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", ["hello", [], ["hello"], None])
def test_messages_that_are_none(messages, talking):
    with pytest.raises(ArgumentError, match=r"messages is .*; it must be mappings with role and content"):
        TextCodec(talking).chat(messages)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        TextCodec(tmp_path)
