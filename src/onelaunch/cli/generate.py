"""``onelaunch generate``: text from a small language model, as it comes."""

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

OWN = "the model's"


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to continue; - reads it from stdin.", show_default=False)],
    model: Annotated[
        str, typer.Option("--model", help="A model folder, owner/name on the hub, or tiny, which is in the package.")
    ] = BUNDLED,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Largest number of new tokens.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", help="Divisor of the logits; 0 takes the likeliest token.", show_default=OWN),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Draw from this many of the likeliest tokens; 0 for all.", show_default=OWN)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Draw from the fewest likeliest tokens with this probability together.", show_default=OWN),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", help="Keep tokens whose probability is at least min_p times the largest.", show_default=OWN),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option("--repetition-penalty", help="Above 1 makes tokens that occurred less likely.", show_default=OWN),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed draws the same text.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="String that ends the text; repeat the option for several.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Take the prompt as a user's message: use the chat template.")] = False,
    echo: Annotated[bool, typer.Option("--echo/--no-echo", help="Print the prompt first, unless --chat.")] = True,
    ignore_end: Annotated[bool, typer.Option("--ignore-end", help="Go on after an end token.")] = False,
    device: DeviceName = "auto",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Dtype of weights and cache: bfloat16, float16 or float32.", show_default=OWN)
    ] = None,
    variant: Annotated[str, typer.Option("--variant", help="Variant of decode_step; onelaunch explain lists them.")] = "auto",
) -> None:
    """Continue a text with a model of the Qwen3 family. The text goes to stdout as it comes, times go to stderr.

    The default model is in the package: it was trained on Python's standard library, and runs on any machine without a network.

    Example: onelaunch generate "def main(" --temperature 0.8 --seed 1
    """
    text = _stdin() if prompt == "-" else prompt
    choices = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    given: Any = {name: value for name, value in choices.items() if value is not None} | {"seed": seed}
    Sampling(**given)  # what is wrong with these need not wait for the weights
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
        finally:  # Ctrl-C too leaves the terminal on a line of its own
            _write("\n")
            _report(len(stream.tokens), str(stream.finish or "closed"), ready - started, ready, first)


def _stdin() -> str:
    """Return the prompt from stdin; bytes that are no UTF-8 are refused later, with the prompt."""
    if sys.stdin is None:
        raise ArgumentError("prompt is -, for stdin, which is closed.")
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")


def _prepare_stdout() -> None:
    """Make stdout write a question mark for a character that its encoding lacks, so that the text goes on."""
    if sys.stdout is None:
        raise OneLaunchError("stdout is closed; the text is written there.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _write(text: str) -> None:
    stdout = output.Stdout()
    stdout.write(text)
    stdout.flush()


def _report(tokens: int, finish: str, loading: float, ready: float, first: float | None) -> None:
    """Print one line with the number of tokens and the times to stderr."""
    if first is None:
        return
    rest = time.perf_counter() - first
    rate = f"{(tokens - 1) / rest:,.1f} tokens/s after the first, " if tokens > 1 and rest > 0 else ""
    output.stderr().print(
        f"{tokens} tokens, {rate}the first after {1e3 * (first - ready):,.0f} ms; {loading:.1f} s to load; ended: {finish}",
        soft_wrap=True,
    )
