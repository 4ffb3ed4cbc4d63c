"""The relay's Prometheus metrics: base units, one prefix, no ids or keys as labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import psycopg
import structlog
from prometheus_client import CollectorRegistry, Counter, Info
from prometheus_client.core import GaugeMetricFamily

from relay.core.health import Health, Reason
from relay.database import Connector, unavailable_on_error
from relay.metrics import gauge, gauges
from relay.settle.statements import STATEMENT_LIMIT
from relay.wal.slot import Slot, SlotNames, SlotState, find_problem, names_in_checkpoint

log = structlog.get_logger("relay")

_MEBI: Final = 1 << 20
# A slot's state that is older than this counts as unknown.
_STALE_SECONDS: Final = 60.0
_LIMIT: Final = "5s"


def slot_metrics(
    state: SlotState | None, limit_bytes: int, looked_at: float, *, healthy: bool
) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics of a slot; without a state, only whether it is healthy and when that was read."""
    yield gauge(
        "slot_healthy",
        "0 when the slot may have missed events, or its state is unknown: see `outbox cdc status`.",
        healthy,
    )
    yield gauge("slot_last_look_timestamp_seconds", "When the slot's state was last read.", looked_at)
    if state is None:
        return
    safe = -1 if state.safe_wal_bytes is None else state.safe_wal_bytes
    yield gauge("slot_retained_wal_bytes", "WAL that the server keeps for the slot.", state.retained_bytes)
    yield gauge(
        "slot_retained_wal_over_limit",
        "1 when the retained WAL exceeds wal.retained_limit_bytes.",
        state.retained_bytes > limit_bytes,
    )
    yield gauge("slot_safe_wal_bytes", "WAL that may be written before the slot is lost; -1 without a limit.", safe)
    yield gauge("slot_lag_bytes", "WAL behind the position that the slot has confirmed.", state.lag_bytes)
    yield gauge(
        "slot_lag_seconds", "Age of the last position that the slot has confirmed; 0 when idle.", state.lag_seconds
    )


def slot_repairs(registry: CollectorRegistry) -> Counter:
    return Counter("outbox_slot_repairs", "Repairs of a lost slot by this process.", registry=registry)


class SlotWatch:
    """Monitors the replication slot, also if another relay reads it: polling relays too notice a disk that fills up.

    Call ``look`` from time to time, from one thread. It blocks no other session, and writes nothing, so it does not
    wait for a standby. More than ``limit_bytes`` of retained WAL is an alert. With ``by_checkpoint`` the slot is the
    one in the outbox's checkpoint, and there are no metrics without a checkpoint.
    """

    def __init__(
        self,
        connect: Connector,
        names: SlotNames,
        limit_bytes: int,
        registry: CollectorRegistry,
        *,
        by_checkpoint: bool = False,
    ) -> None:
        self._connect = connect
        self._names = names
        self._limit = limit_bytes
        self._by_checkpoint = by_checkpoint
        self._over = False
        self._state: SlotState | None = None
        self._healthy = False
        self._looked_at = 0.0
        self._looked = -_STALE_SECONDS
        registry.register(self)

    def look(self) -> None:
        """Read the slot and the checkpoint. Raises Unavailable or SchemaError."""
        try:
            with self._connect() as connection:
                # READ COMMITTED: the second look at a slot must see what was written since the first.
                connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
                with unavailable_on_error("looking at the slot"), connection.transaction():
                    connection.execute(STATEMENT_LIMIT, (_LIMIT,))
                    names = names_in_checkpoint(connection, self._names) if self._by_checkpoint else self._names
                    state = None if names is None else Slot(connection, names).look()
        except BaseException:
            self._healthy = False
            raise
        self._state = state
        self._healthy = state is not None and names is not None and find_problem(state, names) is None
        self._looked_at, self._looked = time.time(), time.monotonic()
        self._log_limit(self._names.slot if names is None else names.slot)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if self._state is None and self._by_checkpoint:
            return iter(())
        healthy = self._healthy and time.monotonic() - self._looked < _STALE_SECONDS
        return slot_metrics(self._state, self._limit, self._looked_at, healthy=healthy)

    def _log_limit(self, slot: str) -> None:
        retained = 0 if self._state is None else self._state.retained_bytes
        over = retained > self._limit
        if over and not self._over:
            log.error(
                "the slot keeps more WAL than its limit: the server's disk fills up; see `outbox cdc status`",
                slot=slot,
                retained_mebibytes=retained // _MEBI,
                limit_mebibytes=self._limit // _MEBI,
            )
        elif self._over and not over:
            log.info("the slot keeps less WAL than its limit again", slot=slot)
        self._over = over


def build_info(registry: CollectorRegistry, version: str, delivery: str, source: str) -> None:
    """Expose what this process runs: versions that differ after a deployment, settings that should be equal."""
    Info(
        "outbox_relay_build", "Always 1: the version, OUTBOX_DELIVERY and OUTBOX_SOURCE are labels.", registry=registry
    ).info({"version": version, "delivery": delivery, "source": source})


@dataclass(frozen=True, slots=True)
class RelayMetrics:
    """The metrics of a worker's health, for a registry."""

    health: Callable[[], Health]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the worker's current health, with every reason, also those without a wait."""
        health = self.health()
        waits = {wait.reason: wait for wait in health.waits}
        yield gauge("relay_ready", "1 when /readyz answers 200.", health.ready)
        yield gauge("relay_lanes", "Lanes that this worker holds.", health.lanes)
        yield gauges(
            "relay_lanes_waiting",
            "Lanes whose last attempt failed, by reason.",
            ["reason"],
            (([reason], len(waits[reason].lanes) if reason in waits else 0) for reason in Reason),
        )
        yield gauges(
            "relay_lane_wait_seconds",
            "How long the first of these lanes, or the whole worker, has waited.",
            ["reason"],
            (([reason], waits[reason].seconds if reason in waits else 0.0) for reason in Reason),
        )
        yield gauges(
            "relay_upkeep_wait_seconds",
            "How long a task other than publishing has been failing.",
            ["task"],
            (([task], seconds) for task, seconds in health.upkeep.items()),
        )
        yield gauge("relay_lanes_paused", "Paused lanes of this worker.", len(health.paused_lanes))
        yield gauge(
            "relay_topics_paused", "Paused topics that this worker obeys; their events wait.", len(health.paused_topics)
        )
        yield gauge(
            "relay_topics_unusable",
            "Topics that are missing or accept no messages; their events wait.",
            len(health.unusable_topics),
        )
        yield gauge(
            "relay_partitions_hanging",
            "Partitions with a hanging transaction, behind which read_committed readers see nothing.",
            health.hanging_partitions,
        )
        yield gauge(
            "relay_topics_grown",
            "Exactly-once: topics that got more partitions in the last day, which moved keys.",
            len(health.grown_topics),
        )
