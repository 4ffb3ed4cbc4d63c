"""Find the rows that can't even be copied as text: their messages are rejected before COPY would fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from outbox.consumer.model import META_PLACE, RejectedRecord, refs_of
from spark_jobs.outcomes import EffectError, RejectedRecords
from spark_jobs.postgres.copying import beyond, has_beyond

if TYPE_CHECKING:
    import pyarrow as pa


def without_unfit(
    batches: Iterable[pa.RecordBatch], names: Sequence[str], found: list[RejectedRecord], max_dead: int
) -> Iterator[pa.RecordBatch]:
    """Return the rows whose columns ``names`` Postgres accepts as text, and add the messages of the others to
    ``found``.

    NUL characters and bytes that are not UTF-8 can't even be copied as text. Raises EffectError when a row does not
    identify its message, and RejectedRecords when there are more than ``max_dead``.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for batch in batches:
        good = pa.array([True] * batch.num_rows, pa.bool_())
        for name in names:
            column = batch.column(name)
            if has_beyond(column.type):
                bad, why = beyond(column), f"column {name} holds a time beyond the years 1 to 9999"
                good = pc.and_(good, pc.invert(bad))
                _add_rejected(batch, bad, why, "22008", found, max_dead)
                continue
            if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
                continue
            as_bytes = column.cast(pa.binary())
            bad = pc.fill_null(pc.match_substring(as_bytes, "\0"), False)
            why = f"column {name} holds a NUL character, which text in Postgres can't"
            if not _is_utf8(column):
                broken = [value is not None and not _decodes(value) for value in as_bytes.to_pylist()]
                bad = pc.or_(bad, pa.array(broken, pa.bool_()))
                why = f"column {name} holds a NUL character, or bytes that are no UTF-8"
            good = pc.and_(good, pc.invert(bad))
            _add_rejected(batch, bad, why, "22021", found, max_dead)
        yield batch.filter(good)


def _add_rejected(
    batch: pa.RecordBatch, bad: pa.Array, why: str, sqlstate: str, found: list[RejectedRecord], max_dead: int
) -> None:
    if not bad.true_count:
        return
    if not set(META_PLACE) <= set(batch.schema.names):
        raise EffectError(
            f"{why}; it is a row of the transform, of no one message, so no message can be put aside for it"
        )
    known = {record.place for record in found}
    for place in refs_of(batch.filter(bad)):
        if place not in known:
            known.add(place)
            found.append(RejectedRecord(place, "failed", why, sqlstate))
        if len(found) > max_dead:
            raise RejectedRecords(found)


def _is_utf8(column: pa.Array) -> bool:
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _decodes(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
