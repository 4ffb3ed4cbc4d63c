"""The marker: the last record of every exactly-once batch, and how a lane goes on from it. No I/O.

A batch's events and its marker are in one Kafka transaction, with those of the turn's other lanes. So the last
committed marker of a lane tells exactly which events are on Kafka, whether or not Postgres has settled them. Postgres
keeps the number of the last settled batch (``lanes.last_batch``), written before the next batch is sent. So a lane's
``last_batch`` is the marker's batch or the one before it; anything else is an error:

| last_batch  | marker             | it means                                  | what follows                        |
|-------------|--------------------|-------------------------------------------|-------------------------------------|
| NULL        | none               | exactly-once has not begun on this lane   | write an empty marker, batch 1      |
| NULL        | 1 or 2             | the first, empty marker, or the first     | settle its events, go on; stop if   |
|             |                    | events, and a failover lost the rest      | one of them is not in the table     |
| NULL        | above 2            | Postgres is from before exactly-once      | stop: what is on Kafka already may  |
|             |                    | began (a restore), or was created anew    | be in the table                     |
| 0           | none               | `outbox db lanes` has added the lane      | write an empty marker, batch 1      |
| k           | k                  | batch k is settled                        | go on with k + 1                    |
| k - 1       | k                  | killed after the commit, before settling  | settle k's events, go on with k + 1 |
| k           | none, or below k   | the state topic lost data                 | stop: publishing could double       |
| below k - 1 | k                  | Postgres lost commits that it had made    | stop: events would be sent again    |
| any         | another server's   | two outboxes share a name, or a restored  | stop                                |
|             |                    | dump                                      |                                     |
| NULL        | another outbox's   | two outboxes of the server share a name   | stop. With a batch it goes on: the  |
|             |                    |                                           | database may have been renamed      |
| any         | of a timeline that | this is the primary from before a         | stop: there is one that goes on     |
|             | this server never  | failover, or an older copy                |                                     |
|             | came to            |                                           |                                     |
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import orjson

from outbox._clients.counting import counted
from outbox.errors import OutboxError

_VERSION: Final = 1
_FIRST_EVENTS: Final = 2
_SEE: Final = "Nothing was published. Run `outbox relay reconcile`"
RECOVER: Final = (
    "run `outbox recover --since TIME`, with the time of the last commit that it has: it shows what was lost, and "
    "`outbox relay reconcile` the lane only"
)


class StateLost(OutboxError):
    """Marker and table contradict each other: the lane stops until ``outbox relay reconcile``."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A Postgres server, and which of its outboxes: by database and schema. None: that of a marker that lacks it."""

    system_identifier: str
    timeline: int
    outbox: str | None


