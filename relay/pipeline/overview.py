"""Read both sides of the pipeline at once: the outbox with its relays, and the consumers' groups in the sink.

`outbox status` and the operations page show the same overview.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final, TypedDict

from outbox._app.settings import client_options
from outbox.consumer.admin import status as consumers
from outbox.consumer.admin.status import GroupState
from outbox.consumer.connections import OwnSession
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.postgres_errors import connect
from outbox.errors import ConfigurationError, OutboxError
from relay.config import Settings
from relay.core.ports import BrokerUnavailable
from relay.database import Connector
from relay.insights import OutboxState, look
from relay.pipeline.topics import MissingTopics
from relay.wal.slot import slot_names

_KAFKA_SECONDS: Final = 5.0
_WAITING_SECONDS: Final = 2.0


class OverviewFigures(TypedDict):
    """An overview as JSON. ``outbox`` also has ``written_per_second`` and ``gone_per_second``."""

    outbox: Annotated[dict[str, Any], OutboxState] | None
    groups: Sequence[Annotated[dict[str, Any], GroupState]]
    unseen: Mapping[str, str]
    problems: Sequence[str]


class Overview:
    """One reading of the outbox and the groups.

    unseen      what could not be read, and why.
    missing_topics   topics that do not exist, and for which events wait.
    written, published, applied   rows inserted and deleted, and messages applied by all groups, each per second since
                                  the reading before; None without one.
    """

    def __init__(
        self,
        outbox: OutboxState | None,
        groups: Sequence[GroupState],
        unseen: Mapping[str, str],
        before: Overview | None,
        missing_topics: Sequence[str] = (),
    ) -> None:
        self.outbox = outbox
        self.missing_topics = missing_topics
        self.groups = groups
        self.unseen = unseen
        self.at = time.monotonic()
        self.written, self.published = _rates(outbox, before.outbox if before else None)
        self.applied = _applied(self, before)

    @property
    def dead_letters(self) -> int | None:
        counts = [group.dead_letters for group in self.groups]
        counts.append(None if self.outbox is None else self.outbox.dead_letters)
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def problems(self) -> list[str]:
        found = [f"{what} can't be seen: {why}" for what, why in self.unseen.items()]
        found += [
            f"topic {topic!r} does not exist, or these credentials may not DESCRIBE it, and its events wait: create "
            "it, or run relays with --create-topics"
            for topic in self.missing_topics
        ]
        found += self.outbox.problems() if self.outbox else []
        return [*found, *(problem for group in self.groups for problem in group.problems())]

    def as_dict(self) -> OverviewFigures:
        outbox = asdict(self.outbox) if self.outbox else None
        if outbox is not None:
            outbox |= {"written_per_second": self.written, "gone_per_second": self.published}
        return {
            "outbox": outbox,
            "groups": [asdict(group) for group in self.groups],
            "unseen": dict(self.unseen),
            "problems": self.problems,
        }


def _rates(now: OutboxState | None, before: OutboxState | None) -> tuple[float | None, float | None]:
    """Return the rows inserted and deleted per second; None without an earlier reading to compare with."""
    if now is None or before is None or now.written is None or before.written is None:
        return None, None
    seconds = (now.at - before.at).total_seconds()
    assert now.gone is not None
    assert before.gone is not None
    # After a crash the server's statistics start again from zero.
    if seconds <= 0 or now.written < before.written or now.gone < before.gone:
        return None, None
    return (now.written - before.written) / seconds, (now.gone - before.gone) / seconds


def _applied(now: Overview, before: Overview | None) -> float | None:
    """Return the messages that all groups have applied per second; None without an earlier reading."""
    if before is None or not before.groups or not now.groups or now.at <= before.at:
        return None
    counts = {group.group: group.applied for group in before.groups}
    # A group that is new since then has no earlier count.
    moved = sum(group.applied - counts[group.group] for group in now.groups if group.group in counts)
    return max(moved, 0) / (now.at - before.at)


class Reader:
    """Reads everything. Sessions stay open between readings, and are opened again after an error or ``close``.

    And when they are some minutes old: a former primary may go on after a failover.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sink_url = settings.relay.sink_url
        self._url = settings.require_database()
        self._of_outbox = OwnSession(Connector(self._url, "outbox status"))
        self._of_sink = OwnSession(lambda: connect(self._sink_url or self._url, "outbox status"))
        self._kafka: KafkaAdmin | None = None
        self._topics: MissingTopics | None = None

    def read(self, before: Overview | None) -> Overview:
        """Read everything, given the reading before, if there is one. Raises ConfigurationError."""
        unseen: dict[str, str] = {}
        outbox = self._outbox(unseen)
        groups: Sequence[GroupState] = ()
        # The error would be the same again where the consumers' tables are in the same database.
        if self._sink_url is not None or not self._of_outbox.ended:
            groups = self._groups(unseen)
        missing = [] if outbox is None or "Kafka" in unseen else self._missing_topics(outbox, unseen)
        return Overview(outbox, groups, unseen, before, missing)

    def close(self) -> None:
        self._of_outbox.close()
        self._of_sink.close()

    # Each part adds to ``unseen`` what it can't read.

    def _outbox(self, unseen: dict[str, str]) -> OutboxState | None:
        try:
            return look(self._of_outbox.connected(), slot_names(self._settings))
        except OutboxError as error:
            unseen["the outbox"] = str(error)
            return None

    def _groups(self, unseen: dict[str, str]) -> Sequence[GroupState]:
        settings = self._settings
        try:
            opened = self._of_sink.connected()
            # Somebody who names a sink expects consumers there.
            if self._sink_url is None and not consumers.has_tables(opened, settings.consumer_schema):
                return ()
            self._kafka = self._kafka or KafkaAdmin(client_options(settings), seconds=_KAFKA_SECONDS)
            groups, away, hidden = consumers.look(opened, settings.consumer_schema, self._kafka)
        except ConfigurationError:
            raise
        except OutboxError as error:
            unseen["the consumers"] = str(error)
            return ()
        if away is not None:
            unseen["Kafka"] = away
        unseen |= {f"{settings.consumer_schema}.{table}": why for table, why in hidden.items()}
        return groups

    def _missing_topics(self, outbox: OutboxState, unseen: dict[str, str]) -> Sequence[str]:
        """Return the missing topics, if a relay runs that should have published the oldest event by now."""
        waits = any(relay.alive for relay in outbox.relays) and (outbox.oldest_seconds or 0.0) >= _WAITING_SECONDS
        if not waits or not self._settings.kafka.get("bootstrap.servers"):
            return ()
        try:
            self._topics = self._topics or MissingTopics(self._settings)
            return self._topics.look(self._of_outbox.connected())
        except BrokerUnavailable as error:
            unseen["Kafka"] = str(error)
        except OutboxError as error:
            unseen["the topics of waiting events"] = str(error)
        return ()
