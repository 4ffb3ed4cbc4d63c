"""Read JSON payloads by a declared schema, exactly: a value that does not fit its field is a problem.

Spark's ``from_json`` is not used, because it silently reads the first of several values, takes ``5`` for a text, rounds
decimals, and keeps the last of two fields with the same name.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from struct import pack
from typing import Any, Final, cast

import numpy as np
import orjson
from pyspark.sql import types as t

from outbox.consumer.errors import JobError
from spark_jobs.payloads.reading import Convert, Policy, Problem, Reader, Wrong, shown

_WHOLE: Final = {
    t.ByteType: ("tinyint", 8),
    t.ShortType: ("smallint", 16),
    t.IntegerType: ("int", 32),
    t.LongType: ("bigint", 64),
}
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIMESTAMP: Final = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d)(:\d\d)?(?:\.(\d+))?([Zz]|[+-]\d\d:?\d\d)?", re.ASCII)
# Python prints some decimals with an exponent: 0E-8, 1E+3.
_DECIMAL: Final = re.compile(r"-?\d{1,60}(?:\.\d{1,60})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
# Every field has one of these; so has a text with an escaped quote before a colon.
_FIELD: Final = re.compile(rb'"\s*:')
# Numbers that VARIANT may not represent exactly: with an exponent, or very long.
_DOUBTFUL: Final = re.compile(rb"[0-9][eE]|[0-9.]{19}")
# Decimals that a double may not represent: repr() of a double returns the same digits for up to 15 of them, and a tiny
# number may have become 0. The first pattern matches from the first digit only: starting at every digit takes quadratic
# time for a long run of digits; and the cheaper check for a run comes before it.
_DIGITS: Final = bytes(ord("0") if chr(byte) in "0123456789." else ord(" ") for byte in range(256))
_LONG: Final = b"0" * 16
_LONG_FRACTION: Final = re.compile(rb"\d{16}[.eE]|(?<!\d)(?=[\d.]{17})\d+\.\d")
_EXPONENT: Final = re.compile(rb"[0-9.][eE][-+0-9]")
# Integers that 64 bits can't hold: they become doubles. The least of the negative ones has 19 digits.
_LONG_WHOLE: Final = re.compile(rb"\d{20}|-\d{19}")
# Stands for numbers that are too small for Decimal; as a double it is 0.
_TINIEST: Final = Decimal("1e-999999999999999999")
_WIDE: Final = Context(prec=120)


def reader(declared: t.StructType, policy: Policy) -> Reader:
    """Return the reader for a declared schema. Raises JobError for a type that has no counterpart in JSON."""
    convert = _fields(declared, "", policy)
    names = declared.fieldNames()
    exact = _has_decimal(declared)

    def read(value: bytes, header: bytes | None) -> Sequence[Any]:  # noqa: ARG001
        row = convert(parse(value, exact=exact))
        return [row[name] for name in names]

    return read


def variant_reader(value: bytes, header: bytes | None) -> Sequence[Any]:  # noqa: ARG001
    """Return the payload's text, which Spark then parses as VARIANT. Raises Problem."""
    parse(value, exact=False)
    if _DOUBTFUL.search(value):
        try:
            json.loads(value, parse_float=_check_exact, parse_int=_check_exact)
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise Problem("the payload is too deep or has a number that is too long") from error
    return [value.decode()]


def _check_exact(text: str) -> None:
    """Raise Wrong for a number that VARIANT, with decimals of 38 digits and doubles, would round."""
    plain = text.lstrip("-")
    whole, _, fraction = plain.partition(".")
    if "e" not in plain.lower() and len(whole.lstrip("0")) + len(fraction) <= 38:
        return
    number = float(text)
    if math.isinf(number) or Decimal(repr(number)) != Decimal(text):
        raise Wrong("the payload has a number of more digits than VARIANT can hold")


def parse(value: bytes, *, exact: bool) -> dict[str, Any]:
    """Parse one JSON object. Raises Problem.

    orjson is fast and strict: no NaN, nothing after the object, only UTF-8. But it keeps the last of two fields with
    the same name and rounds to doubles, so payloads that it may have altered are parsed again by the standard library.

    exact  numbers with a fraction are returned as Decimal, or as doubles whose repr() has the same digits.
    """
    try:
        parsed: Any = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise Problem("the payload is not JSON") from error
    if type(parsed) is not dict:
        raise Problem("the payload is not a JSON object")
    if _may_differ(value, parsed, exact=exact):
        try:
            parsed = json.loads(value, object_pairs_hook=_with_unique_names, parse_float=_decimal if exact else float)
        except (ValueError, RecursionError) as error:
            raise Problem("the payload is too deep or has a number that is too long") from error
    return cast("dict[str, Any]", parsed)