@dataclass(frozen=True, slots=True)
class Marker:
    """One committed batch of one lane.

    ``positions`` are the rows' ids, and ``event_ids`` (as text, in the same order) guard against reused ids.
    ``system_identifier`` and ``timeline`` identify the Postgres that they were read from. ``commit_lsn`` is the
    position of the last event, if they came from the WAL. ``writer`` is the prefix of the writer's transactional ids,
    if known. ``outbox`` is that of Identity; earlier versions did not write it.
    """

    batch: int
    epoch: int
    system_identifier: str
    timeline: int
    positions: Sequence[int] = ()
    event_ids: Sequence[str] = ()
    commit_lsn: int | None = None
    writer: str | None = None
    outbox: str | None = None

    def is_first_of(self, here: Identity) -> bool:
        """Return whether it is the empty marker that this outbox has written before the first events of a lane."""
        return self.batch < _FIRST_EVENTS and not self.positions and self.outbox in {None, here.outbox}

    def encode(self) -> bytes:
        """Return the record's value: JSON, positions as differences, event ids as base64 of 16 bytes each."""
        steps = [b - a for a, b in zip((0, *self.positions), self.positions, strict=False)]
        raw = bytes.fromhex("".join(self.event_ids).replace("-", ""))
        return orjson.dumps(
            {
                "version": _VERSION,
                "batch": self.batch,
                "epoch": self.epoch,
                "system_identifier": self.system_identifier,
                "timeline": self.timeline,
                "positions": steps,
                "event_ids": base64.b64encode(raw).decode(),
                "commit_lsn": self.commit_lsn,
                "writer": self.writer,
                "outbox": self.outbox,
            }
        )

    @staticmethod
    def decode(value: bytes | None) -> Marker:
        """Return the marker in a record's value. Raises StateLost when it is not one that this version can read."""
        try:
            fields: dict[str, Any] = orjson.loads(value or b"")
            if fields["version"] != _VERSION:
                raise StateLost(
                    f"the lane's marker has version {fields['version']!r}, this relay reads {_VERSION}: run the "
                    "version that wrote it, or a newer one"
                )
            raw = base64.b64decode(fields["event_ids"], validate=True)
            commit_lsn, outbox = fields["commit_lsn"], fields.get("outbox")
            marker = Marker(
                batch=int(fields["batch"]),
                epoch=int(fields["epoch"]),
                system_identifier=str(fields["system_identifier"]),
                timeline=int(fields["timeline"]),
                positions=tuple(accumulate(map(int, fields["positions"]))),
                event_ids=tuple(str(uuid.UUID(bytes=raw[at : at + 16])) for at in range(0, len(raw), 16)),
                commit_lsn=None if commit_lsn is None else int(commit_lsn),
                writer=None if fields["writer"] is None else str(fields["writer"]),
                outbox=None if outbox is None else str(outbox),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StateLost(
                f"the lane's last record in the state topic is no marker ({error!r}): something else wrote there; "
                "see `outbox relay reconcile`"
            ) from error
        if len(marker.positions) != len(marker.event_ids):
            rows, ids = counted(len(marker.positions), "row"), counted(len(marker.event_ids), "event id")
            raise StateLost(f"the lane's marker names {rows} and {ids}: it is damaged; see `outbox relay reconcile`")
        return marker


def resume(lane: int, last_batch: int | None, marker: Marker | None, here: Identity) -> Marker | None:
    """Return the marker that a lane goes on from; None if there has never been one and an empty one must be written.

    ``here`` has the lane's rows. Raises StateLost where the table above says stop.
    """
    check_origin(lane, last_batch, marker, here)
    if last_batch is None:
        if marker is not None and marker.batch > _FIRST_EVENTS:
            raise StateLost(
                f"lane {lane}: Kafka holds batch {marker.batch} of this outbox, and Postgres has settled none: it is "
                "from before exactly-once began (a restore), or another outbox had this OUTBOX_NAME on this Kafka. "
                f"Events would be sent again; nothing was published. If it was restored, {RECOVER}"
            )
        return marker
    # Kept by `outbox db lanes`, which takes a lane that it adds for settled up to its number's last marker.
    published = 0 if marker is None else marker.batch
    if published < last_batch:
        found = "no marker" if marker is None else f"the marker of batch {marker.batch}"
        raise StateLost(
            f"lane {lane}: Postgres has settled batch {last_batch}, but the state topic holds {found}: it was deleted, "
            f"truncated or restored. Publishing could double events. {_SEE}"
        )
    if published > last_batch + 1:
        raise StateLost(
            f"lane {lane}: Kafka holds batch {published}, but Postgres remembers only {last_batch}: it has lost "
            "commits (a restore, or a failover to a standby that was behind). Events would be sent again; nothing was "
            f"published: {RECOVER}"
        )
    return marker


def check_origin(lane: int, last_batch: int | None, marker: Marker | None, here: Identity) -> None:
    """Raise StateLost if the marker is of another server or outbox, or of a timeline that this server never came to."""
    if marker is None:
        return
    if marker.system_identifier != here.system_identifier:
        raise StateLost(
            f"lane {lane}: the state topic's marker was written for the database {marker.system_identifier}, this is "
            f"{here.system_identifier}. If another outbox has, or had, this OUTBOX_NAME, choose a new one; if "
            "pg_upgrade has given this server a new identifier, run `outbox relay upgraded --reason '…'`; if this "
            f"database was restored from a dump: {_SEE}"
        )
    if last_batch is None and marker.outbox not in {None, here.outbox}:
        raise StateLost(
            f"lane {lane}: the state topic's marker was written for the outbox {marker.outbox}, this is {here.outbox}, "
            "which has settled no batch. Another outbox of this server has, or had, this OUTBOX_NAME: choose a new one"
        )
    if marker.timeline > here.timeline:
        raise StateLost(
            f"lane {lane}: Kafka holds batch {marker.batch} from timeline {marker.timeline}, this server is on "
            f"timeline {here.timeline}: it is the primary from before a failover, or an older copy, and another one "
            f"has gone on. Connect to that one (OUTBOX_DATABASE_URL). If this is the one to go on with: {_SEE}"
        )
