"""Postgres as a sink: see ``sink`` for the protocol, and ``task.partition`` for its use."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import psycopg

from outbox._clients.postgres import pipeline
from outbox.consumer import connections
from outbox.consumer.errors import OffsetMoved
from outbox.consumer.groups import GroupRows
from outbox.consumer.letters import DeadLetterStore
from outbox.consumer.model import ClaimedOffset, MessageRef, Partition, Range, RetryRequest
from outbox.consumer.postgres_errors import of_postgres
from outbox.consumer.statements import statement
from spark_jobs.dedup.strategies import DedupStore, Strategy
from spark_jobs.effects.mapped import PLACED, Insert, Upsert
from spark_jobs.job import META
from spark_jobs.postgres import lock_monitor
from spark_jobs.postgres.batch_table import BatchTable
from spark_jobs.postgres.direct_copy import DirectCopy
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.sink import Move, Way, Whole

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.job import ConsumerJob, PythonEffect

_KEEPALIVES: Final = {"tcp_keepalives_idle": 30, "tcp_keepalives_interval": 10, "tcp_keepalives_count": 3}
_HOLD: Final = """
SELECT id FROM {dead_letters} WHERE grp = %(grp)s AND id = ANY(%(ids)s) AND state = 'retry' ORDER BY id FOR UPDATE"""


@contextmanager
def transaction(url: str, name: str, rows: Whole) -> Iterator[psycopg.Cursor[Any]]:
    """Begin a transaction and yield a cursor; COMMIT at the end, ROLLBACK on an error.

    The session stays open for this process's next transaction, cleared of anything that an effect may have left.

    rows  the rows that the transaction applies. Raises InputCut instead of COMMIT if it is not proved that all of the
          task's rows were read. A transaction that the caller has rolled back needs no proof.

    If this machine vanishes, the server ends the transaction within a minute instead of two hours, its default: until
    then the rows of the offsets stay locked, and a take-over has to wait.
    """
    with connections.transaction(url, name, reset=True, settings=_KEEPALIVES) as connection:
        yield connection.cursor()
        if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            rows.require_whole()


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn Postgres errors into ConsumerErrors whose text begins with ``where``."""
    try:
        yield
    except psycopg.Error as error:
        raise of_postgres(error, where) from error


@dataclass(frozen=True, slots=True)
class PostgresSink:
    """The arguments that tasks need to apply rows: see sink.Sink.

    columns  of ``batch``, with their Postgres types.
    bisect   find the messages that make an effect fail; otherwise its error is an EffectError.
    direct   the target of a direct copy, if there is one.
    """

    url: str = field(repr=False)
    schema: str
    group: str
    generation: int
    columns: Mapping[str, str]
    effect: str | PythonEffect
    strategy: Strategy
    bisect: bool
    direct: DirectCopy | None = None
    at_most_once: bool = False

    @property
    def dedup(self) -> DedupStore:
        return DedupStore(self.schema, self.group)

    @contextmanager
    def transaction(self, where: str, rows: Whole, *, most: int, here: bool = False) -> Iterator[PostgresTransaction]:
        name = lock_monitor.names(self.group)[0 if here else 1]
        if self.at_most_once:
            from spark_jobs.postgres.at_most_once import AtMostOnceTransaction

            into: AtMostOnceTransaction | None = None
            try:
                with translated(where), transaction(self.url, name, rows) as cursor:
                    into = AtMostOnceTransaction(self, cursor, most, name=name, rows=rows)
                    yield into
            except BaseException:
                if into is not None:
                    into.ended()
                raise
            return
        with translated(where), transaction(self.url, name, rows) as cursor:
            yield PostgresTransaction(self, cursor, most)

    def applying(self, cursor: psycopg.Cursor[Any], most: int) -> BatchTable:
        """Begin with an empty ``batch``."""
        return BatchTable(
            cursor, self.dedup, self.columns, self.strategy, self.effect, bisect=self.bisect, max_dead=most
        )


