"""Fields of requests: what is honoured, and what is refused.

Pydantic checks names and types. Ranges of sampling parameters are checked by :class:`onelaunch.decode.Sampling`. A field of
OpenAI's API that this server lacks is accepted only with values that ask for nothing (:data:`_NEUTRAL`). A field that is null
counts as absent, also in a message: clients send back the messages of answers, with their empty fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from onelaunch.decode.serve.problems import RequestError
from onelaunch.wording import did_you_mean, listing, shown

MOST_CHOICES = 128
"""Largest number of choices that a request may ask for: prompts times ``n``."""

MOST_LOGPROBS = 20
"""Largest number of likeliest tokens whose log-probabilities a request may ask for."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (), "best_of": (1,), "frequency_penalty": (0,), "function_call": ("none", "auto"), "functions": ([],),
    "logit_bias": ({},), "metadata": ({},), "modalities": (["text"],), "parallel_tool_calls": (), "prediction": (),
    "presence_penalty": (0,), "prompt_cache_key": (), "prompt_cache_retention": (), "reasoning_effort": (),
    "response_format": ({"type": "text"},), "safety_identifier": (), "service_tier": ("auto", "default"), "store": (False,),
    "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": (), "web_search_options": (),
}  # fmt: skip
"""Fields that are not supported, each with the values that ask for nothing and are therefore accepted."""

_TEMPLATE_ARGUMENTS = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Arguments of transformers' ``apply_chat_template``. A request may set variables of the template, and none of these."""


_UNIONS = {
    "prompt": "it must be text, several texts, token ids, or several lists of token ids",
    "stop": "it must be text of at most 1000 characters, or at most 64 such texts",
    "content": 'it must be text, or a list of parts {"type": "text", "text": ...}',
    "chat_template_kwargs": "its values must be texts, numbers, true, false or null",
}
"""Requirements on fields of several types, for which pydantic would report the first type only."""

_Stop = Annotated[str, Field(max_length=1000)]
"""Stop string. Its length bounds the time for the search of partial matches after each token."""


def _without_fraction(value: object) -> object:
    """Return a float without a fraction as an integer: JSON has one kind of numbers, and some clients write 4 as 4.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_without_fraction)]
"""Integer of a request."""

_Element = TypeVar("_Element")

_Listed = Annotated[list[_Element], Field(fail_fast=True)]
"""List among other types, whose first wrong element is its only error. A list of tokens has as many that are no texts."""


class _Fields(BaseModel):
    """Object whose fields have exactly the declared types; other fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Fields):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Flag to send a last chunk with the numbers of tokens."""
    include_obfuscation: Literal[False] = False


class TextPart(_Fields):
    """Part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Fields):
    """Message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    type: Literal["text", "message"] = "message"
    """Kind of the message, which some clients give. There is only one."""

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it: parts joined by line breaks, and ``developer`` as ``system``."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Generation(_Fields):
    """Fields that both kinds of completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Whole = Field(1, ge=1, le=MOST_CHOICES)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=64)] = Field(default_factory=list)
    seed: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    user: str | None = None
    """Label of the client's own user. It asks for nothing here."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream = true")
        return self

    @property
    def usage_wanted(self) -> bool:
        """Flag of a streamed answer that ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def choices(self) -> dict[str, Any]:
        """Return the options of :meth:`onelaunch.decode.Model.stream` that the request sets; ``top_k = -1`` keeps all tokens."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if found.get("top_k") == -1:
            found["top_k"] = 0
        return found | {"stop": self.stop, "ignore_end": self.ignore_eos}


class Chat(Generation):
    """Request of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: Whole = Field(0, ge=0, le=MOST_LOGPROBS)
    max_tokens: Whole | None = Field(None, ge=1)
    max_completion_tokens: Whole | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, str | int | float | bool | None] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_pairs(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if taken := sorted(_TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs has {taken[0]}, which is no variable of the chat template")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Largest number of new tokens; ``None`` for as many as the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of likeliest tokens to report with each token; ``None`` for no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class Completion(Generation):
    """Request of ``/v1/completions``."""

    prompt: str | _Listed[str] | _Listed[int] | _Listed[list[int]]
    logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)
    max_tokens: Whole = Field(16, ge=1)
    echo: bool = False

    @model_validator(mode="after")
    def _check_echo(self) -> Completion:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo does not go with logprobs: the log-probabilities of a prompt are not computed")
        if not 1 <= len(self.prompts()) * self.n <= MOST_CHOICES:
            raise ValueError(f"prompt and n ask for {len(self.prompts()) * self.n} choices; 1 to {MOST_CHOICES} are possible")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, of which there may be several."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # pyrefly: ignore[bad-return]
        return list(self.prompt)  # pyrefly: ignore[bad-return]

    @property
    def most_tokens(self) -> int | None:
        """Largest number of new tokens."""
        return self.max_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of likeliest tokens to report with each token; ``None`` for no log-probabilities."""
        return self.logprobs


class Tokenize(_Fields):
    """Request of ``/tokenize``: a prompt, or messages to which the chat template is applied."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


Parsed = TypeVar("Parsed", bound=_Fields)


def parse(body: bytes, kind: type[Parsed]) -> Parsed:
    """Return the request that a body describes.

    Raises:
        RequestError: the body is no JSON object in UTF-8, or a field is unknown, not supported, missing or of the wrong type.
    """
    try:
        content = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as problem:
        raise RequestError(400, f"The body is not JSON in UTF-8: {problem}.", code="invalid_json") from None
    if not isinstance(content, dict):
        raise RequestError(400, f"The body is {shown(content)}; it must be a JSON object.", code="invalid_json")
    given = _without_nulls(content)
    if isinstance(given.get("messages"), list):
        given["messages"] = [_without_nulls(each) if isinstance(each, dict) else each for each in given["messages"]]
    for name in sorted(given.keys() & _NEUTRAL.keys()):
        asked = given[name]
        if not any(isinstance(value, bool) is isinstance(asked, bool) and value == asked for value in _NEUTRAL[name]):
            accepted = listing([shown(value) for value in _NEUTRAL[name]] + ["null"])
            message = f"{name} is {shown(asked)}, which this server does not support. It accepts: {accepted}."
            raise RequestError(400, message, param=name, code="unsupported_parameter")
        del given[name]
    try:
        return kind.model_validate(given)
    except ValidationError as problem:
        raise _refused(problem, kind) from None


def _without_nulls(content: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object without its fields that are null."""
    return {name: value for name, value in content.items() if value is not None}


def _refused(problem: ValidationError, kind: type[_Fields]) -> RequestError:
    """Return the error for the first field that pydantic refuses."""
    first = problem.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(place, kind.model_fields) if len(first["loc"]) == 1 else ""
        return RequestError(400, f"There is no field {shown(place)}.{hint}", param=place, code="unknown_parameter")
    for index, part in enumerate(first["loc"]):
        if part in _UNIONS and first["type"] != "missing":
            place = ".".join(map(str, first["loc"][: index + 1]))
            return RequestError(400, f"{place} is of the wrong type; {_UNIONS[str(part)]}.", param=place, code="invalid_type")
    said = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return RequestError(400, f"{place}: {said}." if place else f"{said}.", param=place or None, code=code)
