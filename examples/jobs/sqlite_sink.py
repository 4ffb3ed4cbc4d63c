"""SQLite as a sink: what another database has to bring so that rounds and tasks work with it as they are.

The least that the protocol of ``spark_jobs.sink`` needs: one way to load rows, and one to find those at which an effect
fails. Copy it for another database, and let tests/integration/spark_jobs/test_sink_contract.py run over that, too.
"""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from outbox.consumer.errors import ConsumerUnavailable, Fenced, JobError, OffsetMoved
from outbox.consumer.letters import RetryRecord
from outbox.consumer.model import MessageRef, Partition, Range, RejectedRecord, RetryRequest, StoredOffset
from spark_jobs.dedup.strategies import Dedup
from spark_jobs.job import ConsumerJob
from spark_jobs.outcomes import EffectError, RejectedRecords
from spark_jobs.sink import Move, Way, Whole

TABLES = """
CREATE TABLE groups (grp TEXT PRIMARY KEY, generation INT NOT NULL);
CREATE TABLE offsets (grp TEXT, topic TEXT, part INT, topic_id TEXT, next_offset INT, generation INT,
                      applied INT DEFAULT 0, duplicates INT DEFAULT 0, dead INT DEFAULT 0,
                      PRIMARY KEY (grp, topic, part));
CREATE TABLE processed (grp TEXT, message_id TEXT, PRIMARY KEY (grp, message_id));
CREATE TABLE dead_letters (id INTEGER PRIMARY KEY, grp TEXT, topic TEXT, part INT, message_offset INT, message_key BLOB,
                           message_value BLOB, message_time INT, headers TEXT, reason TEXT, error TEXT,
                           state TEXT DEFAULT 'dead');
"""
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

# As sqlite3 itself does, which is deprecated from Python 3.12 on.
sqlite3.register_adapter(dt.datetime, lambda moment: moment.isoformat(" "))


def open_file(path: str) -> sqlite3.Connection:
    """Open the database; transactions are begun by hand."""
    return sqlite3.connect(path, timeout=30, isolation_level=None)


def require_generation(connection: sqlite3.Connection, group: str, generation: int) -> None:
    """Raise Fenced when another driver has taken the group over."""
    mine = connection.execute("SELECT 1 FROM groups WHERE grp = ? AND generation = ?", (group, generation))
    if mine.fetchone() is None:
        raise Fenced(f"group {group} was taken over")


