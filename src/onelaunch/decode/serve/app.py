"""HTTP application: routes, keys, sizes, and answers that end when the client hangs up or the time is over."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

from h11 import LocalProtocolError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onelaunch.decode.serve.api import Tokenize, parse
from onelaunch.decode.serve.endpoint import Endpoint, read_body
from onelaunch.decode.serve.metrics import CONTENT_TYPE
from onelaunch.decode.serve.problems import ClientGone, RequestError, to_json
from onelaunch.decode.serve.service import Service

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key."""


def make_app(service: Service, *, api_key: str | None = None, hosts: Collection[str] | None = None) -> Starlette:
    """Return the application. It begins to load the model when it starts.

    Args:
        service: Service that the application offers.
        api_key: Key that each request must show, except for ``/health``; ``None`` for none.
        hosts: Host names that the header ``Host`` may give; ``None`` for any. A page in a browser that reaches the server under a
            name of its own (DNS rebinding) is refused by it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(service.load())
        try:
            yield
        finally:
            service.close()
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading

    async def health(_: Request) -> Response:
        loading = RequestError(503, "The model is being loaded.", code="loading", retry_after=1)
        return _json({}) if service.loaded else _json(loading.content(), 503, loading.headers())

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [_model(service)]})

    async def one_model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return _json(_model(service))

    async def tokenize(request: Request) -> Response:
        body = await read_body(request.scope, request.receive, service.limits)
        asked = parse(body, Tokenize)
        if asked.model is not None:
            service.check_model(asked.model)
        return Response(await service.tokenized(asked), media_type="application/json")

    async def refused(_: Request, problem: Exception) -> Response:
        assert isinstance(problem, RequestError)  # noqa: S101 - registered for these only
        return _failed(service, problem)

    async def no_route(_: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)  # noqa: S101 - registered for these only
        said = {404: "There is no such path.", 405: "The path does not take this method."}
        answer = _failed(service, RequestError(problem.status_code, said.get(problem.status_code, problem.detail)))
        answer.headers.update(problem.headers or {})  # of a wrong method, the header Allow names those that there are
        return answer

    async def broken(_: Request, problem: Exception) -> Response:
        del problem  # Starlette raises it again, and uvicorn logs it
        return _failed(service, RequestError(500, "The server failed on this request; its log says why.", code="internal_error"))

    completions = {
        "/v1/chat/completions": Endpoint(service, "chat"),
        "/v1/completions": Endpoint(service, "completions"),
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in completions.items()),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/tokenize", tokenize, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Guard, service=service, api_key=api_key, hosts=hosts, direct=completions)],
        exception_handlers={RequestError: refused, HTTPException: no_route, Exception: broken},
    )


class Guard:
    """Middleware that refuses requests for other hosts, and requests without the key, and ends requests of broken connections.

    Args:
        app: Application behind it.
        service: Service whose metrics count refused requests.
        api_key: Key; ``None`` for none.
        hosts: Permitted names of the header ``Host``, without ports; ``None`` for any.
        direct: Application for each path whose POST requests need none of Starlette's routing.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        api_key: str | None,
        hosts: Collection[str] | None,
        direct: Mapping[str, ASGIApp],
    ) -> None:
        self._app, self._service, self._api_key, self._hosts, self._direct = app, service, api_key, hosts, direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded_send(message: Message) -> None:
            try:
                await send(message)
            except (LocalProtocolError, OSError) as problem:
                # uvicorn has closed the connection itself, since what came after the head is not HTTP.
                raise ClientGone from problem

        app = self._direct.get(scope["path"], self._app) if scope["method"] == "POST" else self._app
        problem = self._problem(scope)
        with contextlib.suppress(ClientGone):
            await (app if problem is None else _failed(self._service, problem))(scope, receive, guarded_send)

    def _problem(self, scope: Scope) -> RequestError | None:
        """Return why a request is refused, or ``None``."""
        headers = Headers(scope=scope)
        if self._hosts is not None:
            host = headers.get("host", "").rpartition("]")  # an IPv6 address is in brackets
            name = host[0] + host[1] if host[1] else host[2].partition(":")[0]
            if name not in self._hosts:
                return RequestError(421, "The header Host names another server.", code="wrong_host")
        if self._api_key is not None and scope["path"] not in OPEN_PATHS:
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not secrets.compare_digest(key.strip().encode(), self._api_key.encode()):
                return RequestError(401, "The key in the header Authorization is missing or wrong.", code="invalid_api_key")
        return None


def _model(service: Service) -> dict[str, Any]:
    """Return OpenAI's description of the model.

    Raises:
        RequestError: it is not loaded yet.
    """
    length = service.model.config.max_position_embeddings
    return {
        "id": service.name, "object": "model", "created": service.created, "owned_by": "onelaunch", "max_model_len": length,
    }  # fmt: skip


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


def _failed(service: Service, problem: RequestError) -> Response:
    """Return the answer to a request that is refused, and count it."""
    service.metrics.refused(problem.status)
    return _json(problem.content(), problem.status, problem.headers())
