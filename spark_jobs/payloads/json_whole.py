"""Read a whole batch of plain JSON payloads with Arrow's parser, without handling single values in Python.

For schemas of plain fields, structs and arrays, and payloads that have no other fields. Arrow then accepts the same
values as json_text, apart from differences that are checked here. Other payloads are read one by one, by json_text; the
rest of their batch is read here, in smaller pieces.

To find a field that is repeated, Arrow has to build a column for each name. So fields that the schema lacks are learned
from a few payloads once most of a batch has some, as after a producer's new version, and are then read and dropped. Not
if there are very many of them, as in an object whose names are keys.

One payload is one line. Arrow could take two lines for one value and another line for two, which leaves the number of
rows unchanged. But each line begins with ``{`` and ends with ``}``, and a ``}``, a newline and a ``{`` can't follow
each other inside a value: objects and arrays need a comma there, and texts contain no bare newline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json
from pyspark.sql import types as t

from spark_jobs.payloads import json_text
from spark_jobs.payloads.json_output import offsets_of
from spark_jobs.payloads.reading import Policy

_Piece = tuple[int, dict[str, pa.Array] | None]
"""How many payloads a piece has, and its columns; None if they must be read one by one."""

_KINDS: Final[dict[type[t.DataType], pa.DataType]] = {
    t.StringType: pa.string(),
    t.BooleanType: pa.bool_(),
    t.ByteType: pa.int8(),
    t.ShortType: pa.int16(),
    t.IntegerType: pa.int32(),
    t.LongType: pa.int64(),
    t.DoubleType: pa.float64(),
    t.TimestampType: pa.string(),
    t.DateType: pa.string(),
}
# From here on a double can't represent every integer.
_WHOLE_DOUBLE: Final = 2.0**53
# The forms that Arrow reads in the same way as json_text. The first and last years are excluded: with an offset, a time
# in them may be beyond the range of Python's datetime.
_YEAR: Final = r"(0[1-9]\d\d|[1-8]\d{3}|9[0-8]\d\d)"
_DAY: Final = rf"^{_YEAR}-\d\d-\d\d$"
_TIME: Final = rf"^{_YEAR}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{{1,6}})?(Z|[+-]\d\d:\d\d)$"
# The decimals that json_text accepts as texts; Arrow also accepts a plus sign, and nothing before or after the point.
# With an exponent only so many digits that no more than 76 can be behind the point: see _TINY.
_DECIMAL: Final = r"^-?(\d{1,60}(\.\d{1,60})?|\d{1,38}(\.\d{1,38})?[eE][+-]?([0-2]?\d|3[0-8]))$"
# The most digits of a decimal of 256 bits, and how many of them a number here may have.
_MOST_DIGITS: Final = 76
_NUMBER_DIGITS: Final = 56
# A number with 77 digits too many after the point makes Arrow read beyond its table of powers of ten: the process dies,
# or another value comes out. With _NUMBER_DIGITS digits a number has so many only if it is smaller than this, or 0; and
# then its exponent is -20 or less. No UUID matches: what follows the digits must end the number.
_SMALL: Final = 1e-16
_TINY: Final = r"[:\[,\s]-?\d[\d.]*[eE]-0*([2-9]|1\d)\d+[\s,\]}]"
# Arrow's offsets have 32 bits.
_MOST_BYTES: Final = 2**28
_TRIES: Final = 40
"""How many pieces of a batch may turn out to be unreadable. Four odd payloads of 10,000 never need more."""
_PIECE: Final = 64
"""Pieces of up to this number of payloads are not divided further."""
_MOST_MISSES: Final = 4
_FEW: Final = 100
"""Fewer payloads are read one by one: Arrow takes as long for one as for this many."""
_SAMPLE: Final = 64
"""How many payloads are looked at to learn fields that the schema lacks."""
_MOST_LEARNED: Final = 200


class JsonReader:
    """Reads payloads by a declared schema, one by one or ``many``. Raises JobError like json_text.reader."""

    def __init__(self, declared: t.StructType, policy: Policy) -> None:
        self._one = json_text.reader(declared, policy)
        self._whole = WholeReader.of(declared, policy)

    def __call__(self, value: bytes, header: bytes | None) -> Sequence[Any]:
        return self._one(value, header)

    def many(self, payloads: pa.Array) -> tuple[Sequence[pa.Array], set[int]] | None:
        return None if self._whole is None or len(payloads) < _FEW else self._whole.read(payloads)


class WholeReader:
    """Reads batches with a declared schema. After mostly unreadable batches it skips some, then tries again."""

    def __init__(self, declared: t.StructType, policy: Policy, kinds: Sequence[pa.DataType]) -> None:
        self._declared = declared
        self._schema = pa.schema(zip(declared.fieldNames(), kinds, strict=True))
        self._wide = self._schema
        self._learns = policy.unknown == "ignore"
        self._numbers, self._texts = (_decimals_as(kind, self._schema) for kind in (pa.float64(), pa.string()))
        self._required = [one.name for one in declared.fields if not (one.nullable and policy.missing == "null")]
        self._doubles = [one.name for one in declared.fields if type(one.dataType) is t.DoubleType]
        self._misses = 0
        self._skips = 0

    @staticmethod
    def of(declared: t.StructType, policy: Policy) -> WholeReader | None:
        """Return a reader for a schema of plain fields, structs and arrays; None for any other schema."""
        optional = policy.missing == "null"
        kinds = [_parsed_as(one.dataType, optional=optional) for one in declared.fields]
        known = [kind for kind in kinds if kind is not None]
        return WholeReader(declared, policy, known) if kinds and len(known) == len(kinds) else None

    def read(self, values: pa.Array) -> tuple[list[pa.Array], set[int]] | None:
        """Read payloads. A null payload, which is a tombstone, has null in all columns.

        Returns the columns, and the numbers of the rows that must be read one by one; None if all must.
        """
        if self._skips:
            self._skips -= 1
            return None
        given = values.drop_null() if values.null_count else values
        pieces, unread = self._pieces(given)
        if 2 * unread.sum() > len(unread) and self._learn(given):
            pieces, unread = self._pieces(given)
        self._misses = min(self._misses + 1, _MOST_MISSES) if 2 * unread.sum() > len(unread) else 0
        self._skips = 2**self._misses - 1
        if unread.all():
            return None
        columns = _joined(pieces)
        alone = np.zeros(len(values), bool)
        if values.null_count:
            there = values.is_valid().to_numpy(zero_copy_only=False)
            places = pa.array(np.cumsum(there) - 1, mask=~there)
            columns = {name: column.take(places) for name, column in columns.items()}
            alone[there] = unread
        else:
            alone |= unread
        for name in self._required:
            alone |= pc.and_(columns[name].is_null(), values.is_valid()).to_numpy(zero_copy_only=False)
        for name in self._doubles:
            alone |= _doubtful(columns[name])
        return list(columns.values()), set(np.flatnonzero(alone).tolist())

    def _learn(self, values: pa.Array) -> bool:
        """Learn which other fields these payloads have. Returns whether there are some that were not known."""
        for sample in (values[:_SAMPLE], values[:1], values[-1:]):
            if not self._learns:
                return False
            if any(one.count(b"[") + one.count(b"{") > _MOST_LEARNED for one in sample.to_pylist()):
                # Arrow would make a type as deep as the value, and dies of one that is too deep.
                continue
            try:
                # Arrow does not check the names. And not as the declared types: see _check_decimals.
                sample.cast(pa.string())
                found = _parsed(_lines(sample), None, "infer").schema
            except pa.ArrowInvalid:
                continue
            wide = _widened(pa.struct(self._schema), pa.struct(self._wide), pa.struct(found))
            if _number_of_fields(wide) - _number_of_fields(pa.struct(self._schema)) > _MOST_LEARNED:
                self._wide, self._learns = self._schema, False
                return False
            if wide != pa.struct(self._wide):
                self._wide = pa.schema(list(wide))
                return True
        return False

    def _pieces(self, values: pa.Array) -> tuple[list[_Piece], Any]:
        """Read payloads, none of which is null. What can't be read in one piece is halved.

        Returns a mask of the payloads that could not be read, too.
        """
        pieces: list[_Piece] = []
        left = [(0, len(values))]
        failed = 0
        while left:
            start, size = left.pop()
            found = None
            if failed < _TRIES:
                found = self._try(values.slice(start, size))
                failed += found is None
                # If neither the first payload nor the last one can be read, then probably none of them.
                if found is None and size > _PIECE and (failed > 1 or self._try(values[:1]) or self._try(values[-1:])):
                    half = size // 2
                    left += [(start + half, size - half), (start, half)]
                    continue
            pieces.append((size, found))
        return pieces, np.repeat([found is None for _, found in pieces], [size for size, _ in pieces])

    def _try(self, values: pa.Array) -> dict[str, pa.Array] | None:
        try:
            return self._read(values)
        except pa.ArrowInvalid:
            return None

    def _read(self, values: pa.Array) -> dict[str, pa.Array]:
        if values.nbytes > _MOST_BYTES or len(values) == 0:
            raise pa.ArrowInvalid("too much, or nothing")
        if not pc.all(pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}"))).as_py():
            raise pa.ArrowInvalid("not all of them are objects and nothing else")
        # The cast checks that it is UTF-8; the parser does not.
        texts = values.cast(pa.string())
        buffer = _lines(values)
        if self._numbers:
            # Before they are parsed as decimals, which a tiny number does not survive.
            self._check_decimals(buffer, texts)
        table = _parsed(buffer, self._wide, "error")
        if table.num_rows != len(values):
            raise pa.ArrowInvalid("not a row for each payload")
        if self._wide is not self._schema:
            _require_finite(table)
        return {
            one.name: _finished(table.column(one.name).combine_chunks(), one.dataType, inside=False)
            for one in self._declared.fields
        }

    def _check_decimals(self, buffer: pa.Buffer, payloads: pa.Array) -> None:
        """Raise pa.ArrowInvalid unless all decimals are numbers, none tiny, or all are texts in json_text's form."""
        try:
            numbers = _parsed(buffer, self._numbers, "ignore")
        except pa.ArrowInvalid:
            for texts in _all_leaves(_parsed(buffer, self._texts, "ignore")):
                _of_the_form(texts, _DECIMAL)
            return
        # Most batches have no such value, and looking through the payloads takes longer.
        small = any(pc.any(pc.less(pc.abs(leaf), _SMALL)).as_py() for leaf in _all_leaves(numbers))
        if small and pc.any(pc.match_substring_regex(payloads, _TINY)).as_py():
            raise pa.ArrowInvalid("a number with a large negative exponent")


