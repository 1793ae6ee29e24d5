"""Tokenizers, chat templates, and incremental decoding of tokens to text.

Users may pass a :class:`TextCodec`, which ``onelaunch.decode`` exports, to ``Model``. ``decode/generate.py`` makes one for a
model folder, encodes and decodes with it, and uses :class:`Detokenizer` and :class:`StopStrings`. ``prompts.py`` encodes with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onelaunch.decode.model.files import TOKENIZER_BYTES, check_size, entry, read_json, read_text
from onelaunch.errors import ArgumentError, CheckpointError, TokenizerMissing
from onelaunch.wording import in_a_line, shown

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Character that stands for an incomplete UTF-8 sequence in decoded tokens."""

_TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja")
"""Files that hold chat templates. If there are several by name, the one named ``default`` is used."""

_TOKENIZER_FILES = (
    *_TEMPLATE_FILES, "added_tokens.json", "config.json", "merges.txt", "special_tokens_map.json", "tokenizer.json", "vocab.json",
)  # fmt: skip
"""Files that transformers reads for a tokenizer."""

_FIXED = (
    "add_generation_prompt", "conversation", "max_length", "padding", "return_dict", "return_tensors", "tokenize", "truncation",
)  # fmt: skip
"""Options of transformers' ``apply_chat_template`` that callers may not set, since the result must be one string."""


@contextmanager
def checkpoint_at_fault(said: str) -> Iterator[None]:
    """Raise :class:`CheckpointError` with ``said`` and the reason if another package fails on a model's files.

    Those packages raise nothing narrower than ``Exception``. A panic in Rust code, such as a tokenizer's, is an exception that
    derives from ``BaseException`` only.
    """
    try:
        yield
    except Exception as problem:  # noqa: BLE001
        raise CheckpointError(f"{said}: {in_a_line(problem)}") from None
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{said}: {str(problem)[:300]}") from None


class TextCodec:
    """Tokenizer of a model folder.

    Raises:
        TokenizerMissing: the package ``tokenizers`` is not installed, or the folder has no ``tokenizer.json``.
        CheckpointError: ``tokenizer.json`` cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._templates: Any = None
        path = entry(self.folder, "tokenizer.json")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise TokenizerMissing("text needs the package tokenizers, which is not installed") from None
        if not path.is_file():
            raise TokenizerMissing(
                f"{self.folder} has no tokenizer.json", "Convert its tokenizer with transformers' save_pretrained"
            )
        check_size(path, TOKENIZER_BYTES)
        with checkpoint_at_fault(f"{path} cannot be read"):
            self._tokenizer = Tokenizer.from_file(str(path))
            self._tokenizer.no_truncation()  # tokenizer.json may still hold the truncation used in training
            self._tokenizer.no_padding()

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenize a string. The tokenizer adds its special tokens, unless the string is :class:`Templated`.

        Raises:
            ArgumentError: the string cannot be encoded in UTF-8: it has surrogates, as after reading bytes that were not UTF-8.
            CheckpointError: the tokenizer fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise ArgumentError(
                f"prompt has {text[problem.start]!r}, which is no character of Unicode; give text in UTF-8."
            ) from None
        with checkpoint_at_fault(f"the tokenizer of {self.folder} fails on this prompt"):
            return tuple(self._tokenizer.encode(text, add_special_tokens=not isinstance(text, Templated)).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to a string; special tokens, such as end tokens, are skipped.

        Raises:
            CheckpointError: the tokenizer fails.
        """
        with checkpoint_at_fault(f"the tokenizer of {self.folder} fails on tokens of the model"):
            return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def token(self, token: int) -> str:
        """Decode a single token, which may be a special one; an incomplete UTF-8 sequence becomes replacement characters.

        Raises:
            CheckpointError: the tokenizer fails.
        """
        with checkpoint_at_fault(f"the tokenizer of {self.folder} fails on a token of the model"):
            return self._tokenizer.decode([token], skip_special_tokens=False)

    def chat(self, messages: Sequence[Mapping[str, Any]], **choices: Any) -> Templated:
        """Format a conversation by the model's chat template, up to where the reply begins.

        Args:
            messages: Messages, each with ``role`` and ``content``.
            **choices: Variables of the template, such as ``enable_thinking=False`` for Qwen3.

        Raises:
            ArgumentError: ``messages`` is empty or malformed, or an option is one that callers may not set.
            TokenizerMissing: the package ``transformers`` is not installed.
            CheckpointError: the model has no chat template, or one that fails or refuses the messages; or its files are wrong.
        """
        _check_messages(messages)
        if taken := [name for name in choices if name in _FIXED]:
            raise ArgumentError(f"{taken[0]} is {shown(choices[taken[0]])}; leave it out: the result is always one text.")
        if self._templates is None:
            self._templates = self._read_templates()
        tokenizer = self._templates
        with checkpoint_at_fault(f"the chat template of {self.folder} refuses these messages"):
            found = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **choices)
        if not isinstance(found, str):
            raise CheckpointError(f"the chat template of {self.folder} makes {shown(found)}; it must make text")
        return Templated(found)

    def _read_templates(self) -> Any:
        """Return transformers' tokenizer of the folder, which applies chat templates. Reading it takes half a second."""
        self._check_templates()
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise TokenizerMissing("chat templates need the package transformers, which is not installed") from None
        with checkpoint_at_fault(f"the tokenizer of {self.folder} cannot be read"):
            # Code in the folder is refused without asking the user, and nothing is downloaded.
            tokenizer = AutoTokenizer.from_pretrained(str(self.folder), trust_remote_code=False, local_files_only=True)
        if not tokenizer.chat_template:
            raise CheckpointError(f"{self.folder} has no chat template: it continues texts, and answers no messages")
        return tokenizer

    def _check_templates(self) -> None:
        """Raise if a file that transformers reads is a link that leaves the folder, or if its chat templates cannot be used.

        A file of templates must be readable, and ``chat_template`` a string or a list of named strings with the default.
        """
        for name in _TOKENIZER_FILES:
            entry(self.folder, name)
        config_file, template_file = (entry(self.folder, name) for name in _TEMPLATE_FILES)
        if template_file.exists():
            read_text(template_file)  # raises unless it is text of a permitted size
        if not config_file.exists():
            return
        template = read_json(config_file).get("chat_template")
        if template is None or isinstance(template, str):
            return
        said = f"chat_template of {config_file} is {shown(template)}"
        named = isinstance(template, list) and all(
            isinstance(each, Mapping) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str)
            for each in template
        )
        if not named:
            raise CheckpointError(f"{said}; it must be a text, or a list of objects with name and template")
        # transformers prefers the template file, so the configuration's templates need a default one only without it.
        if not template_file.exists() and template and "default" not in (each["name"] for each in template):
            raise CheckpointError(f"{said}; one of the templates must be named default")


