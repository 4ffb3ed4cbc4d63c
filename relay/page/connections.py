"""Limits to what clients may hold: uvicorn ends a connection that is idle, but waits for ever for half a request."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST_CONNECTIONS: Final = 64
"""At the same time; further ones are closed. A browser holds one for the tab that is looked at, and some to load it."""
_PATIENCE: Final = 10.0
"""Seconds for a whole request to arrive."""


class LimitedProtocol(H11Protocol):
    """A connection that ends when a request does not arrive in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """Wait for the first request, or close the connection when there are too many."""
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._await_request()
        super().on_response_complete()

    def _await_request(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(_PATIENCE, self._end_unless_answering)

    def _end_unless_answering(self) -> None:
        cycle: Any = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            self.transport.abort()
