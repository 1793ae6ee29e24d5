"""Command ``onelaunch serve``: an OpenAI-compatible server of one model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from onelaunch.cli import output
from onelaunch.cli.arguments import DeviceName
from onelaunch.decode.generate import Model
from onelaunch.decode.model.hub import BUNDLED
from onelaunch.errors import ArgumentError, ExtraMissing

_PACKAGES = frozenset({"h11", "prometheus_client", "pydantic", "starlette", "uvicorn"})
"""Modules of the extra ``serve``."""


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, owner/name on the hub, or tiny, the bundled model.")
    ] = BUNDLED,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; only this machine reaches the default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen at; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", help="Key that requests must show as a bearer token.", envvar="ONELAUNCH_API_KEY", show_envvar=True
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name by which requests ask for the model.", show_default="MODEL")
    ] = None,
    waiting: Annotated[int, typer.Option("--max-waiting", help="Requests that may wait; further ones get 429.", min=0)] = 16,
    timeout: Annotated[float, typer.Option("--timeout", help="Longest time of a request, in seconds.", min=0.001)] = 600.0,
    body: Annotated[float, typer.Option("--max-body", help="Largest body of a request, in MiB.", min=0.001)] = 4.0,
    grace: Annotated[
        int, typer.Option("--grace", help="Seconds in which the running request may end after Ctrl-C or SIGTERM.", min=0)
    ] = 30,
    event_per_token: Annotated[
        bool, typer.Option("--event-per-token", help="Stream each token by itself, not the tokens of a launch together.")
    ] = False,
    device: DeviceName = "auto",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Dtype of weights and cache: bfloat16, float16 or float32.", show_default="the model's"),
    ] = None,
    variant: Annotated[str, typer.Option("--variant", help="Variant of decode_step; onelaunch explain lists them.")] = "auto",
) -> None:
    """Serve a model by OpenAI's HTTP API, one request at a time.

    The paths are /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /health and /metrics. Fields of requests that are
    not supported are refused, never ignored.

    Example: onelaunch serve Qwen/Qwen3-0.6B --port 8000
    """
    try:
        from onelaunch.decode.serve.server import LOOPBACK, event_loop, serve
        from onelaunch.decode.serve.service import Limits, Service
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise ExtraMissing("onelaunch serve", package=package, extra="serve") from None
    if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ArgumentError("--api-key must have at least one character, and only visible ones of ASCII.")
    console = output.stderr()
    if host not in LOOPBACK and api_key is None:
        console.print(f"note: whoever reaches {host} may use the model; --api-key restricts that", soft_wrap=True)
    name = name or (Path(model).resolve().name if Path(model).is_dir() else model)
    limits = Limits(waiting=waiting, seconds=timeout, body_bytes=round(body * 2**20))
    loader = functools.partial(Model.from_pretrained, model, device=device, dtype=dtype, variant=variant)
    service = Service(name, loader, limits, event_per_token=event_per_token)

    def started(url: str) -> None:
        said = f"serving at {url}/v1 by {event_loop()}; {name} is being loaded; {url}/health has status 503 until then"
        console.print(said, soft_wrap=True)

    def ready() -> None:
        console.print(f"{name} is loaded", soft_wrap=True)

    serve(service, host=host, port=port, api_key=api_key, grace_seconds=grace, started=started, ready=ready)
