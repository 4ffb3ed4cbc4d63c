"""The events in a slot's messages: rows of ``events`` by their ids, and logical decoding messages. No I/O."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from uuid_utils.compat import uuid7

from outbox import _message
from outbox.errors import MessageError, SchemaError
from relay.ports import Claim
from relay.position import WalPosition
from relay.wal.channel import Channel
from relay.wal.lane_hash import lane_of
from relay.wal.pgoutput import Begin, Commit, Insert, Message, Relation, Value, decode, insert_head, two_numbers
from relay.wal.replication import lsn_text
from relay.wal.slot import NO_TRANSACTION, REPAIR, Snapshot, heartbeat_prefix

UNREADABLE: Final = "unreadable-message"
"""The aggregate type of an unreadable message under our prefix. It becomes a dead letter."""

# No message begins with it.
_NEVER: Final = b"\0"
# A dead letter keeps this much of an unreadable message, which may have any size: a row takes a million bytes.
_UNREADABLE_BYTES: Final = 990_000


class EventReader:
    """Reads a slot's messages in order. ``new`` are the events in them that the lanes' channels want.

    ``takes_messages``: whether logical decoding messages are events; if not, they become dead letters. ``end`` is where
    the last transaction ended, and when it was committed.
    """

    def __init__(self, schema: str, channels: Mapping[int, Channel], lanes: int, *, takes_messages: bool) -> None:
        self._channels = channels
        self._lane_total = lanes
        self._takes_messages = takes_messages
        self._prefix = _message.message_prefix(schema)
        self._heartbeat_prefix = heartbeat_prefix(schema)
        # The current transaction, and the number of its events so far.
        self._transaction: Begin | None = None
        self._number = 0
        self._columns: _Columns | None = None
        self._lacking: SchemaError | None = None
        self._head = _NEVER
        self._events_oid: int | None = None
        self._opened_xid = 0
        self._other_oids: set[int] = set()
        self._check: Callable[[], None]
        self._snapshot: Callable[[], Snapshot]
        self._described: Snapshot
        self._message_count = 0
        self.messages_seen = False
        """Whether there was an event without a row, until this is reset."""
        self.new: dict[int, list[Claim]] = {}
        self.end: tuple[int, dt.datetime | None] | None = None

    def begin(
        self, events_oid: int | None, opened_xid: int, check: Callable[[], None], snapshot: Callable[[], Snapshot]
    ) -> None:
        """Record the server's data about the outbox before anything is read.

        ``check`` is called when the server describes the table, and raises if events may be missing. Rows of
        transactions before ``opened_xid`` may lack columns: all of them are in the table.
        """
        self._events_oid, self._opened_xid = events_oid, opened_xid
        self._check, self._snapshot = check, snapshot

    def read(self, messages: Sequence[bytes]) -> None:
        """Read these messages."""
        for data in messages:
            # One loop, because nearly all of a stream's work is done here.
            named = two_numbers(data, self._head)
            if named is None:
                self._take(data)
            else:
                self._add(_named(named[0], self._next()), named[1])

    def size(self, claims: Sequence[Claim], overhead: int) -> int:
        """Return about how much memory these take: only events without a row have their content here."""
        size = len(claims) * overhead
        if self._message_count:
            size += sum(len(claim.value) for claim in claims if claim.value is not None)
        return size

    def _take(self, data: bytes) -> None:
        match decode(data):
            case Insert(relation, new):
                self._insert(relation, new)
            case Begin() as begin:
                self._transaction, self._number = begin, 0
            case Commit(end_lsn=end, committed_at=at):
                self._transaction, self.end = None, (end, at)
            case Message() as message:
                self._message(message)
            case Relation() as relation_:
                self._relation(relation_)
            case _:
                # Types and origins are not needed, and the publication has only inserts.
                pass

    def _relation(self, relation: Relation) -> None:
        if relation.oid != self._events_oid:
            # A table was added to the publication. Names do not identify a table: they are from the time of writing.
            self._other_oids.add(relation.oid)
            return
        # The server describes the table again after a change of the publication: rows written meanwhile may be missing,
        # and later ones must not overtake them.
        self._check()
        self._columns, self._lacking, self._head = None, None, _NEVER
        try:
            self._columns = _Columns(relation)
        except SchemaError as error:
            self._lacking, self._described = error, self._snapshot()
        else:
            self._head = insert_head(relation.oid, 2) if self._columns.two_numbers else _NEVER

    def _insert(self, relation: int, new: Sequence[Value]) -> None:
        if relation in self._other_oids:
            return
        if self._lacking is not None and self._transaction is not None:
            # Written before the slot was set up or the publication repaired: lanes read all such rows from the table
            # before they stream.
            if self._described.full(self._transaction.xid) < self._opened_xid:
                return
            raise self._lacking
        if relation != self._events_oid or self._columns is None:
            raise SchemaError("the stream has a row of a table that it did not describe")
        claim, lane = self._columns.claim(new, self._next(), self._lane_total)
        self._add(claim, lane)

    def _message(self, message: Message) -> None:
        if not message.transactional and message.prefix in {self._heartbeat_prefix, self._prefix}:
            # The next record begins here.
            self.end = message.lsn, None
        if message.prefix != self._prefix:
            return
        if message.transactional:
            at = self._next()
            assert self._transaction is not None
            committed = self._transaction.committed_at.isoformat(timespec="microseconds").replace("+00:00", "Z")
        else:
            # The last byte of its record, as the next record may be a transaction's commit.
            at, committed = WalPosition(message.lsn - 1, 1, NO_TRANSACTION), ""
        self._message_count += 1
        number = -self._message_count
        try:
            if not self._takes_messages:
                raise MessageError("is an event's message, and this relay takes none: see OUTBOX_WAL__MESSAGES")
            if not message.transactional:
                raise MessageError("was written with transactional = false: its transaction may have been rolled back")
            event = _message.decode(message.content)
        except MessageError as error:
            place, kept = f"{lsn_text(at.commit_lsn)}/{at.number}", message.content[:_UNREADABLE_BYTES]
            claim = Claim(number, str(uuid7()), UNREADABLE, place, str(error)[:200], committed, kept, None, at)
        else:
            self.messages_seen = True
            claim = Claim(number, *event[:4], committed, event.payload, event.headers, at)
        self._add(claim, lane_of(claim.aggregate_type, claim.aggregate_id, self._lane_total))

    def _next(self) -> WalPosition:
        if self._transaction is None:
            raise SchemaError("the stream has an event outside of any transaction")
        self._number += 1
        return WalPosition(self._transaction.final_lsn, self._number, self._transaction.xid)

    def _add(self, claim: Claim, lane: int) -> None:
        if self._channels[lane].wants(claim):
            self.new.setdefault(lane, []).append(claim)


class _Columns:
    """The positions of the columns of ``events`` in a row of the stream. Raises SchemaError when one is missing."""

    def __init__(self, relation: Relation) -> None:
        places = {column.name: number for number, column in enumerate(relation.columns)}
        # Generated columns are sent since Postgres 18.
        needed = ("id", "lane") if "lane" in places else ("id", "aggregate_type", "aggregate_id")
        for name in needed:
            if name not in places:
                raise SchemaError(
                    f"{relation.schema}.{relation.name} has no column {name!r} in the stream: the table was altered; "
                    f"see `outbox db check`; when it is as it was, {REPAIR}"
                )
        self._id, *self._key = (places[name] for name in needed)
        self.two_numbers = [column.name for column in relation.columns] == ["id", "lane"]
        """Whether a row has only its id and its lane."""

    def claim(self, row: Sequence[Value], at: WalPosition, lanes: int) -> tuple[Claim, int]:
        """Return an event with only its row's id and its position, and its lane: the row has the rest."""
        values: Sequence[Any] = row
        if len(self._key) == 1:
            lane = int(values[self._key[0]])
        else:
            kind, key = self._key
            lane = lane_of(values[kind].decode(), values[key].decode(), lanes)
        return _named(int(values[self._id]), at), lane


def _named(id_: int, at: WalPosition) -> Claim:
    return Claim(id_, "", "", "", "", "", None, None, at)
