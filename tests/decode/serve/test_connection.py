"""Tests of connections in each event loop: bytes ahead of an answer, bytes that are not HTTP, and bounds.

A server in this process answers by a small ASGI application: the body of a request, as soon as the test allows it.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
import uvicorn

from onelaunch.decode.serve import connection
from onelaunch.decode.serve.connection import H11Connection
from onelaunch.device.tools import package_installed

SECONDS = 20
"""Longest wait, after which a test fails."""

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n%b"
OFFER = (
    b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    b"Content-Length: 3\r\n\r\n%b"
)
"""Request whose client offers HTTP/2, as Java's does."""


class Application:
    """ASGI application that answers with the body of a request once ``gate`` is set.

    Attributes:
        bodies: Bodies so far.
        gone: Bodies of requests whose clients hung up before.
    """

    def __init__(self) -> None:
        self.gate, self.came, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.bodies: list[bytes] = []
        self.gone: list[bytes] = []

    async def __call__(self, scope, receive, send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        self.came.set()
        gate, gone = asyncio.create_task(self.gate.wait()), asyncio.create_task(receive())
        await asyncio.wait({gate, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not gate.done():
            gate.cancel()
            self.gone.append(body)
            self.left.set()
            return
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})


class Peer:
    """Client of the application.

    Attributes:
        app: The application.
        config: Configuration of the server.
        made: Connections that the server has taken.
    """

    def __init__(self) -> None:
        self.app, self.made = Application(), []
        self.config = uvicorn.Config(
            self.app, http=H11Connection, ws="none", log_level="critical", access_log=False, lifespan="off"
        )
        self.config.load()
        self._state = uvicorn.server.ServerState()

    def make(self):
        self.made.append(H11Connection(self.config, self._state, {}))
        return self.made[-1]

    @asynccontextmanager
    async def connected(self):
        """Yield the reader and the writer of a connection."""
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(self.make, sock=socket.create_server(("127.0.0.1", 0)))
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname()[:2])
        try:
            yield reader, writer
        finally:
            self.app.gate.set()
            writer.close()
            listening.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Return a function that runs a test with a :class:`Peer` in each event loop."""
    if not package_installed(request.param):
        pytest.skip(f"needs {request.param}")

    def run(test):
        async def timed():
            return await asyncio.wait_for(test(Peer()), SECONDS)

        if request.param == "asyncio":
            return asyncio.run(timed())
        import uvloop

        own = uvloop.new_event_loop()
        try:
            return own.run_until_complete(timed())
        finally:
            own.close()

    return run


async def rest_of(reader) -> bytes:
    """Return the bytes up to the end of a connection, which the server may reset."""
    received = b""
    try:
        while piece := await reader.read(65_536):
            received += piece
    except ConnectionError:
        pass
    return received


def test_each_event_is_sent_at_once(run):
    """Nagle's algorithm would hold an event back until the client acknowledges the one before, after up to 40 ms."""

    async def test(peer):
        async with peer.connected() as (_, writer):
            writer.write(REQUEST % b"one")
            await peer.app.came.wait()
            transport = peer.made[0].transport
            return transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    assert run(test)


@pytest.mark.parametrize("request_bytes", [REQUEST, OFFER], ids=["plain", "offers HTTP/2"])
def test_requests_in_one_go_are_answered_in_turn(run, request_bytes):
    async def test(peer):
        async with peer.connected() as (reader, writer):
            writer.write(b"".join(request_bytes % body for body in (b"one", b"two")))
            await peer.app.came.wait()
            writer.write(request_bytes % b"six")
            await asyncio.sleep(0.01)
            assert peer.app.bodies == [b"one"]
            peer.app.gate.set()
            received = b""
            while received.count(b"HTTP/1.1 200") < 3 or not received.endswith(b"six"):
                received += await reader.read(65_536)
            return peer.app.bodies

    assert run(test) == [b"one", b"two", b"six"]


@pytest.mark.parametrize("behind", [b"", REQUEST % b"two", (REQUEST % b"two")[:-1], b"\x16\x03\x01 no HTTP\r\n\r\n"])
def test_a_hang_up_is_noticed_whatever_came_ahead(run, behind):
    async def test(peer):
        async with peer.connected() as (_, writer):
            writer.write(REQUEST % b"one" + behind)
            await peer.app.came.wait()
            writer.write(b"POST")
            await asyncio.sleep(0.01)
            writer.close()
            await peer.app.left.wait()
            return peer.app.bodies, peer.app.gone

    assert run(test) == ([b"one"], [b"one"])