class PostgresTransaction:
    """One transaction: see sink.Transaction. ``cursor`` is for callers that load rows in another way."""

    def __init__(self, sink: PostgresSink, cursor: psycopg.Cursor[Any], most: int) -> None:
        self._sink = sink
        self._group = GroupRows(sink.schema, sink.group)
        self._letters = DeadLetterStore(sink.schema, sink.group)
        self.cursor = cursor
        self._most = most
        self._requests: Mapping[MessageRef, RetryRequest] = {}
        self._applying: BatchTable | None = None
        self._matched: AbstractSet[MessageRef] = frozenset()

    def fence(self, partition: Partition, span: Range) -> bool:
        return found_at(self._group, self.cursor.connection, partition, span, self._sink.generation)

    def fence_all(self, spans: Mapping[Partition, Range]) -> bool:
        generation = self._sink.generation
        here = {
            partition: ClaimedOffset(span.topic_id, span.start, generation=generation)
            for partition, span in spans.items()
        }
        return self._group.fence_all(self.cursor.connection, here)

    def at_once(self) -> AbstractContextManager[object]:
        return pipeline(self.cursor.connection)

    def remember(self, rows: Iterable[pa.RecordBatch], way: Way) -> int:
        if self._sink.direct is not None and way == Way():
            return self._sink.direct.apply(self.cursor, self._sink.dedup, self._sink.strategy, rows)
        self._applying = applying = self._sink.applying(self.cursor, self._most)
        if way.lenient:
            applying.copy_leniently(rows)
        else:
            applying.copy(rows)
        if self._requests:
            self._matched = applying.places()
        applying.reduce(suspect=way.repeats, forgiven=forgiven(self._requests))
        return applying.count()

    def move(self, moved: Move) -> None:
        put = self._letters.write(self.cursor.connection, moved.span.topic_id, moved.dead)
        move(self._group, self.cursor.connection, moved, applied=moved.fresh, dead=put)

    def apply(self) -> None:
        """Run the effect. After a direct copy there is nothing left to do."""
        if self._applying is not None:
            self._applying.apply()

    def run(self, applying: BatchTable) -> None:
        """Run the effect over rows that the caller has loaded and reduced."""
        self._applying = applying
        self.apply()

    def now(self) -> float | None:
        """Return what the database's clock shows, as ``fence`` has read it."""
        return self._group.clock.at(time.monotonic())

    def rollback(self) -> None:
        self.cursor.connection.rollback()

    def hold(self, requests: Mapping[MessageRef, RetryRequest]) -> bool:
        self._requests = requests
        self._group.require(self.cursor.connection, self._sink.generation)
        values = {"grp": self._sink.group, "ids": self._ids()}
        return self.cursor.execute(statement(self._sink.schema, _HOLD), values).rowcount == len(requests)

    def resolve(self) -> None:
        assert self._applying is not None
        self.resolve_as(self._applying.per_partition(), self._matched)

    def resolve_as(self, fresh: Mapping[Partition, int], matched: AbstractSet[MessageRef]) -> None:
        """Delete the dead letters that were held, and count those whose effect this transaction has.

        matched  those that the job has not filtered out. The others have no effect, and are recorded in ``audit``.
        """
        connection = self.cursor.connection
        if left_out := [number for place, (number, _) in self._requests.items() if place not in matched]:
            self._letters.leave_out(connection, left_out)
        self._letters.delete(connection, self._ids())
        for partition, applied in sorted(fresh.items()):
            self._group.move(connection, partition, None, applied=applied)

    def _ids(self) -> list[int]:
        return sorted(number for number, _ in self._requests.values())


