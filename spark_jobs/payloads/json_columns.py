"""Read many JSON payloads at once, column by column: the same result as one by one, in a fraction of the time.

The checks here ensure that reading a payload by itself would give the same values. Where they can't, the payload is
read by itself, and only that reader reports problems.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, TypeAlias

import orjson
import pyarrow as pa
from pyspark.sql import types as t

from spark_jobs.payloads import json_text as json_payload
from spark_jobs.payloads import json_whole
from spark_jobs.payloads.json_text import HUGE, WHOLE, Convert
from spark_jobs.payloads.json_whole import WHOLE_DOUBLE, Finish, WholeReader
from spark_jobs.payloads.reading import Policy, Problem

_NOTHING: Final[dict[str, Any]] = {}
# A decimal number of up to 15 digits survives the conversion to a double: repr() returns the same digits.
_DIGITS: Final = bytes(ord("0") if chr(byte) in "0123456789." else ord(" ") for byte in range(256))
_LONG: Final = b"0" * 16
# Matches from the first digit only: starting at every digit takes quadratic time for a long run of digits.
_TOO_LONG: Final = re.compile(rb"\d{16}[.eE]|(?<!\d)(?=[\d.]{17})\d+\.\d")
_EXPONENT: Final = re.compile(rb"[0-9.][eE][-+0-9]")


@dataclass(slots=True)
class _Batch:
    """Payloads, their parsed objects, and the numbers of those that must be read by themselves."""

    values: Sequence[bytes | None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    alone: set[int] = field(default_factory=set)

    def parse(self) -> None:
        """Parse the payloads into ``rows``, with an empty row for a tombstone and for anything but an object."""
        for number, value in enumerate(self.values):
            row: Any = _NOTHING
            if value is not None:
                try:
                    row = orjson.loads(value)
                except orjson.JSONDecodeError:
                    self.alone.add(number)
                if type(row) is not dict:
                    row = _NOTHING
                    self.alone.add(number)
            self.rows.append(row)

    def values_of(self, name: str) -> list[Any]:
        """Return the values of a field."""
        return [row.get(name) for row in self.rows]


Column: TypeAlias = "list[Any] | pa.Array"
Extract: TypeAlias = Callable[[_Batch], Column]
"""Returns the values of a column, and adds to the rows that must be read by themselves."""


class JsonReader:
    """Reads payloads by a declared schema, one by one or ``many``. Raises JobError like json_text.reader."""

    def __init__(self, declared: t.StructType, policy: Policy) -> None:
        self._one = json_payload.reader(declared, policy)
        self._whole = WholeReader.of(declared, policy)
        self._extractors = [_extractor(one, policy) for one in declared.fields]
        self._decimals = any(isinstance(one.dataType, t.DecimalType) for one in declared.fields)
        nested = [one.dataType for one in declared.fields if _is_nested(one.dataType)]
        self._nested = bool(nested)
        # Decimals inside of other values can't be checked here.
        self._in_reach = not any(map(json_payload.has_decimal, nested))
        self._known = frozenset(declared.fieldNames()) if policy.unknown == "dead-letter" else None

    def __call__(self, value: bytes, header: bytes | None) -> Sequence[Any]:
        """Read one payload. Raises Problem."""
        return self._one(value, header)

    def many(self, payloads: pa.Array) -> tuple[Sequence[Column], set[int]]:
        """Read payloads. Null, for a tombstone, gives null in all columns.

        Returns the columns, and the numbers of the rows that must be read one by one, whose values are undefined.
        """
        read = None if self._whole is None else self._whole.read(payloads)
        if read is not None:
            return read
        values = payloads.to_pylist()
        batch = _Batch(values)
        if self._in_reach:
            batch.parse()
            self._add_doubtful(batch)
            columns = [extract(batch) for extract in self._extractors]
        else:
            batch.alone.update(range(len(values)))
            columns = [[None] * len(values) for _ in self._extractors]
        batch.alone.difference_update([number for number, value in enumerate(values) if value is None])
        return columns, batch.alone

    def _add_doubtful(self, batch: _Batch) -> None:
        """Add the rows for which the parser may have returned another value than the payload has."""
        for number, (value, row) in enumerate(zip(batch.values, batch.rows, strict=True)):
            if value is None:
                continue
            if value.count(b":") != len(row) and json_payload.may_repeat(value, row):
                batch.alone.add(number)
            if self._known is not None and not self._known.issuperset(row):
                batch.alone.add(number)
            # The cheaper check comes first.
            if self._decimals and _LONG in value.translate(_DIGITS) and _TOO_LONG.search(value):
                batch.alone.add(number)
            # Integers of more than 64 bits are parsed as doubles; at the top level the check of the column finds them.
            if self._nested and json_payload.look(row)[1]:
                batch.alone.add(number)


def _is_nested(kind: t.DataType) -> bool:
    return isinstance(kind, t.StructType | t.ArrayType | t.MapType)


def _extractor(declared: t.StructField, policy: Policy) -> Extract:
    """Return the function that extracts a field's values from many rows."""
    name, kind = declared.name, declared.dataType
    # A missing field and a null field look the same here.
    optional = declared.nullable and policy.missing == "null"
    plain = _plain(kind)
    if plain is not None:
        allowed, fits = plain
        return _checked(name, allowed | {type(None)} if optional else allowed, fits)
    each = _one_by_one(name, json_payload.slot_of(declared, policy), optional=optional)
    if isinstance(kind, t.DecimalType):
        return _decimals(name, kind, each, optional=optional)
    if isinstance(kind, t.TimestampType):
        return _in_common_form(name, json_whole.times, each, optional=optional)
    if isinstance(kind, t.DateType):
        return _in_common_form(name, json_whole.days, each, optional=optional)
    return each