def test_bytes_that_are_not_http_are_refused_behind_the_answer_to_the_request_before(run):
    async def test(peer):
        async with peer.connected() as (reader, writer):
            writer.write(REQUEST % b"one" + b"\x16\x03\x01 no HTTP\r\n\r\n")
            await peer.app.came.wait()
            await asyncio.sleep(0.01)
            peer.app.gate.set()
            return await rest_of(reader)

    received = run(test)
    assert received.index(b"HTTP/1.1 200") < received.index(b"one") < received.index(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"], ids=["head", "trailers"]
)
def test_heads_and_trailers_without_end_are_refused(run, start):
    async def test(peer):
        async with peer.connected() as (reader, writer):
            writer.write(start)
            ended = asyncio.create_task(rest_of(reader))
            for _ in range(100):
                if ended.done():
                    break
                writer.write(b"X: y\r\n" * 200)
                await asyncio.sleep(0.001)
            return await ended, peer.app.bodies

    received, bodies = run(test)
    assert (received[:12] in (b"HTTP/1.1 400", b""), bodies) == (True, [])  # the rest that was sent may reset the connection


@pytest.mark.parametrize("flood", [b"x" * 200_000, REQUEST % b"two" * 3000], ids=["bytes", "requests"])
def test_a_client_that_sends_too_much_ahead_is_cut_off(run, flood):
    async def test(peer):
        async with peer.connected() as (reader, writer):
            writer.write(REQUEST % b"one")
            await peer.app.came.wait()
            writer.write(flood)
            await peer.app.left.wait()
            return await rest_of(reader), peer.app.bodies

    assert run(test) == (b"", [b"one"])


def test_a_client_that_does_not_read_is_cut_off_all_the_same(run):
    """A connection that waited until its client has read the answer would be kept, and the request not told."""

    async def test(peer):
        async with peer.connected() as (reader, writer):
            reader._transport.pause_reading()
            writer.write(REQUEST % b"one")
            await peer.app.came.wait()
            peer.made[0].transport.write(bytes(2**24))  # more than the sockets hold
            writer.write(b"x" * 200_000)
            await peer.app.left.wait()
            return peer.app.gone

    assert run(test) == [b"one"]


@pytest.mark.parametrize(
    "wrong",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"BREW\x00 / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(run, wrong):
    async def test(peer):
        async with peer.connected() as (reader, writer):
            writer.write(wrong)
            return await rest_of(reader), peer.app.bodies

    received, bodies = run(test)
    assert received.startswith(b"HTTP/1.1 400")
    assert bodies == []


LAST_OFFERS = [OFFER.replace(b"Upgrade, ", b"close, Upgrade, "), OFFER.replace(b"HTTP/1.1", b"HTTP/1.0")]
"""Offers of another protocol with the last request of a connection."""


@pytest.mark.parametrize("offer", LAST_OFFERS, ids=["Connection: close", "HTTP/1.0"])
def test_an_offer_with_the_last_request_is_answered(run, offer):
    async def test(peer):
        peer.app.gate.set()
        async with peer.connected() as (reader, writer):
            writer.write(offer % b"one" + REQUEST % b"two")
            return await rest_of(reader), peer.app.bodies

    received, bodies = run(test)
    assert (received.count(b"HTTP/1.1 200"), bodies) == (1, [b"one"])


def test_a_client_of_http_1_0_gets_no_chunks_and_no_status_100(run):
    async def test(peer):
        async def events(scope, receive, send):
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"data: 2\n\n"})

        peer.config.loaded_app = events
        async with peer.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\none")
            return await rest_of(reader)

    head, _, body = run(test).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert body == b"data: 1\n\ndata: 2\n\n"


def test_trailers_are_no_headers(run):
    """An application that saw them would take a key, or a media type, that nothing before it has seen."""

    async def test(peer):
        seen = []

        async def headers(scope, receive, send):
            while (await receive()).get("more_body"):
                pass
            seen.append([name for name, _ in scope["headers"]])
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        peer.config.loaded_app = headers
        async with peer.connected() as (reader, writer):
            head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head + b"3\r\none\r\n0\r\nAuthorization: Bearer key\r\n\r\n")
            await rest_of(reader)
        return seen

    assert run(test) == [[b"host", b"connection", b"transfer-encoding"]]


@pytest.mark.parametrize("before", [b"", REQUEST % b"one"], ids=["first", "second"])
@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_a_client_that_sends_no_head_is_cut_off(run, monkeypatch, before, start):
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.05)

    async def test(peer):
        peer.config.timeout_keep_alive = 0.05
        peer.app.gate.set()
        async with peer.connected() as (reader, writer):
            writer.write(before + start)
            ended = asyncio.create_task(rest_of(reader))
            while not ended.done():
                if start:
                    writer.write(b"y")
                await asyncio.wait([ended], timeout=0.005)
            return (await ended).count(b"HTTP/1.1")

    assert run(test) == bool(before)


def test_the_time_for_a_head_is_no_time_for_its_answer(run, monkeypatch):
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.02)

    async def test(peer):
        async with peer.connected() as (reader, writer):
            writer.write((REQUEST % b"one")[:-1])
            await asyncio.sleep(0.04)
            writer.write(b"e")
            await peer.app.came.wait()
            await asyncio.sleep(0.04)
            peer.app.gate.set()
            return await reader.readuntil(b"one")

    assert run(test).startswith(b"HTTP/1.1 200")
