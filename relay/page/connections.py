"""Limits to what clients may hold: uvicorn ends a connection that is idle, but waits for ever for half a request."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST_CONNECTIONS: Final = 64
"""At the same time. As on the metrics port a further one takes the place of the one that has waited longest with its
request; without such, it is closed. A browser holds one for the tab that is looked at, and some to load it."""
_PATIENCE: Final = 10.0
"""Seconds for a whole request to arrive."""


class LimitedProtocol(H11Protocol):
    """A connection that ends when a request does not arrive in time."""

    _deadline: asyncio.TimerHandle | None = None
    waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """Wait for the first request. Of too many connections one is closed."""
        super().connection_made(transport)
        connections = cast("set[LimitedProtocol]", self.connections)
        if len(connections) > _MOST_CONNECTIONS:
            silent = [one for one in connections if one is not self and one.waits and not one.transport.is_closing()]
            min(silent, key=lambda one: one.waits_since, default=self).transport.abort()
        if not transport.is_closing():
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()

    def _await_request(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.waits_since = self.loop.time()
        self._deadline = self.loop.call_later(_PATIENCE, self._end_unless_answering)

    @property
    def waits(self) -> bool:
        """Return whether no whole request has arrived that is not answered."""
        cycle: Any = self.cycle
        return cycle is None or cycle.more_body or cycle.response_complete

    def _end_unless_answering(self) -> None:
        if self.waits:
            self.transport.abort()