def _plain(kind: t.DataType) -> tuple[frozenset[type], Callable[[Any], bool] | None] | None:
    """Return the Python types of this kind's values and a further check; None if values must be converted."""
    for whole, (_, bits) in WHOLE.items():
        if isinstance(kind, whole):
            return frozenset({int}), _within(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if type(kind) is t.StringType:
        return frozenset({str}), None
    if isinstance(kind, t.BooleanType):
        return frozenset({bool}), None
    if isinstance(kind, t.DoubleType):
        return frozenset({int, float}), _is_exact
    return None


def _within(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: value is None or least <= value <= most


def _is_exact(value: Any) -> bool:
    if type(value) is int:
        return -WHOLE_DOUBLE <= value <= WHOLE_DOUBLE
    return value is None or -HUGE < value < HUGE


def _checked(name: str, allowed: frozenset[type], fits: Callable[[Any], bool] | None) -> Extract:
    """Return a function for values that need no conversion."""

    def extract(batch: _Batch) -> Column:
        column = batch.values_of(name)
        if not allowed.issuperset(map(type, column)):
            for number, value in enumerate(column):
                if type(value) not in allowed:
                    batch.alone.add(number)
                    column[number] = None
        if fits is not None and not all(map(fits, column)):
            for number, value in enumerate(column):
                if not fits(value):
                    batch.alone.add(number)
                    column[number] = None
        return column

    return extract


def _decimals(name: str, kind: t.DecimalType, each: Extract, *, optional: bool) -> Extract:
    """Return a function for decimals that are all numbers; it uses ``each`` if some are text or do not fit."""
    arrow = pa.decimal128(kind.precision, kind.scale)
    # Beyond these limits Arrow's cast from text silently wraps around or gives zero.
    least, limit = 10.0**-kind.scale, 10.0 ** (kind.precision - kind.scale)

    def extract(batch: _Batch) -> Column:
        column = batch.values_of(name)
        for number, value in enumerate(column):
            if type(value) is float and not (value and -HUGE < value < HUGE) and _altered(value, batch.values[number]):
                batch.alone.add(number)
        if not {float, int, type(None)}.issuperset(map(type, column)) or not (optional or None not in column):
            return each(batch)
        if not all(not value or least <= abs(value) < limit for value in column):
            return each(batch)
        try:
            return pa.array([None if value is None else repr(value) for value in column], pa.string()).cast(arrow)
        except pa.ArrowInvalid:
            return each(batch)

    return extract


def _altered(value: float, payload: bytes | None) -> bool:
    """Return whether a double may have replaced another number: an integer of more than 64 bits, or a tiny one."""
    return bool(value) or _EXPONENT.search(payload or b"") is not None


def _in_common_form(name: str, whole: Finish, each: Extract, *, optional: bool) -> Extract:
    """Return a function for times or dates that are all in the common form; it uses ``each`` otherwise."""

    def extract(batch: _Batch) -> Column:
        column = batch.values_of(name)
        if not {str, type(None)}.issuperset(map(type, column)) or not (optional or None not in column):
            return each(batch)
        texts = pa.array(column, pa.string())
        try:
            return whole(texts)
        except pa.ArrowInvalid:
            return each(batch)

    return extract


def _one_by_one(name: str, convert: Convert, *, optional: bool) -> Extract:
    """Return a function that converts values one by one."""

    def extract(batch: _Batch) -> Column:
        column: list[Any] = []
        for number, row in enumerate(batch.rows):
            value = given = row.get(name)
            if type(given) is float:
                # Needed by decimals; for floats it makes no difference.
                value = Decimal(repr(given)) if -HUGE < given < HUGE else None
            if value is not None:
                try:
                    value = convert(value)
                except Problem:
                    value = None
            if value is None and not (optional and given is None):
                batch.alone.add(number)
            column.append(value)
        return column

    return extract
