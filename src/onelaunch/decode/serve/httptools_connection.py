"""HTTP/1.1 connections whose requests are parsed by httptools, which takes a tenth of the time that h11 takes."""

from __future__ import annotations

from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from onelaunch.decode.serve.connection import Reading

_MOST_HEAD = 16_384
"""Bytes of a head, of trailers or between requests that may come without completing anything, the bound that h11 has too."""

_MOST_AHEAD = 64
"""Requests that may come in one go ahead of the one that is answered."""


class _Parser(HttpRequestParser):
    """Parser that stays with HTTP/1.1 where a client offers another protocol, as Java's client does.

    httptools parses no body behind such a head, and uvicorn would lose it. The head is therefore parsed again without the offer.
    """

    def __init__(self, connection: HttpToolsConnection) -> None:
        self._connection = connection
        self._begin()

    def _begin(self) -> None:
        """Expect the first request of a connection."""
        super().__init__(self._connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does; such requests are not answered

    def feed_data(self, data: bytes) -> None:  # pyrefly: ignore[bad-override] - event loops give bytes
        """Parse bytes."""
        while data:
            try:
                super().feed_data(data)
            except HttpParserUpgrade as offered:  # noqa: PERF203 - once per offer
                data = self._connection.head_without_offer() + data[offered.args[0] :]
                self._begin()  # behind a head of HTTP/1.0 or with Connection: close, the parser would pass over all bytes
            else:
                return


class HttpToolsConnection(Reading, HttpToolsProtocol):
    """Connection whose requests are parsed by httptools.

    Other than h11's, its parser takes whatever comes: it parses all requests that come in one go, and bounds nothing.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.parser = _Parser(self)
        self._ahead: list[Any] = []  # requests before the newest one that are not answered yet
        self._wrong: str | None = None  # what is wrong with the bytes behind the requests that are being answered
        self._idle_bytes = 0  # that completed nothing

    def answering(self) -> bool:
        """Return whether a complete request waits for its answer, or for the rest of it."""
        return bool(self._ahead) or self._wrong is not None or super().answering()

    def parse(self, data: bytes) -> None:
        """Give bytes to uvicorn. It stops reading when several requests came, so that it would notice no hang-up."""
        self._idle_bytes += len(data)
        super().parse(data)
        if self._idle_bytes > _MOST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        if self._ahead:
            self.flow.resume_reading()

    def on_headers_complete(self) -> None:
        """Note a request."""
        before, self._idle_bytes = self.cycle, 0
        if self.parser.should_upgrade():
            return  # the head is parsed again
        super().on_headers_complete()
        self.headers = []  # trailers, which are no part of the head
        if self.parser.get_http_version() in {"0.9", "1.0"}:
            _answer_without_chunks(self.cycle)
        if before is not None and not before.response_complete:
            self._ahead.append(before)
            if len(self._ahead) > _MOST_AHEAD:
                self.transport.abort()
                raise ValueError  # ends the parsing

    def on_body(self, body: bytes) -> None:
        """Note a piece of a body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        self._idle_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def head_without_offer(self) -> bytes:
        """Return the head of the request that was parsed last, without its offer of another protocol.

        Raises:
            HttpParserError: the method is CONNECT, behind which comes another protocol.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise HttpParserError("this is no proxy")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, after the requests before them are answered."""
        if self.answering():
            self._wrong = msg
        elif self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """Go on with the next request, or with the bytes that came early."""
        self._ahead = [cycle for cycle in self._ahead if not cycle.response_complete]
        wrong, self._wrong = self._wrong, None
        if wrong is not None:
            self._early = b""
        super().on_response_complete()
        if wrong is not None and not self.transport.is_closing():
            self.send_400_response(wrong)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all requests that the client hung up; uvicorn tells the newest one."""
        for cycle in self._ahead:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)


def _answer_without_chunks(cycle: Any) -> None:
    """Let the end of the connection end an answer without Content-Length, since a client of HTTP/1.0 knows no chunks.

    uvicorn closes the connection behind each answer to such a client, but sends chunks, and status 100, to it as to any other.
    """
    send, unframed = cycle.send, False
    cycle.waiting_for_100_continue = False

    async def send_without_chunks(message: Any) -> None:
        nonlocal unframed
        if message["type"] == "http.response.start":
            unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if unframed:
                cycle.chunked_encoding = False
        elif unframed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_without_chunks