@dataclass(frozen=True)
class SqliteSink:
    """See spark_jobs.sink.Sink. ``effect`` is SQL over the table ``batch``."""

    path: str
    group: str
    generation: int
    columns: tuple[str, ...]
    effect: str

    @contextmanager
    def transaction(self, where: str, rows: Whole, *, most: int, here: bool = False) -> Iterator[SqliteTransaction]:
        """Begin a transaction. One at a time has the database."""
        with closing(open_file(self.path)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield SqliteTransaction(self, connection, most)
                if connection.in_transaction:
                    rows.require_whole()
                    connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                raise ConsumerUnavailable(f"{where}: {error}") from error


class SqliteTransaction:
    """See spark_jobs.sink.Transaction. What is left open, closing the connection takes back."""

    def __init__(self, sink: SqliteSink, connection: sqlite3.Connection, most: int) -> None:
        self._sink = sink
        self._connection = connection
        self._most = most
        self._requests: Mapping[MessageRef, RetryRequest] = {}

    def fence(self, partition: Partition, span: Range) -> bool:
        """Compare the group's offset: BEGIN IMMEDIATE has locked it."""
        mine = (span.topic_id, self._sink.generation)
        row = self._connection.execute(
            "SELECT next_offset, topic_id, generation FROM offsets WHERE grp = ? AND topic = ? AND part = ?",
            (self._sink.group, *partition),
        ).fetchone()
        if row is None or row[1:] != mine or row[0] < span.start:
            raise Fenced(f"group {self._sink.group} was taken over: {row}")
        if span.start < row[0] < span.end:
            raise OffsetMoved(partition, row[0])
        return bool(row[0] == span.start)

    def fence_all(self, spans: Mapping[Partition, Range]) -> bool:
        """Compare the offsets of several ranges."""
        return all(self.fence(partition, span) for partition, span in spans.items())

    def at_once(self) -> AbstractContextManager[object]:
        """Nothing is sent anywhere."""
        return nullcontext()

    def remember(self, rows: Iterable[pa.RecordBatch], way: Way) -> int:
        """Take rows in, and leave out those whose ids are known."""
        names = ", ".join(f'"{name}"' for name in self._sink.columns)
        marks = ", ".join("?" for _ in self._sink.columns)
        self._connection.execute(f"CREATE TEMP TABLE batch ({names})")
        for batch in rows:
            lists = [batch.column(name).to_pylist() for name in self._sink.columns]
            self._connection.executemany(f"INSERT INTO batch VALUES ({marks})", zip(*lists, strict=True))
        self._connection.execute("CREATE INDEX temp.batch_ids ON batch (message_id)")
        # A message may have become several rows. NULL is no id: such rows are neither repetitions nor remembered.
        place = "message_topic, message_part, message_offset"
        self._connection.execute(
            "DELETE FROM batch WHERE message_id IN (SELECT message_id FROM processed WHERE grp = ?) OR "
            f"({place}) > (SELECT {place} FROM batch AS other WHERE other.message_id = batch.message_id "
            f"ORDER BY {place} LIMIT 1)",
            (self._sink.group,),
        )
        self._connection.execute(
            "INSERT INTO processed SELECT DISTINCT ?, message_id FROM batch WHERE message_id IS NOT NULL",
            (self._sink.group,),
        )
        ((left,),) = self._connection.execute("SELECT count(*) FROM batch")
        return int(left)

    def move(self, moved: Move) -> None:
        """Move the group's offset over the range, count, and store the partition's dead letters."""
        for letter in moved.dead:
            found = letter.record
            self._connection.execute(
                "INSERT INTO dead_letters (grp, topic, part, message_offset, message_key, message_value, "
                "message_time, headers, reason, error) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(self._sink.group, *found.place, letter.key, letter.value),
                    *(letter.time, letter.headers, found.reason, found.error),
                ),
            )
        figures = moved.fresh, moved.read - moved.fresh, len(moved.dead)
        self._connection.execute(
            "UPDATE offsets SET applied = applied + ?, duplicates = duplicates + ?, dead = dead + ?, "
            "next_offset = ? WHERE grp = ? AND topic = ? AND part = ?",
            (*figures, max(moved.span.end, moved.reached or 0), self._sink.group, *moved.partition),
        )

    def now(self) -> float:
        """Return this process's time: SQLite runs in it."""
        return time.time()

    def apply(self) -> None:
        """Run the effect; where it fails at a row, find out at which ones it does, one by one."""
        self._connection.execute("SAVEPOINT effect")
        try:
            self._connection.execute(self._sink.effect)
            return
        except sqlite3.OperationalError as error:
            raise EffectError(str(error)) from error
        except sqlite3.IntegrityError as error:
            self._connection.execute("ROLLBACK TO effect")
            if found := list(self._failing()):
                raise RejectedRecords(found) from error
            # Each row by itself is accepted, so that no message is at fault.
            raise EffectError(str(error)) from error

    def _failing(self) -> Iterator[RejectedRecord]:
        place = "message_topic, message_part, message_offset"
        self._connection.execute("CREATE TEMP TABLE held AS SELECT * FROM batch")
        found = 0
        for number, *of_row in self._connection.execute(f"SELECT rowid, {place} FROM held ORDER BY {place}").fetchall():
            self._connection.execute("DELETE FROM batch")
            self._connection.execute("INSERT INTO batch SELECT * FROM held WHERE rowid = ?", (number,))
            try:
                self._connection.execute(self._sink.effect)
            except sqlite3.IntegrityError as error:
                yield RejectedRecord((of_row[0], of_row[1], of_row[2]), "failed", str(error))
                found += 1
                if found > self._most:
                    return

    def rollback(self) -> None:
        """Roll back: nothing is committed."""
        self._connection.execute("ROLLBACK")

    def hold(self, requests: Mapping[MessageRef, RetryRequest]) -> bool:
        """Look for the dead letters: BEGIN IMMEDIATE has locked them."""
        self._requests = requests
        require_generation(self._connection, self._sink.group, self._sink.generation)
        ids = [number for number, _ in requests.values()]
        marks = ", ".join("?" for _ in ids)
        found = self._connection.execute(
            f"SELECT count(*) FROM dead_letters WHERE state = 'retry' AND id IN ({marks})", ids
        )
        return bool(found.fetchone() == (len(ids),))

    def resolve(self) -> None:
        """Delete the dead letters that were held."""
        self._connection.executemany(
            "DELETE FROM dead_letters WHERE id = ?", [(number,) for number, _ in self._requests.values()]
        )