def found_at(
    group: GroupRows,
    connection: psycopg.Connection[Any],
    partition: Partition,
    span: Range,
    generation: int,
    *,
    lock: bool = True,
) -> bool:
    """Return whether the group's offset is at a range's start, not behind it; see Transaction.fence."""
    try:
        group.fence(connection, partition, ClaimedOffset(span.topic_id, span.start, generation=generation), lock=lock)
    except OffsetMoved as moved:
        # A task that the driver had given up, because another one failed, may have committed a shorter range.
        if moved.next_offset < span.end:
            raise
        # At the range's end or at the next message; or such a task had a longer range.
        return False
    return True


def move(
    group: GroupRows, connection: psycopg.Connection[Any], moved: Move, *, applied: int = 0, dead: int = 0
) -> None:
    group.move(
        connection,
        moved.partition,
        moved.span.end,
        reached=moved.reached,
        log_end=moved.log_end,
        leader_epoch=moved.span.leader_epoch,
        applied=applied,
        duplicates=moved.read - moved.fresh,
        dead=dead,
    )


def forgiven(requests: Mapping[MessageRef, RetryRequest]) -> frozenset[MessageRef]:
    """Return the messages that were too old, and that an operator wants to apply anyway."""
    return frozenset(place for place, (_, reason) in requests.items() if reason == "too-old")


class PostgresSinks:
    """Creates the sinks of a job's rounds: see sink.Sinks. What it has read of the tables is cached for a round."""

    def __init__(self, job: ConsumerJob, store: PostgresGroupStore) -> None:
        self._store = store
        self._job = job
        self._statements: dict[tuple[str, ...], str] = {}
        self._directs: dict[tuple[tuple[str, str], ...], DirectCopy | None] = {}

    def look_again(self, *, checked: bool = True) -> None:
        # A direct copy compares the table with what was known of it, and takes the way through ``batch`` if it is
        # another; then all is forgotten.
        if not checked and self._directs and None not in self._directs.values():
            return
        self._statements.clear()
        self._directs.clear()

    def prepared(self, columns: Mapping[str, str], generation: int) -> PostgresSink:
        return PostgresSink(
            self._store.url,
            self._store.schema,
            self._job.group,
            generation,
            columns,
            self.effect(columns),
            self._job.reducing,
            bisect=self._job.on_bad == "dead-letter",
            direct=self._direct(columns),
            at_most_once=self._job.delivery == "at-most-once",
        )

    def effect(
        self, columns: Mapping[str, str], rows: Literal["messages", "shuffled", "stream"] = "messages"
    ) -> str | PythonEffect:
        """Return the job's effect, as SQL if it is an Insert or Upsert.

        rows  what the effect is applied to: messages, the result of a transform that shuffles, or a stream's rows. The
              last two may be messages, and then have an order.
        """
        effect = self._job.effect
        if not isinstance(effect, Insert | Upsert):
            return effect
        if not columns:
            # Such a sink applies nothing, it only moves offsets.
            return ""
        known = (rows, *columns)
        if known not in self._statements:
            types = self._store.column_types(effect.table)
            needed = PLACED | {"message_key"} if isinstance(effect, Upsert) and effect.deletes else PLACED
            placed = rows == "messages" or needed <= set(columns)
            # Columns about messages are written if the table has them. It must have those that an aggregation has kept;
            # a stream's may be there for dedup alone.
            about = set() if rows == "messages" else set(META) if rows == "shuffled" and not placed else set(types)
            payload = [name for name in columns if name not in META or name in about]
            made = [one.as_string(None) for one in effect.statements(payload, types, placed=placed)]
            self._statements[known] = ";\n".join(made)
        return self._statements[known]

    def _direct(self, columns: Mapping[str, str]) -> DirectCopy | None:
        if not columns or not isinstance(self._job.effect, Insert):
            return None
        names = tuple(columns.items())
        if names not in self._directs:
            payload = [name for name in columns if name not in META]
            self._directs[names] = self._store.direct(self._job.effect, self._job.strategy, columns, payload)
        return self._directs[names]
