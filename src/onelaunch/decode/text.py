"""Text to tokens and back: tokenizers, chat templates, and text that is handed out while its tokens still come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onelaunch.errors import ArgumentError, CheckpointError, TokenizerMissing, in_a_line

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoding gives for a character whose bytes are not all there."""


class TextCodec:
    """The tokenizer of a model folder.

    Raises:
        TokenizerMissing: the package ``tokenizers`` is not installed.
        CheckpointError: the folder has no readable ``tokenizer.json``.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise TokenizerMissing("text needs the package tokenizers, which is not installed") from None
        if not path.is_file():
            raise CheckpointError(
                f"{self.folder} has no tokenizer.json; convert its tokenizer with transformers' save_pretrained"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            self._tokenizer.no_truncation()  # which training leaves behind
            self._tokenizer.no_padding()
        except Exception as problem:  # noqa: BLE001 - the package raises nothing narrower
            raise CheckpointError(f"{path} cannot be read: {in_a_line(problem)}") from None

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, with those that the tokenizer puts around it, unless it is :class:`Templated`.

        Raises:
            ArgumentError: it cannot be encoded in UTF-8, as with bytes that were none.
        """
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise ArgumentError(
                f"prompt has {text[problem.start]!r}, which is no character of Unicode; give text in UTF-8."
            ) from None
        return tuple(self._tokenizer.encode(text, add_special_tokens=not isinstance(text, Templated)).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; special ones, such as the end of a text, have none."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]], **choices: Any) -> Templated:
        """The prompt of a conversation by the model's chat template, ready for the answer.

        Args:
            messages: each with ``role`` and ``content``.
            **choices: what the template knows, such as ``enable_thinking=False`` of Qwen3.

        Raises:
            ArgumentError: there are no messages, or they are none.
            TokenizerMissing: the package ``transformers`` is not installed.
            CheckpointError: the model has no chat template, or one that fails or refuses the messages.
        """
        if not isinstance(messages, Sequence) or not messages or not all(isinstance(each, Mapping) for each in messages):
            raise ArgumentError(f"messages is {messages!r}; it must be mappings with role and content, at least one.")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise TokenizerMissing("chat templates need the package transformers, which is not installed") from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.folder))
        except Exception as problem:  # noqa: BLE001 - files may be wrong in many ways
            raise CheckpointError(f"the tokenizer of {self.folder} cannot be read: {in_a_line(problem)}") from None
        if not tokenizer.chat_template:
            raise CheckpointError(f"{self.folder} has no chat template; pass the prompt as text")
        try:
            found = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **choices)
        except Exception as problem:  # noqa: BLE001 - whatever a template does
            raise CheckpointError(f"the chat template of {self.folder} refuses these messages: {in_a_line(problem)}") from None
        return Templated(found)


class Templated(str):
    """A prompt to which a chat template has given all its special tokens: none is put around it again."""

    __slots__ = ()


class Detokenizer:
    """The text of tokens as they come: nothing is handed out before its last byte is there."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        # Decoding starts at a token of known text, since some tokenizers drop the space before the first token.
        self._start, self._known = 0, 0

    def push(self, token: int) -> str:
        """What became text with this token."""
        self._tokens.append(token)
        text = self._new()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._start, self._known = self._known, len(self._tokens)
        return text

    def finish(self) -> str:
        """What is left, characters that were never finished as replacement characters."""
        text = self._new()
        self._start = self._known = len(self._tokens)
        return text

    def _new(self) -> str:
        known = self._codec.decode(self._tokens[self._start : self._known])
        return self._codec.decode(self._tokens[self._start :])[len(known) :]


class StopStrings:
    """Holds text back while it may still become a stop string, and ends it where one is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """What can be handed out now; nothing after the stop string that begins first."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, _, self.found = min(hits)
            return self._held[:at]
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        out, self._held = self._held if self.found is None else "", ""
        return out

    def _overlap(self, stop: str) -> int:
        """How much of the end of the held text begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((length for length in range(longest, 0, -1) if self._held.endswith(stop[:length])), 0)