def _may_differ(value: bytes, parsed: dict[str, Any], *, exact: bool) -> bool:
    """Return whether orjson may have returned something else than what the payload says."""
    # The cheaper checks come first. Texts may have colons, too.
    colons = value.count(b":")
    if colons != len(parsed) and colons != (fields := _count_fields(parsed)) and len(_FIELD.findall(value)) != fields:
        # If two fields have the same name, only the last one is there.
        return True
    if exact and _EXPONENT.search(value):
        return True
    long = _LONG in value.translate(_DIGITS)
    return long and bool(_LONG_WHOLE.search(value) or (exact and _LONG_FRACTION.search(value)))


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError:
        return _TINIEST.copy_sign(Decimal(float(text)))


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        # Not count() of each name, which takes minutes for an object with very many names.
        times = Counter(name for name, _ in pairs)
        twice = next(name for name, _ in pairs if times[name] > 1)
        raise Problem(f"{shown(twice)}: stands twice in one object")
    return parsed


def _count_fields(parsed: dict[str, Any]) -> int:
    """Return the number of fields in all objects."""
    total = 0
    stack: list[Any] = [parsed]
    while stack:
        item = stack.pop()
        if type(item) is dict:
            total += len(item)
            item = item.values()
        for inner in item:
            kind = type(inner)
            if kind is dict or kind is list:
                stack.append(inner)
    return total


def _has_decimal(kind: t.DataType) -> bool:
    if isinstance(kind, t.StructType):
        return any(_has_decimal(field.dataType) for field in kind.fields)
    if isinstance(kind, t.ArrayType):
        return _has_decimal(kind.elementType)
    if isinstance(kind, t.MapType):
        return _has_decimal(kind.valueType)
    return isinstance(kind, t.DecimalType)