def _joined(pieces: Sequence[_Piece]) -> dict[str, pa.Array]:
    """Return the columns of all pieces, one of which was read at least; null where one was not."""
    if len(pieces) == 1:
        return pieces[0][1] or {}
    kinds = next({name: column.type for name, column in found.items()} for _, found in pieces if found)
    return {
        name: pa.concat_arrays([found[name] if found else pa.nulls(size, kind) for size, found in pieces])
        for name, kind in kinds.items()
    }


def _lines(values: pa.Array) -> pa.Buffer:
    whole = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    return pc.binary_join(whole, b"\n")[0].as_buffer()


def _widened(declared: pa.DataType | None, old: pa.DataType | None, found: pa.DataType) -> pa.DataType:
    """Return a type with the fields that were found besides, in the plainest types: any number is a double, and a text
    that looks like a time is a text.

    declared  stays as it is; None where nothing is declared.
    old       the type until now, with its fields first.
    """
    if pa.types.is_struct(found) and (declared is None or pa.types.is_struct(declared)):
        known = {one.name: one.type for one in declared} if declared is not None else {}
        fields = {one.name: one.type for one in old} if old is not None and pa.types.is_struct(old) else {}
        for one in found:
            fields[one.name] = _widened(known.get(one.name), fields.get(one.name), one.type)
        return pa.struct(list(fields.items()))
    if pa.types.is_list(found) and (declared is None or pa.types.is_list(declared)):
        inside = old.value_type if old is not None and pa.types.is_list(old) else None
        return pa.list_(_widened(None if declared is None else declared.value_type, inside, found.value_type))
    if declared is not None or (old is not None and pa.types.is_null(found)):
        return old
    if pa.types.is_null(found) or pa.types.is_boolean(found):
        return found
    return pa.string() if pa.types.is_string(found) or pa.types.is_timestamp(found) else pa.float64()


