"""The connections of an audit: one, unless the consumers' database is another one than the outbox's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final, NamedTuple

import psycopg

from outbox.consumer.postgres_errors import clear_errors, connect
from outbox.urls import libpq_url
from relay.config import Settings
from relay.database import Connector, begin_session, unavailable_on_error

_NAME: Final = "outbox audit"


class Sessions(NamedTuple):
    outbox: psycopg.Connection[Any]
    sink: psycopg.Connection[Any]


@contextmanager
def sessions(settings: Settings) -> Iterator[Sessions]:
    """Open them, with limits for their statements. Raises Unavailable and ConsumerUnavailable."""
    url, sink_url = settings.require_database(), settings.relay.sink_url
    with ExitStack() as opened:
        sink: psycopg.Connection[Any]
        outbox = sink = opened.enter_context(closing(Connector(url, _NAME)()))
        with unavailable_on_error("beginning the audit"):
            _limit(outbox)
        if sink_url is not None and libpq_url(sink_url) != libpq_url(url):
            sink = opened.enter_context(closing(connect(sink_url, _NAME)))
            with clear_errors("beginning the audit"):
                _limit(sink)
        yield Sessions(outbox, sink)


def _limit(connection: psycopg.Connection[Any]) -> None:
    begin_session(connection)
    # A plan that fits any range fits none.
    connection.prepare_threshold = None
