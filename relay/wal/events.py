"""The events in a slot's messages: inserted rows of ``events``, by their ids. No I/O."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, assert_never

from outbox.errors import SchemaError
from relay.core.ports import WalPosition
from relay.wal.channel import StreamEvent
from relay.wal.lane_hash import lane_of
from relay.wal.pgoutput import Begin, Commit, Insert, Message, Relation, Value, decode, insert_head, insert_tail
from relay.wal.slot import REPAIR, heartbeat_prefix

# No message begins with it.
_NEVER: Final = b"\0" * len(insert_head(0, 2))
_START: Final = len(_NEVER) + 1
# A named tuple's own constructor takes longer than all the rest.
_new: Final = tuple.__new__


class EventReader:
    """Reads a slot's messages in order. ``new`` are the events in them, by lane.

    ``end`` is where the last transaction or heartbeat ended, and when it was committed.
    """

    def __init__(self, schema: str, lanes: int) -> None:
        self._lane_total = lanes
        self._heartbeat_prefix = heartbeat_prefix(schema)
        # The current transaction, and the number of its events so far.
        self._transaction: Begin | None = None
        self._number = 0
        self._lane_of_tail = {insert_tail(lane): lane for lane in range(lanes)}
        self._columns: _Columns | None = None
        self._head = _NEVER
        self._events_oid: int | None = None
        self._other_oids: set[int] = set()
        self._check: Callable[[], None]
        self.new: defaultdict[int, list[StreamEvent]] = defaultdict(list)
        self._commit: Commit | None = None
        self.end: tuple[int, dt.datetime | None] | None = None

    def begin(self, events_oid: int | None, check: Callable[[], None]) -> None:
        """Record the oid of the server's table ``events`` before anything is read.

        ``check`` is called when the server describes the table, and raises if events may be missing.
        """
        self._events_oid, self._check = events_oid, check

    def read(self, messages: Sequence[bytes]) -> None:
        # One loop, because nearly all of a stream's work is done here. Nearly all messages are rows of an id and a
        # lane: what comes before the id is the same in all of them, and what comes behind it is one of a few texts.
        find = self._lane_of_tail.get
        for data in messages:
            if data[: _START - 1] == self._head and len(data) > _START and self._transaction is not None:
                end = _START + data[_START - 1]
                lane = find(data[end:])
                if lane is not None:
                    self._number += 1
                    lsn, xid = self._transaction
                    at = _new(WalPosition, (lsn, self._number, xid))
                    self.new[lane].append(_new(StreamEvent, (int(data[_START:end]), at)))
                    continue
            self._take(data)
        if self._commit is not None:
            self.end, self._commit = (self._commit.end_lsn, self._commit.committed_at), None

    def _take(self, data: bytes) -> None:
        match decode(data):
            case Begin() as begin:
                self._transaction, self._number = begin, 0
            case Commit() as commit:
                self._transaction, self._commit = None, commit
            case Insert(relation, new):
                self._insert(relation, new)
            case Message(transactional=False, prefix=prefix, lsn=lsn) if prefix == self._heartbeat_prefix:
                # The next record begins here.
                self.end, self._commit = (lsn, None), None
            case Relation() as relation_:
                self._relation(relation_)
            case Message() | None:
                pass
            case other:
                assert_never(other)

    def _relation(self, relation: Relation) -> None:
        if relation.oid != self._events_oid:
            # A table was added to the publication. Names do not identify a table: they are from the time of writing.
            self._other_oids.add(relation.oid)
            return
        # The server describes the table again after a change of the publication: rows written meanwhile may be missing,
        # and later ones must not overtake them.
        self._check()
        self._columns = _Columns(relation)
        self._head = insert_head(relation.oid, 2) if self._columns.two_numbers else _NEVER

    def _insert(self, relation: int, new: Sequence[Value]) -> None:
        if relation in self._other_oids:
            return
        if relation != self._events_oid or self._columns is None:
            raise SchemaError("the stream has a row of a table that it did not describe")
        if self._transaction is None:
            raise SchemaError("the stream has an event outside of any transaction")
        id_, lane = self._columns.event(new, self._lane_total)
        self._number += 1
        at = WalPosition(self._transaction.final_lsn, self._number, self._transaction.xid)
        self.new[lane].append(StreamEvent(id_, at))


class _Columns:
    """The positions of the columns of ``events`` in a row of the stream. Raises SchemaError when one is missing."""

    def __init__(self, relation: Relation) -> None:
        places = {name: number for number, name in enumerate(relation.columns)}
        # Generated columns are sent since Postgres 18.
        needed = ("id", "lane") if "lane" in places else ("id", "aggregate_type", "aggregate_id")
        for name in needed:
            if name not in places:
                raise SchemaError(
                    f"{relation.schema}.{relation.name} has no column {name!r} in the stream: the table was altered; "
                    f"see `outbox db check`; when it is as it was, {REPAIR}"
                )
        self._id, *self._key = (places[name] for name in needed)
        self.two_numbers = list(relation.columns) == ["id", "lane"]
        """Whether a row has only its id and its lane."""

    def event(self, row: Sequence[Value], lanes: int) -> tuple[int, int]:
        values: Sequence[Any] = row
        if len(self._key) == 1:
            lane = int(values[self._key[0]])
        else:
            kind, key = self._key
            lane = lane_of(values[kind].decode(), values[key].decode(), lanes)
        return int(values[self._id]), lane