def _number_of_fields(kind: pa.DataType) -> int:
    if pa.types.is_struct(kind):
        return sum(1 + _number_of_fields(one.type) for one in kind)
    return _number_of_fields(kind.value_type) if pa.types.is_list(kind) else 0


def _require_finite(table: pa.Table) -> None:
    """Raise pa.ArrowInvalid for NaN and Infinity, which Arrow accepts and JSON does not."""
    for leaf in _all_leaves(table):
        if pa.types.is_floating(leaf.type) and pc.all(pc.is_finite(leaf)).as_py() is False:
            raise pa.ArrowInvalid("a number that JSON does not have")


def _parsed(buffer: pa.Buffer, schema: pa.Schema | None, unexpected: Literal["error", "ignore", "infer"]) -> pa.Table:
    return arrow_json.read_json(
        pa.BufferReader(buffer),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=buffer.size + 1),
        parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
    )


def _decimals_as(kind: pa.DataType, fields: Iterable[pa.Field]) -> pa.Schema:
    """Return the fields that are decimals or have some inside, with another type in place of these."""

    def of(one: pa.DataType) -> pa.DataType | None:
        if pa.types.is_decimal(one):
            return kind
        if pa.types.is_list(one):
            element = of(one.value_type)
            return None if element is None else pa.list_(element)
        if pa.types.is_struct(one):
            inner = _decimals_as(kind, one)
            return pa.struct(inner) if len(inner) else None
        return None

    made = ((field.name, of(field.type)) for field in fields)
    return pa.schema([(name, found) for name, found in made if found is not None])