def _fields(declared: t.StructType, path: str, policy: Policy) -> Convert:
    """Return the function from a JSON object to a dict with all declared fields."""
    lowered = [name.lower() for name in declared.fieldNames()]
    for name in declared.fieldNames():
        if lowered.count(name.lower()) > 1:
            raise JobError(f"schema: field {path}{name} is there twice; Spark does not tell upper from lower case")
    known = frozenset(declared.fieldNames())
    slots = [
        (
            field.name,
            _slot(field.dataType, field.nullable, path + field.name, policy),
            field.nullable and policy.missing == "null",
        )
        for field in declared.fields
    ]
    strict = policy.unknown == "dead-letter"

    def convert(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise Wrong(f"field {path.rstrip('.')}: is not an object")
        row = {}
        for name, slot, optional in slots:
            if name in value:
                row[name] = slot(value[name])
            elif optional:
                row[name] = None
            else:
                raise Problem(f"field {path}{name}: is missing")
        if strict and not known.issuperset(value):
            extra = sorted(set(value) - known)[0]
            raise Problem(f"{shown(extra)}{f' in {path[:-1]}' if path else ''}: is not declared")
        return row

    return convert


def _slot(kind: t.DataType, nullable: bool, path: str, policy: Policy) -> Convert:
    """Return the function that converts values, including NULL, by the policy for wrong ones. Raises JobError."""
    convert = _converter(kind, path, policy)

    def slot(value: Any) -> Any:
        if value is None:
            if nullable:
                return None
            raise Problem(f"field {path}: is null")
        return convert(value)

    def forgiving(value: Any) -> Any:
        try:
            return slot(value)
        except Wrong as wrong:
            if nullable:
                return None
            # No longer Wrong: otherwise an outer field would become NULL and hide the violation of NOT NULL.
            raise Problem(str(wrong)) from wrong

    return forgiving if policy.wrong == "null" else slot


def _converter(kind: t.DataType, path: str, policy: Policy) -> Convert:  # noqa: C901  one case for each type
    for whole, (name, bits) in _WHOLE.items():
        if isinstance(kind, whole):
            return _whole(path, name, bits)
    # Not isinstance: subclasses may have limits that would have to be checked.
    if type(kind) is t.StringType:
        return _of_type(str, f"field {path}: is not a text")
    if isinstance(kind, t.BooleanType):
        return _of_type(bool, f"field {path}: is neither true nor false")
    if isinstance(kind, (t.DoubleType, t.FloatType)):
        return _floating(path, single=isinstance(kind, t.FloatType))
    if isinstance(kind, t.DecimalType):
        return _fixed(path, kind.precision, kind.scale)
    if isinstance(kind, t.DateType):
        return _day(path)
    if isinstance(kind, t.TimestampType):
        return _time(path, zoned=True)
    if isinstance(kind, t.TimestampNTZType):
        return _time(path, zoned=False)
    if isinstance(kind, t.BinaryType):
        return _bytes(path)
    if isinstance(kind, t.StructType):
        return _fields(kind, f"{path}.", policy)
    if isinstance(kind, t.ArrayType):
        element = _slot(kind.elementType, kind.containsNull, f"{path}[]", policy)

        def listed(value: Any) -> list[Any]:
            if type(value) is list:
                return [element(item) for item in value]
            raise Wrong(f"field {path}: is not an array")

        return listed
    if isinstance(kind, t.MapType) and type(kind.keyType) is t.StringType:
        inner = _slot(kind.valueType, kind.valueContainsNull, f"{path}{{}}", policy)

        def mapped(value: Any) -> list[tuple[str, Any]]:
            if type(value) is dict:
                return [(name, inner(item)) for name, item in value.items()]
            raise Wrong(f"field {path}: is not an object")

        return mapped
    raise JobError(
        f"schema: field {path}: JSON can't be read as {kind.simpleString()}; declare another type and cast it in the "
        'transform, or declare the whole payload with Json("variant")'
    )


def _of_type(expected: type, wrong: str) -> Convert:
    def same(value: Any) -> Any:
        if type(value) is expected:
            return value
        raise Wrong(wrong)

    return same


def _whole(path: str, name: str, bits: int) -> Convert:
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def whole(value: Any) -> int:
        # 1.0, 1e3, "1" and true are not accepted as integers.
        if type(value) is not int:
            raise Wrong(f"field {path}: is not a whole number that fits {name}")
        if not least <= value <= most:
            raise Wrong(f"field {path}: does not fit {name}")
        return value

    return whole


def _floating(path: str, *, single: bool) -> Convert:
    def floating(value: Any) -> float:
        if type(value) is int:
            try:
                number = float(value)
            except OverflowError as error:
                raise Wrong(f"field {path}: is too large") from error
        elif type(value) is float or isinstance(value, Decimal):
            number = float(value)
        else:
            raise Wrong(f"field {path}: is not a number")
        if single and math.isfinite(number):
            try:
                pack("<f", number)
            except OverflowError as error:
                raise Wrong(f"field {path}: is too large") from error
        if math.isinf(number):
            raise Wrong(f"field {path}: is too large")
        if type(value) is int:
            held = np.float32(number) if single else number
            # jsonb prints 6.02e23 as a whole number: the double's shortest digits, which are not the exact ones.
            if int(held) != value and Decimal(str(held)) != value:
                raise Wrong(f"field {path}: is a whole number with more digits than it can hold")
        return number

    return floating


def decimal_that_fits(path: str, value: Decimal, precision: int, scale: int) -> Decimal:
    """Return the value with exactly ``scale`` digits after the point. Raises Wrong when it has more digits than fit."""
    if not value:
        return Decimal(0).scaleb(-scale)
    if value.adjusted() + 1 <= precision - scale:
        fitting = value.quantize(Decimal(1).scaleb(-scale), context=_WIDE)
        if fitting == value:
            return fitting
    raise Wrong(f"field {path}: does not fit decimal({precision},{scale})")


def _fixed(path: str, precision: int, scale: int) -> Convert:
    def fixed(value: Any) -> Decimal:
        if type(value) is int:
            number = Decimal(value)
        elif isinstance(value, Decimal):
            number = value
        elif type(value) is float:
            number = Decimal(repr(value))
        elif type(value) is str and _DECIMAL.fullmatch(value):
            # Amounts of money are often written as text, because many parsers read JSON numbers as doubles. Text is
            # exact.
            number = Decimal(value)
        else:
            raise Wrong(f"field {path}: is not a decimal number")
        return decimal_that_fits(path, number, precision, scale)

    return fixed


def _day(path: str) -> Convert:
    def day(value: Any) -> date:
        if type(value) is str and _DATE.fullmatch(value):
            try:
                return date.fromisoformat(value)
            except ValueError:
                pass
        raise Wrong(f"field {path}: must be a date such as 2026-01-31")

    return day


def _time(path: str, *, zoned: bool) -> Convert:
    form = "with an offset, such as 2026-01-31T12:00:00Z" if zoned else "without an offset, such as 2026-01-31T12:00:00"

    def time(value: Any) -> datetime:
        match = _TIMESTAMP.fullmatch(value) if type(value) is str else None
        if match is None or (match[5] is not None) != zoned or (match[4] is not None and match[3] is None):
            raise Wrong(f"field {path}: must be a time {form}")
        fraction = (match[4] or "").rstrip("0")
        if len(fraction) > 6:
            raise Wrong(f"field {path}: is finer than microseconds")
        offset = (match[5] or "").upper()
        try:
            moment = datetime.fromisoformat(
                f"{match[1]}T{match[2]}{match[3] or ':00'}.{fraction.ljust(6, '0')}{offset}"
            )
            return moment.astimezone(UTC) if zoned else moment
        except (ValueError, OverflowError) as error:
            raise Wrong(f"field {path}: must be a time {form}") from error

    return time


def _bytes(path: str) -> Convert:
    def decoded(value: Any) -> bytes:
        try:
            if type(value) is str:
                return base64.b64decode(value.encode(), validate=True)
        except ValueError:
            pass
        raise Wrong(f"field {path}: is not bytes in base64")

    return decoded
