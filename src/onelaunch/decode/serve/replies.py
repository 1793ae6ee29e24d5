"""Response bodies of OpenAI's API: complete, or as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onelaunch.decode.generate import Finish
from onelaunch.decode.model.request import ScoredToken
from onelaunch.decode.serve.api import Chat, Completion

FINISH_REASONS: dict[Finish, str] = {"end": "stop", "stop": "stop", "length": "length", "context": "length", "closed": "abort"}
"""OpenAI's ``finish_reason`` for each reason why a sequence ended."""

Content = dict[str, Any]
"""JSON object."""


@dataclass
class Part:
    """Part of a choice: the tokens that one or several launches generated."""

    text: str
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    """Reason why the sequence ended with this part; ``None`` if it did not."""

    @classmethod
    def merged(cls, parts: Sequence[Part]) -> Part:
        """Return the concatenation of parts."""
        tokens = [token for part in parts for token in part.tokens]
        return cls("".join(part.text for part in parts), tokens, parts[-1].finish if parts else None)

    @property
    def reason(self) -> str | None:
        """OpenAI's ``finish_reason``; ``None`` if the sequence goes on."""
        return None if self.finish is None else FINISH_REASONS[self.finish]


@dataclass
class Usage:
    """Token counts of a request."""

    prompt: int = 0
    new: int = 0

    def content(self) -> Content:
        """Return OpenAI's ``usage`` object."""
        return {"prompt_tokens": self.prompt, "completion_tokens": self.new, "total_tokens": self.prompt + self.new}


class ChatReply:
    """Response to a request of ``/v1/chat/completions``.

    Args:
        request: Request.
        token_text: Function that returns the text of a single token.
    """

    def __init__(self, request: Chat, token_text: Callable[[int], str]) -> None:
        self._request, self._token_text = request, token_text
        self._head = {"id": f"chatcmpl-{secrets.token_hex(16)}", "created": int(time.time()), "model": request.model}

    def whole(self, parts: Sequence[Part], usage: Usage) -> Content:
        """Return the complete response with all choices."""
        choices = [
            {
                "index": index, "message": {"role": "assistant", "content": part.text, "refusal": None},
                "logprobs": self._logprobs(part), "finish_reason": part.reason,
            }
            for index, part in enumerate(parts)
        ]  # fmt: skip
        return self._head | {"object": "chat.completion", "choices": choices, "usage": usage.content()}

    def first(self, index: int) -> Content | None:
        """Return the chunk that begins a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, index: int, part: Part) -> Content:
        """Return the chunk of a part."""
        delta = {"content": part.text} if part.text or part.finish is None else {}
        return self._chunk(index, delta, self._logprobs(part), part.reason)

    def last(self, usage: Usage) -> Content:
        """Return the last chunk, which has the token counts."""
        return self._head | {"object": "chat.completion.chunk", "choices": [], "usage": usage.content()}

    def _chunk(self, index: int, delta: Content, logprobs: Content | None, reason: str | None) -> Content:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._request.usage_wanted else {}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]} | usage

    def _logprobs(self, part: Part) -> Content | None:
        if not self._request.logprobs:
            return None
        return {"content": [self._scored(token) for token in part.tokens if isinstance(token, ScoredToken)], "refusal": None}

    def _scored(self, token: ScoredToken) -> Content:
        top = [self._entry(other, logprob) for other, logprob in token.top]
        return self._entry(token, token.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> Content:
        """Return the entry of a token. ``bytes`` is ``None`` if the token ends within a UTF-8 sequence."""
        text = self._token_text(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


class CompletionReply:
    """Response to a request of ``/v1/completions``.

    Args:
        request: Request.
        token_text: Function that returns the text of a single token.
        prompts: Prompt that each choice repeats first; empty without ``echo``.
    """

    def __init__(self, request: Completion, token_text: Callable[[int], str], prompts: Sequence[str]) -> None:
        self._request, self._token_text, self._prompts = request, token_text, prompts
        self._head = {"id": f"cmpl-{secrets.token_hex(16)}", "created": int(time.time()), "model": request.model}
        self._offsets: dict[int, int] = {}

    def whole(self, parts: Sequence[Part], usage: Usage) -> Content:
        """Return the complete response with all choices."""
        choices = [
            self._choice(index, (self._prompts[index] if self._prompts else "") + part.text, part)
            for index, part in enumerate(parts)
        ]
        return self._head | {"object": "text_completion", "choices": choices, "usage": usage.content()}

    def first(self, index: int) -> Content | None:
        """Return the chunk with the prompt of a choice, if it is to be echoed."""
        if not self._prompts:
            return None
        return self._chunk(self._choice(index, self._prompts[index], Part("")))

    def chunk(self, index: int, part: Part) -> Content:
        """Return the chunk of a part."""
        return self._chunk(self._choice(index, part.text, part))

    def last(self, usage: Usage) -> Content:
        """Return the last chunk, which has the token counts."""
        return self._head | {"object": "text_completion", "choices": [], "usage": usage.content()}

    def _chunk(self, choice: Content) -> Content:
        usage = {"usage": None} if self._request.usage_wanted else {}
        return self._head | {"object": "text_completion", "choices": [choice]} | usage

    def _choice(self, index: int, text: str, part: Part) -> Content:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, part), "finish_reason": part.reason}

    def _logprobs(self, index: int, part: Part) -> Content | None:
        """Return the log-probabilities. Offsets are in characters of the tokens' decoded strings, from the first new token."""
        if self._request.logprobs is None:
            return None
        tokens = [token for token in part.tokens if isinstance(token, ScoredToken)]
        texts, offsets = [self._token_text(token) for token in tokens], []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts, "token_logprobs": [token.logprob for token in tokens], "text_offset": offsets,
            "top_logprobs": [self._top(token) for token in tokens],
        }  # fmt: skip

    def _top(self, token: ScoredToken) -> dict[str, float]:
        """Return log-probabilities by the decoded string, the largest if tokens share one. The chosen token is included."""
        found: dict[str, float] = {}
        for other, logprob in (*token.top, (token, token.logprob)):
            found.setdefault(self._token_text(other), logprob)
        return found