@dataclass(frozen=True)
class SqliteSinks:
    """See spark_jobs.sink.Sinks."""

    path: str
    job: ConsumerJob

    def __post_init__(self) -> None:
        if self.job.strategy != Dedup():
            raise JobError(f"group {self.job.group}: SqliteSinks implements Dedup(), not {self.job.strategy}")

    def prepared(self, columns: Mapping[str, str], generation: int) -> SqliteSink:
        """Return the sink for rows of these columns."""
        assert isinstance(self.job.effect, str)
        return SqliteSink(self.path, self.job.group, generation, tuple(columns), self.job.effect)

    def look_again(self, *, checked: bool = True) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class SqliteStore:
    """See spark_jobs.sink.GroupStore."""

    path: str
    group: str

    def stored(self, topics: Iterable[str]) -> dict[Partition, StoredOffset]:
        """Return the group's offsets."""
        rows = self.run("SELECT topic, part, topic_id, next_offset FROM offsets WHERE grp = ?", self.group)
        return {(topic, part): StoredOffset(*rest) for topic, part, *rest in rows if topic in set(topics)}

    def dead_keys(self, topics: Iterable[str]) -> dict[tuple[str, bytes], None]:
        """Return the keys of the group's dead letters."""
        rows = self.run("SELECT DISTINCT topic, message_key FROM dead_letters WHERE grp = ?", self.group)
        return {(topic, key): None for topic, key in rows if topic in set(topics) and key is not None}

    def retried(self, topics: Iterable[str], most: int, *, keep_order: bool) -> list[RetryRecord]:
        """Return dead letters to be retried, of the partition whose first one is the oldest."""
        rows = self.run(
            "WITH waiting AS (SELECT * FROM dead_letters WHERE grp = ? AND state = 'retry' "
            "                    AND topic IN (SELECT value FROM json_each(?))) "
            "SELECT id, topic, part, message_offset, message_key, message_value, headers, message_time, reason "
            "  FROM waiting WHERE (topic, part) = (SELECT topic, part FROM waiting ORDER BY id LIMIT 1) "
            " ORDER BY message_offset LIMIT ?",
            *(self.group, json.dumps(list(topics)), most),
        )
        return [
            RetryRecord(
                *(number, (topic, part, offset), key, value, json.loads(headers)),
                *(EPOCH + dt.timedelta(microseconds=time), reason, False),
            )
            for number, topic, part, offset, key, value, headers, time, reason in rows
        ]

    def failed_again(self, failed: Iterable[tuple[int, RejectedRecord]], generation: int) -> None:
        """Put dead letters back."""
        with closing(open_file(self.path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            require_generation(connection, self.group, generation)
            for number, record in failed:
                connection.execute(
                    "UPDATE dead_letters SET state = 'dead', error = ? WHERE id = ?", (record.error, number)
                )
            connection.execute("COMMIT")

    def run(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement in a transaction of its own."""
        with closing(open_file(self.path)) as connection:
            return connection.execute(query, values).fetchall()
