"""The interface of payload readers: a value for each column, or a problem. Does not import Spark."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args, get_type_hints, runtime_checkable

from outbox.consumer.errors import JobError

if TYPE_CHECKING:
    import pyarrow as pa

Reader = Callable[[bytes, bytes | None], Sequence[Any]]
"""From a payload and the value of its header ``__value_schema_id`` to the columns' values. Raises Problem."""
Convert = Callable[[Any], Any]
"""From a parsed value to one for Arrow. Raises Wrong, and Problem for fields inside."""


@runtime_checkable
class ManyReader(Protocol):
    """A Reader that can also read many payloads at once."""

    def __call__(self, value: bytes, header: bytes | None) -> Sequence[Any]:
        """Read one payload; see Reader."""

    def many(self, payloads: pa.Array) -> tuple[Sequence[pa.Array], set[int]] | None:
        """Return the columns, and the numbers of the rows that must be read one by one; None if all must."""


_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class Problem(Exception):
    """A payload that can't be a row. The text names the field and never quotes the payload."""


class Wrong(Problem):
    """A value of a type or size that the field can't have."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do with fields that are not as declared."""

    unknown: Literal["ignore", "dead-letter"] = "ignore"
    missing: Literal["null", "dead-letter"] = "null"
    wrong: Literal["dead-letter", "null"] = "dead-letter"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Policy).items():
            allowed = get_args(kind)
            if getattr(self, name) not in allowed:
                raise JobError(f"{name}: must be {allowed[0]!r} or {allowed[1]!r}, not {getattr(self, name)!r}")


def unchanged(value: Any) -> Any:
    return value


def shown(name: str) -> str:
    """Return a payload's field name for an error text. A name that is not a plain identifier is not quoted."""
    return f"field {name}" if _NAME.fullmatch(name) else "a field"


def limited(payloads: pa.Array, most: int) -> tuple[pa.Array, pa.Array]:
    """Return the payloads with null for those of more than ``most`` bytes, and for each of these the problem."""
    import pyarrow as pa
    import pyarrow.compute as pc

    sizes = pc.binary_length(payloads)
    large = pc.fill_null(pc.greater(sizes, most), False)
    if not large.true_count:
        return payloads, pa.nulls(len(payloads), pa.string())
    after = f" bytes, and the job takes {most} at most (max_payload_bytes)"
    text = pc.binary_join_element_wise("the payload has ", sizes.cast(pa.string()), after, "")
    return pc.if_else(large, pa.scalar(None, payloads.type), payloads), pc.if_else(large, text, pa.scalar(None))


def columns(reader: Reader, payloads: pa.Array, headers: pa.Array, kind: pa.StructType) -> pa.StructArray:
    """Read a batch. The last field of ``kind`` is for the problem; a null payload gives a row of nulls."""
    import pyarrow as pa

    read = reader.many(payloads) if isinstance(reader, ManyReader) else None
    if read is None:
        return pa.StructArray.from_arrays(_read_alone(reader, payloads, headers, kind), fields=list(kind))
    found, alone = read
    rows = len(payloads)
    arrays = [*found, pa.nulls(rows, pa.string())]
    if alone:
        numbers = sorted(alone)
        added = _read_alone(reader, payloads.take(numbers), headers.take(numbers), kind)
        places = list(range(rows))
        for place, number in enumerate(numbers, rows):
            places[number] = place
        order = pa.array(places, pa.int64())
        arrays = [pa.concat_arrays(pair).take(order) for pair in zip(arrays, added, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _read_alone(reader: Reader, payloads: pa.Array, headers: pa.Array, kind: pa.StructType) -> list[pa.Array]:
    """Read payloads one by one. Returns the columns, the last one of them with the problems."""
    import pyarrow as pa

    fields = list(kind)[:-1]
    empty = (None,) * len(fields)
    listed: list[list[Any]] = [[] for _ in fields]
    problems: list[str | None] = []
    for value, header in zip(payloads.to_pylist(), headers.to_pylist(), strict=True):
        row: Sequence[Any] = empty
        problem = None
        if value is not None:
            try:
                row = reader(value, header)
            except Problem as error:
                problem = str(error)
        problems.append(problem)
        for column, item in zip(listed, row, strict=True):
            column.append(item)
    arrays = []
    for field, column in zip(fields, listed, strict=True):
        try:
            arrays.append(pa.array(column, field.type))
        except (pa.ArrowException, ValueError, OverflowError, TypeError):
            # The reader accepted a value that the column can't hold. The other rows must not fail for it.
            for number, value in enumerate(column):
                if (problem := _unfit(value, field)) is not None:
                    column[number] = None
                    problems[number] = problems[number] or problem
            arrays.append(pa.array(column, field.type))
    return [*arrays, pa.array(problems, pa.string())]


def _unfit(value: Any, field: pa.Field) -> str | None:
    import pyarrow as pa

    try:
        pa.array([value], field.type)
    except (pa.ArrowException, ValueError, OverflowError, TypeError):
        return f"field {field.name}: holds a value that {field.type} can't have"
    return None
