"""Command ``onelaunch generate``: stream text from a small language model to stdout."""

from __future__ import annotations

import io
import sys
import time
import warnings
from typing import Annotated, Any

import typer

from onelaunch.cli import output
from onelaunch.cli.arguments import DeviceName
from onelaunch.decode.generate import Model
from onelaunch.decode.model.hub import BUNDLED
from onelaunch.decode.model.sampling import Sampling
from onelaunch.errors import ArgumentError, FallbackNotice, OneLaunchError

MODELS = "the model's"
"""Default that the help shows for options that ``generation_config.json`` or ``config.json`` sets."""


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.", show_default=False)],
    model: Annotated[
        str, typer.Option("--model", help="Model folder, owner/name on the hub, or tiny, the bundled model.")
    ] = BUNDLED,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Largest number of new tokens.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", help="Divisor of the logits; 0 takes the likeliest token.", show_default=MODELS),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", help="Sample from this many of the likeliest tokens; 0 keeps all.", show_default=MODELS),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", help="Sample from the smallest set of tokens that reaches this probability.", show_default=MODELS
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", help="Keep tokens whose probability is at least min_p times the largest.", show_default=MODELS),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option("--repetition-penalty", help="Above 1, tokens that occurred are less likely.", show_default=MODELS),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of sampling; the same seed gives the same text.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Stop string that ends the text; repeat the option for several.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a user's message and apply the chat template.")
    ] = False,
    echo: Annotated[
        bool, typer.Option("--echo/--no-echo", help="Print the prompt before the new text, except with --chat.")
    ] = True,
    ignore_end: Annotated[bool, typer.Option("--ignore-end", help="Continue after an end token.")] = False,
    device: DeviceName = "auto",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Dtype of weights and cache: bfloat16, float16 or float32.", show_default=MODELS),
    ] = None,
    variant: Annotated[str, typer.Option("--variant", help="Variant of decode_step; onelaunch explain lists them.")] = "auto",
) -> None:
    """Continue a text with a dense model, such as Qwen3 or Llama.

    The text is streamed to stdout, and times are printed to stderr.

    The default model is part of the package. It was trained on Python's standard library, and runs on any machine without a
    network.

    Example: onelaunch generate "def main(" --temperature 0.8 --seed 1
    """
    text = _stdin() if prompt == "-" else prompt
    choices = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    given: Any = {name: value for name, value in choices.items() if value is not None} | {"seed": seed}
    Sampling(**given)  # raises for wrong values before the weights are read
    _prepare_stdout()
    started = time.perf_counter()
    with output.busy(f"reading {model}"), warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always", FallbackNotice)
        loaded = Model.from_pretrained(model, device=device, dtype=dtype, variant=variant)
    for notice in notices or ():
        output.stderr().print(f"note: {notice.message}", soft_wrap=True)
    asked = loaded.chat([{"role": "user", "content": text}]) if chat else text
    stream = loaded.stream(asked, max_new_tokens=max_new_tokens, stop=tuple(stop or ()), ignore_end=ignore_end, **given)
    ready = time.perf_counter()
    first = None
    with stream:
        try:
            _write(text if echo and not chat else "")
            while (piece := stream.step()) is not None:
                first = first or time.perf_counter()
                _write(piece)
        finally:  # after Ctrl-C too, the shell's prompt starts on a new line
            _write("\n")
            _report(len(stream.tokens), str(stream.finish or "closed"), ready - started, ready, first)


def _stdin() -> str:
    """Return the prompt from stdin. Bytes that are not UTF-8 become surrogates, for which the tokenizer has an error message."""
    if sys.stdin is None:
        raise ArgumentError("prompt is -, for stdin, which is closed.")
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")


def _prepare_stdout() -> None:
    """Make stdout write a question mark for a character that its encoding lacks.

    ``cli.main`` has it write an escape, which would look like part of the text.
    """
    if sys.stdout is None:
        raise OneLaunchError("stdout is closed; the text is written there.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _write(text: str) -> None:
    """Write text to stdout and flush it, so that it appears at once."""
    stdout = output.Stdout()
    stdout.write(text)
    stdout.flush()


def _report(tokens: int, finish: str, loading: float, ready: float, first: float | None) -> None:
    """Print one line with the number of tokens and the times to stderr.

    Args:
        tokens: Number of new tokens.
        finish: Reason why the sequence ended.
        loading: Seconds to load the model and tokenize the prompt.
        ready: Host time, in seconds, when the model was loaded and the prompt tokenized.
        first: Host time, in seconds, of the first token; ``None`` if there was none, and then nothing is printed.
    """
    if first is None:
        return
    rest = time.perf_counter() - first
    rate = f"{(tokens - 1) / rest:,.1f} tokens/s after the first, " if tokens > 1 and rest > 0 else ""
    output.stderr().print(
        f"{tokens} tokens, {rate}the first after {1e3 * (first - ready):,.0f} ms; {loading:.1f} s to load; ended: {finish}",
        soft_wrap=True,
    )
