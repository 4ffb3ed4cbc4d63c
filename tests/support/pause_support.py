"""What the tests of pauses share: a load of two topics, the ways to publish it, and what is published of a scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from typing import Any, Self

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka.cimpl import TopicPartition
from support import Load, wait_until

from outbox.sandbox._process import patience
from relay.core.pauses import ALL, Scope, ScopeKind, scopes_of
from relay.insights import read_pauses
from relay.kafka.routing import Router
from relay.operations import pauses
from relay.operations.drain import Drain, DrainProgress
from relay.wal.lane_hash import lane_of

WAYS = ("polling, at least once", "polling, exactly once", "WAL, exactly once")


class TwoKinds(Load):
    """A load whose keys belong to two aggregate types by turns."""

    def __init__(self, url: str, kinds: tuple[str, str], **options: Any) -> None:
        super().__init__(url, kinds[0], **options)
        self._kinds = kinds

    def kind(self, key: str) -> str:
        """Return the aggregate type of a key."""
        return self._kinds[int(key.rpartition("-")[2]) % 2]


class Published:
    """What readers see of a load's two topics. Tests ask again and again: each time it reads on from where it was."""

    def __init__(self, kafka: Any, load: TwoKinds, topics: Sequence[str], lanes: int = 4) -> None:
        self._kafka = kafka
        self._load = load
        self._lanes = lanes
        self.topics = topics
        self._found: list[Message] = []
        settings = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": kafka.name("published")}
        more = {"isolation.level": "read_committed", "enable.auto.commit": False, "enable.partition.eof": True}
        self._reader = Consumer({**settings, **more, "fetch.wait.max.ms": 20, "log_level": 0})
        known = [self._reader.list_topics(topic, 30).topics[topic] for topic in topics]
        self._at = {(topic.topic, number): 0 for topic in known for number in topic.partitions}
        self._reader.assign([TopicPartition(topic, number, 0) for topic, number in self._at])

    def messages(self) -> list[Message]:
        """Return all messages."""
        self._kafka.await_transactions(self.topics)
        for topic, number in self._at:
            _, end = self._reader.get_watermark_offsets(TopicPartition(topic, number), 30)
            wait_until(lambda at=(topic, number), end=end: self._read_to(at, end), what=f"{topic}-{number} to be read")
        return list(self._found)

    def _read_to(self, partition: tuple[str, int], end: int) -> bool:
        """Read what there is for a moment, of whichever partition. Return whether all up to ``end`` has been read."""
        while self._at[partition] < end and (message := self._reader.poll(0.1)) is not None:
            error = message.error()
            if error is None:
                self._found.append(message)
                self._at[message.topic(), message.partition()] = message.offset() + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                # Behind the markers of transactions.
                self._at[message.topic(), message.partition()] = message.offset()
            else:
                raise KafkaException(error)
        return self._at[partition] >= end

    def of(self, scope: Scope) -> int:
        """Return how many messages belong to a scope."""
        return sum(self._belongs(message, scope) for message in self.messages())

    def besides(self, scope: Scope) -> int:
        """Return how many do not."""
        return sum(not self._belongs(message, scope) for message in self.messages())

    def by_lane(self, lanes: Collection[int]) -> Counter[int]:
        """Return how many messages each of these lanes has."""
        return Counter(lane for message in self.messages() if (lane := self.lane(message.key().decode())) in lanes)

    def all_of(self, load: TwoKinds) -> list[Message]:
        """Wait until everything that was committed is published."""
        load.stop()
        count = load.committed()
        wait_until(lambda: len(self.messages()) >= count, 60, "everything to be published")
        return self.messages()

    def _belongs(self, message: Message, scope: Scope) -> bool:
        key = message.key().decode()
        match scope.kind:
            case ScopeKind.ALL:
                return True
            case ScopeKind.TOPIC:
                return message.topic() == scope.name
            case ScopeKind.LANE:
                return self.lane(key) == int(scope.name)

    def lane(self, key: str) -> int:
        """Return the lane of a key."""
        return lane_of(self._load.kind(key), key, self._lanes)


def scope_named(which: str, topics: Sequence[str]) -> Scope:
    """Return the scope that a test calls all, lane or topic."""
    return {"all": ALL, "lane": scopes_of([1], [])[0], "topic": scopes_of([], [topics[0]])[0]}[which]


def pause(url: str, *scopes: Scope, reason: str | None = "a test", wait: bool = True) -> list[pauses.PauseChange]:
    """Pause, and wait until every relay has confirmed."""
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        changes = pauses.pause(connection, "outbox", scopes, reason, may_write=Router().may_write)
        if wait:
            assert pauses.unconfirmed(connection, "outbox", changes, 30 * patience()) == []
    return changes


def resume(url: str, *scopes: Scope) -> list[pauses.PauseChange]:
    """End pauses."""
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        return pauses.resume(connection, "outbox", scopes, None)


class Draining:
    """A drain that has begun: what `outbox relay drain` does, a step at a time."""

    def __init__(self, url: str, *scopes: Scope, router: Router | None = None) -> None:
        self._scopes = scopes
        self._router = router or Router()
        self._connection = psycopg.connect(url, autocommit=True)
        self._drain = Drain(self._connection, "outbox", self._router)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def look(self) -> dict[Scope, DrainProgress]:
        """Return what is left of each scope."""
        return self._drain.look(self._scopes)

    def drained(self) -> bool:
        """Return whether nothing is left of any."""
        return all(one.drained for one in self.look().values())

    def pause(self) -> None:
        """Pause the scopes, as the command does in the end."""
        pauses.pause(self._connection, "outbox", self._scopes, "a test", may_write=self._router.may_write, what="drain")


def read(url: str) -> dict[Scope, pauses.Paused]:
    """Return the pauses."""
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        return {one.scope: one for one in read_pauses(connection, "outbox")}


def obeyed(url: str, scopes: Collection[Scope]) -> None:
    """Wait until every running relay obeys these."""
    wait_until(
        lambda: (found := read(url)) and all(not found[scope].unconfirmed for scope in scopes), what="relays to obey"
    )
