"""Errors of requests, in the form in which OpenAI's API reports them, and the translation of the library's errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic_core

from onelaunch.errors import ArgumentError, CheckpointError, ContextExceeded, DeviceMemoryError, OneLaunchError, TokenizerMissing
from onelaunch.wording import escaped


class RequestError(Exception):
    """Error that ends a request with a status and OpenAI's error object.

    Args:
        status: HTTP status.
        message: Sentence that says what is wrong, and what to do if possible.
        param: Name of the wrong field; ``None`` if the error is of no single field.
        code: Word by which programs tell errors apart.
        retry_after: Seconds after which a new attempt makes sense; ``None`` for none.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, escaped(message), param, code, retry_after

    @property
    def kind(self) -> str:
        """Type of the error, by its status."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def content(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer, apart from those of its content."""
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


class ClientGone(Exception):
    """Signal that the client hung up, or that its connection is broken."""


def to_json(content: object) -> bytes:
    """Return an object as JSON in UTF-8. A lone surrogate becomes its escape, which JSON permits."""
    try:
        return pydantic_core.to_json(content)
    except pydantic_core.PydanticSerializationError:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def of_prompt(problem: OneLaunchError) -> RequestError:
    """Return the error of a request whose prompt or parameters the library refuses."""
    if isinstance(problem, ContextExceeded):
        return RequestError(400, str(problem), param="messages or prompt", code="context_length_exceeded")
    if isinstance(problem, ArgumentError):
        found = re.match(r"\w+", str(problem))
        return RequestError(400, str(problem), param=found and found[0], code="invalid_value")
    if isinstance(problem, (CheckpointError, TokenizerMissing)):
        return RequestError(400, str(problem), code="unsupported_by_model")
    return of_generation(problem)


def of_generation(problem: BaseException) -> RequestError:
    """Return the error of a request that failed while tokens were generated."""
    if isinstance(problem, DeviceMemoryError):
        return RequestError(503, str(problem), code="device_memory", retry_after=1)
    if isinstance(problem, OneLaunchError):
        return RequestError(500, str(problem), code="generation_failed")
    return RequestError(500, "The server failed on this request; its log says why.", code="internal_error")