def _all_leaves(table: pa.Table) -> Iterator[pa.Array]:
    for column in table.columns:
        yield from _leaves(column.combine_chunks())


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    if pa.types.is_struct(column.type):
        for inner in column.flatten():
            yield from _leaves(inner)
    elif pa.types.is_list(column.type):
        yield from _leaves(column.flatten())
    else:
        yield column


def _parsed_as(kind: t.DataType, *, optional: bool) -> pa.DataType | None:
    """Return the type for Arrow's parser; None if payloads must be read by json_text.

    optional  whether fields may be missing. Inside other values missing fields are not checked, so all may be missing.
    """
    if isinstance(kind, t.ArrayType):
        element = _parsed_as(kind.elementType, optional=optional) if kind.containsNull else None
        return None if element is None else pa.list_(element)
    if isinstance(kind, t.StructType):
        fields = [(one.name, _parsed_as(one.dataType, optional=optional)) for one in kind.fields]
        loose = optional and fields and all(one.nullable for one in kind.fields)
        return pa.struct(fields) if loose and all(inner is not None for _, inner in fields) else None
    if isinstance(kind, t.DecimalType):
        # Arrow limits a number's digits before it adds zeros up to the scale, and does not notice that it overflows.
        return pa.decimal256(min(_NUMBER_DIGITS, _MOST_DIGITS - kind.scale), kind.scale)
    return _KINDS.get(type(kind))


def _finished(column: pa.Array, kind: t.DataType, *, inside: bool) -> pa.Array:
    """Convert a parsed column to its declared type. Raises pa.ArrowInvalid."""
    if isinstance(kind, t.ArrayType):
        items = _finished(column.flatten(), kind.elementType, inside=True)
        return pa.ListArray.from_arrays(offsets_of(column), items, mask=column.is_null())
    if isinstance(kind, t.StructType):
        # Behind the declared fields there may be others, which were learned.
        parts = zip(column.flatten(), kind.fields, strict=False)
        inner = [_finished(part, one.dataType, inside=True) for part, one in parts]
        return pa.StructArray.from_arrays(inner, names=kind.fieldNames(), mask=column.is_null())
    if isinstance(kind, t.DecimalType):
        return column.cast(pa.decimal128(kind.precision, kind.scale))
    if inside and type(kind) is t.DoubleType and _doubtful(column).any():
        raise pa.ArrowInvalid("a double that may be another number")
    if type(kind) is t.TimestampType:
        return _of_the_form(column, _TIME).cast(pa.timestamp("us", "UTC"))
    return _of_the_form(column, _DAY).cast(pa.date32()) if type(kind) is t.DateType else column


def _doubtful(column: pa.Array) -> Any:
    """Return a mask of the doubles that may have replaced another number."""
    # The negation includes NaN and Infinity, which Arrow accepts and JSON does not. -0 is doubtful too: as -0.0 it
    # keeps its sign, as -0 it is the integer 0.
    numbers = pc.fill_null(column, 1.0).to_numpy(zero_copy_only=False)
    return ~(np.abs(numbers) < _WHOLE_DOUBLE) | (np.signbit(numbers) & (numbers == 0))


def _of_the_form(texts: pa.Array, pattern: str) -> pa.Array:
    """Return the texts. Raises pa.ArrowInvalid unless all are in the common form."""
    if pc.all(pc.match_substring_regex(texts, pattern)).as_py() is False:
        raise pa.ArrowInvalid("not all of the common form")
    return texts
