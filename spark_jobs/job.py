"""What a user declares: which topics to read, how to decode a payload, and what to do with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from outbox.consumer.declared import find_declared
from outbox.consumer.errors import JobError
from outbox.consumer.model import AT_MOST_ONCE, DEDUP_BY_KEY, DEDUP_BY_OFFSET
from outbox.event import TRACEPARENT, TRACESTATE
from spark_jobs.dedup.strategies import Dedup, Fingerprint, OffsetsOnly, Strategy, Version
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.effects.produce import Traced
from spark_jobs.payloads.decoding import PROBLEM, Decoder, decoder_of

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa
    from pyspark.sql import DataFrame

    Transform = Callable[[DataFrame], DataFrame]
    PythonEffect = Callable[[psycopg.Cursor[Any], pa.Table], None]

META: Final = {
    "message_id": "uuid",
    "message_topic": "text",
    "message_part": "integer",
    "message_offset": "bigint",
    "message_key": "text",
    "message_type": "text",
    "message_time": "timestamptz",
    "message_tombstone": "boolean",
}
"""Columns of ``batch`` in addition to the payload's, with their Postgres types. ``message_time`` is Kafka's
timestamp."""

KEPT: Final = ("message_id", "message_topic", "message_part", "message_offset", "message_tombstone")
"""Columns that a transform must keep."""

OWN: Final = "outbox_batch_"
"""The prefix of columns that the consumer adds to ``batch`` for its own use."""

_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
# Comments, string literals and quoted names may contain semicolons that do not end a statement.
_QUOTED: Final = re.compile(
    r"""--[^\n]*|/\*.*?\*/|\b[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|\$(\w*)\$.*?\$\1\$""", re.DOTALL
)
_ENDING: Final = re.compile(
    r"\s*(BEGIN|START\s+TRANSACTION|COMMIT|END|ROLLBACK|ABORT|SAVEPOINT|RELEASE|PREPARE\s+TRANSACTION)\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ConsumerJob:
    """One consumer group and its effect.

    group       names the consumer in ``consumer.offsets`` and in Kafka's tools.
    topics      to read, all in one group. Empty for a job of ``exactly_once``, which gets its rows from a Spark stream.
    effect      what to do with a batch, in the transaction that also moves the offsets and remembers the ids. SQL over
                the temporary table ``batch`` (one statement or several), which has a row for each message that was
                never applied: the payload's columns and those of META. Or ``Upsert``, ``Insert``: columns mapped to a
                table. Or a function of a psycopg cursor and a pyarrow Table with the same rows; it does everything
                through that cursor, never commits, and raises ``Reject`` for a message that it can't apply.
    types       apply only messages of these event types (header ``ce_type`` or ``event-type``); others are skipped
                before they are decoded. None: all.
    schema      of the JSON payload, as Spark DDL: ``"order_id string, amount_cents long"``; or a decoder of
                spark_jobs.payloads.decoding. None: the payload stays bytes, in a column ``payload``.
    transform   a function from DataFrame to DataFrame, applied before the effect: select, filter, withColumn. It must
                keep the columns of KEPT. With ``atomic="partition"`` it must not move rows between partitions; a join
                with a broadcast table (``functions.broadcast``) does not. Called for each round.
    setup       SQL that creates the sink's tables if they don't exist; run by the driver, under a lock.
    strategy    how messages that the producer sent twice are recognized.
    atomic      "partition": each Kafka partition is a transaction of its own, run by an executor. "batch": the rows are
                staged, and one transaction of the driver applies a whole round; a transform may then join, aggregate
                and sort, and need not keep any column.
    on_bad      a message that does not decode, has no id, or breaks the effect: "dead-letter" stores the whole message
                as a dead letter in the transaction that moves the offsets; "halt" ends the job before it.
    keep_order  later messages of a key that has a dead letter wait behind it (reason ``behind``) and do not overtake
                it.
    max_dead    a round that would make more dead letters than this ends the job instead: the cause is then unlikely to
                be in the messages. Those that are ``behind`` others don't count: they are stored in pieces.
    max_payload_bytes  a message with a larger payload becomes a dead letter without being decoded. The default is far
                above Kafka's own default limit.
    delivery    "exactly-once": the offsets move in the transaction of the effect. "at-most-once", for effects elsewhere
                that must not come late or twice: they are committed before it. Nothing is retried: what was interrupted
                or failed is recorded in ``consumer.losses``, as are messages that would become dead letters. A function
                that fails ends the job, which goes on behind its rows. Goes with ``OffsetsOnly``: ids that an effect
                has remembered would go with it.
    start       where a new group begins: "earliest" at offset 0 of each partition, so that what retention has removed
                is a loss; "earliest-available" at the first message that is left; "latest" behind the last committed
                one. Partitions added later are read from 0 in any case. Ignored once the group has an offset.

    Raises JobError for a declaration that can't work.
    """

    group: str
    topics: Sequence[str] = ()
    effect: str | PythonEffect | Insert | Upsert = ""
    schema: str | Decoder | None = None
    types: Sequence[str] | None = None
    transform: Transform | None = None
    setup: str | None = None
    strategy: Strategy = field(default_factory=Dedup)
    atomic: Literal["partition", "batch"] = "partition"
    on_bad: Literal["dead-letter", "halt"] = "dead-letter"
    keep_order: bool = False
    max_dead: int = 1000
    max_payload_bytes: int = 16 * 2**20
    start: Literal["earliest", "earliest-available", "latest"] = "earliest"
    delivery: Literal["exactly-once", "at-most-once"] = "exactly-once"

    def __post_init__(self) -> None:
        if not self.group or len(self.group) > 200 or "\0" in self.group:
            raise JobError("group: must be 1 to 200 characters")
        self._check_topics()
        usable = bool(self.effect.strip()) if isinstance(self.effect, str) else callable(self.effect)
        if not usable and not isinstance(self.effect, Insert | Upsert):
            raise JobError("effect: must be SQL, an Insert, an Upsert, or a function of a cursor and a pyarrow Table")
        if isinstance(self.schema, str) and not self.schema.strip():
            raise JobError("schema: must be Spark DDL, a decoder, or None for bytes")
        if self.schema is not None and not isinstance(self.schema, str | Decoder):
            raise JobError(f"schema: {type(self.schema).__name__} is not a decoder")
        if isinstance(self.types, str) or (self.types is not None and not list(self.types)):
            raise JobError(f"types: must be a list of event types, or None for all, not {self.types!r}")
        self._check_choices()
        self._check_effect()

    def _check_effect(self) -> None:
        if isinstance(self.effect, str):
            for statement in _QUOTED.sub(" ", self.effect).split(";"):
                if found := _ENDING.match(statement):
                    raise JobError(
                        f"effect: {found[1].upper()} is not for an effect: it runs in the transaction that moves the "
                        "offsets and remembers the ids, and the consumer begins and ends that one"
                    )
        if isinstance(self.effect, Upsert) and self.effect.deletes and isinstance(self.strategy, Fingerprint):
            raise JobError(
                "strategy: with Fingerprint all tombstones of a key are one and the same message, so only the first "
                "would delete; Upsert(deletes=True) goes with the other strategies"
            )

    def _check_topics(self) -> None:
        if isinstance(self.topics, str):
            raise JobError(f"topics: must be a list of topic names, not {self.topics!r}")
        for topic in self.topics:
            if not _TOPIC.fullmatch(topic):
                raise JobError(f"topics: {topic!r} is not a valid topic name")
        if len(set(self.topics)) != len(self.topics):
            raise JobError("topics: a topic is named twice")

    def _check_choices(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise JobError("strategy: must be Dedup(), Natural(…), Version(…), Fingerprint(…) or OffsetsOnly()")
        for name, allowed in (
            ("atomic", ("partition", "batch")),
            ("on_bad", ("dead-letter", "halt")),
            ("start", ("earliest", "earliest-available", "latest")),
            ("delivery", ("exactly-once", "at-most-once")),
        ):
            if getattr(self, name) not in allowed:
                raise JobError(f"{name}: must be {' or '.join(allowed)}, not {getattr(self, name)!r}")
        if self.max_dead < 0:
            raise JobError("max_dead: must be 0 or more")
        if self.max_payload_bytes < 1:
            raise JobError("max_payload_bytes: must be 1 or more")
        if self.delivery == "at-most-once" and not isinstance(self.strategy, OffsetsOnly):
            raise JobError(
                "strategy: delivery='at-most-once' goes with OffsetsOnly(): what a lost effect has remembered would be "
                "rolled back with it, and a repeat be applied late"
            )
        if self.delivery == "at-most-once" and self.keep_order:
            raise JobError("keep_order: with delivery='at-most-once' nothing waits behind what is lost; leave it out")
        if self.keep_order and self.on_bad == "halt":
            raise JobError("keep_order: goes with on_bad='dead-letter'; a job that halts never overtakes")

    @property
    def decoder(self) -> Decoder:
        return decoder_of(self.schema)

    def payload_columns(self) -> tuple[str, ...]:
        """Return the payload's columns before the transform. Raises JobError for a name that is the consumer's own."""
        names = self.decoder.task_plan()[0].fieldNames()
        for name in names:
            if name in META or name == PROBLEM or name.startswith(("message_raw_", OWN)):
                raise JobError(f"schema: the name {name} is reserved for the consumer")
        return (*names, *((TRACEPARENT, TRACESTATE) if isinstance(self.schema, Traced) else ()))

    @property
    def shown_strategy(self) -> str:
        """The strategy as the group's row shows it."""
        if self.delivery == "at-most-once":
            return AT_MOST_ONCE
        if isinstance(self.strategy, Dedup) and self.strategy.key is not None:
            return DEDUP_BY_KEY
        if isinstance(self.strategy, Dedup) and self.strategy.allow_producer_repeats:
            return DEDUP_BY_OFFSET
        return type(self.strategy).__name__

    @property
    def reducing(self) -> Strategy:
        """The strategy as the effect needs it: where the effect ignores tombstones, Version ignores them too."""
        deletes = isinstance(self.effect, Upsert) and self.effect.deletes
        if isinstance(self.strategy, Version) and isinstance(self.effect, Insert | Upsert) and not deletes:
            return replace(self.strategy, tombstones=False)
        return self.strategy

    def with_topics(self, topics: Sequence[str]) -> ConsumerJob:
        return replace(self, topics=tuple(topics))


def find_job(spec: str) -> ConsumerJob:
    """Import ``MODULE:NAME`` and return the ConsumerJob there. Raises ConfigurationError saying what is missing."""
    return find_declared(spec, ConsumerJob, "name the job as MODULE:NAME, as in spark_jobs.order_totals:job")