def _check_messages(messages: object) -> None:
    """Raise :class:`ArgumentError` unless ``messages`` is a nonempty sequence of mappings with a role."""
    valid = isinstance(messages, Sequence) and len(messages) > 0 and not isinstance(messages, (str, bytes))
    if not valid or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages):  # pyrefly: ignore
        want = "mappings with role and content, at least one, such as [{'role': 'user', 'content': 'Hello'}]"
        raise ArgumentError(f"messages is {shown(messages)}; it must be {want}.")


class Templated(str):
    """Prompt from a chat template. It has all its special tokens, so the tokenizer adds none."""

    __slots__ = ()


class Detokenizer:
    """Incremental decoder of tokens: a character is returned once its last byte is known."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        # Characters of the first ``_known`` tokens have been returned. Decoding starts at the earlier token
        # ``_start``, since some tokenizers drop the space before the first token of a call.
        self._start, self._known = 0, 0

    def push(self, token: int) -> str:
        """Add a token, and return the characters that it completes."""
        self._tokens.append(token)
        text = self._new()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._start, self._known = self._known, len(self._tokens)
        return text

    def finish(self) -> str:
        """Return the remaining characters; an incomplete UTF-8 sequence becomes replacement characters."""
        text = self._new()
        self._start = self._known = len(self._tokens)
        return text

    def _new(self) -> str:
        """Decode the tokens that have not been returned yet."""
        known = self._codec.decode(self._tokens[self._start : self._known])
        return self._codec.decode(self._tokens[self._start :])[len(known) :]


class StopStrings:
    """Filter that holds characters back while they may begin a stop string, and drops everything from a complete one on."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """Stop string that was found, or ``None``."""

    def push(self, text: str) -> str:
        """Add characters, and return those that can be released: nothing from the first stop string on."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, _, self.found = min(hits)  # the earliest; of several at one place the longest
            return self._held[:at]
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def finish(self) -> str:
        """Return the characters held back, if no stop string was found."""
        out, self._held = self._held if self.found is None else "", ""
        return out

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest proper prefix of ``stop`` at the end of the characters held back."""
        longest = min(len(stop) - 1, len(self._held))
        return next((length for length in range(longest, 0, -1) if self._held.endswith(stop[:length])), 0)
