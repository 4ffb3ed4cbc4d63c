"""What a relay shows to Prometheus: base units, one prefix, no ids or keys as labels."""

from __future__ import annotations

import threading
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from outbox.errors import ConfigurationError
from relay.database import Connector
from relay.slot import Slot, SlotNames, find_problem

log = structlog.get_logger("relay")

_MEBI: Final = 1 << 20


class SlotWatch:
    """Looks at the replication slot from time to time, whoever reads it: a standby sees a disk fill up too.

    ``limit_bytes`` of WAL kept for the slot are worth waking somebody for.
    """

    def __init__(self, connect: Connector, names: SlotNames, limit_bytes: int, registry: CollectorRegistry) -> None:
        self._connect = connect
        self._names = names
        self._limit = limit_bytes
        self._over = False

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outbox_slot_{name}", text, registry=registry)

        self._retained = gauge("retained_wal_bytes", "WAL that the server keeps for the outbox's replication slot.")
        self._over_limit = gauge("retained_wal_over_limit", "1 when that is more than wal.retained_limit_bytes.")
        self._safe = gauge("safe_wal_bytes", "WAL that may be written before the slot is lost; -1 without a limit.")
        self._lag_bytes = gauge("lag_bytes", "WAL behind the position that the slot has confirmed.")
        self._lag_seconds = gauge("lag_seconds", "Age of the last thing that the slot has confirmed; 0 at rest.")
        self._healthy = gauge("healthy", "0 when events may have passed the slot by: see `outbox cdc status`.")

    def look(self) -> None:
        """Read slot and book once. Raises Unavailable or SchemaError."""
        connection = self._connect()
        try:
            state = Slot(connection, self._names).look()
        finally:
            connection.close()
        problem = find_problem(state, self._names)
        over = state.retained_bytes > self._limit
        self._retained.set(state.retained_bytes)
        self._over_limit.set(over)
        self._safe.set(-1 if state.safe_wal_bytes is None else state.safe_wal_bytes)
        self._lag_bytes.set(state.lag_bytes)
        self._lag_seconds.set(state.lag_seconds)
        self._healthy.set(problem is None)
        if over and not self._over:
            log.error(
                "the slot keeps more WAL than its limit: the server's disk fills up; see `outbox cdc status`",
                slot=self._names.slot,
                retained_mebibytes=state.retained_bytes // _MEBI,
                limit_mebibytes=self._limit // _MEBI,
            )
        elif self._over and not over:
            log.info("the slot keeps less WAL than its limit again", slot=self._names.slot)
        self._over = over


def serve(address: str, registry: CollectorRegistry, setting: str = "relay.metrics_address") -> threading.Thread:
    """Answer Prometheus at ``host:port``, from a thread of its own.

    Raises ConfigurationError when it can't, naming the setting.
    """
    host, _, port = address.rpartition(":")
    try:
        _, thread = start_http_server(int(port), addr=host.strip("[]"), registry=registry)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{setting}={address}: {error}") from error
    return thread
