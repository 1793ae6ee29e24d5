"""HTTP/1.1 connections: uvicorn's protocol by h11, read on while a request is answered, with bounds on what a client may send.

uvicorn's protocol by httptools, whose parser is in C, takes about 0.2 ms less of a request. It parses all requests that come in
one go, bounds no head, loses the body behind an offer of another protocol, takes trailers for headers and sends chunks to clients
of HTTP/1.0, so that this project would answer for a second HTTP/1.1 implementation.
"""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST_EARLY = 65_536
"""Bytes that a connection may send ahead of the answer to its request."""

_HEAD_SECONDS = 30.0
"""Longest time for the head of a request to arrive: connections without a request would otherwise take up those there are."""


class H11Connection(H11Protocol):
    """Connection whose requests are parsed by h11, one at a time. h11 bounds their heads itself.

    A connection is read even while it waits for an answer, so that a hang-up is noticed. uvicorn stops reading once a client has
    sent more than its request (pipelining), and would see its end only much later. Here such bytes wait apart; a client that
    sends too many is cut off.
    """

    transport: asyncio.Transport
    _early = b""
    _deadline: asyncio.TimerHandle | None = None  # for the head that is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Take a connection, and let it send each event at once."""
        super().connection_made(transport)
        # asyncio does this only for sockets that name their protocol, and those of the listener do not. By Nagle's algorithm an
        # event would wait until the client acknowledges the one before, which takes it 40 ms on a connection that is kept.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that the client hung up."""
        self._await_no_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the connection."""
        if not self.answering():
            self.parse(data)
            return
        self._early += data
        if len(self._early) > _MOST_EARLY:
            self.transport.abort()  # close would first wait until the client has read what is sent to it

    def answering(self) -> bool:
        """Return whether a complete request waits for its answer, or for the rest of it."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def parse(self, data: bytes) -> None:
        """Give bytes to uvicorn, which bounds the time between requests, but none from the first byte of a request on."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_no_head()
        elif self._deadline is None and not self.transport.is_closing():
            self._await_head()

    def on_response_complete(self) -> None:
        """Go on with the bytes that came early."""
        super().on_response_complete()
        data, self._early = self._early, b""
        if data and not self.transport.is_closing():
            self.data_received(data)

    def _await_head(self) -> None:
        """Cut the client off unless a request begins in time."""
        self._deadline = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)

    def _await_no_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
