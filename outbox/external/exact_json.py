"""JSON whose numbers are not rounded: requests and responses of calls are amounts of money.

A number with a fraction is a float if that has exactly its value, as 12.34 has by its shortest digits, else a Decimal.
So ``json.dumps`` of code that does not expect one fails, instead of writing another amount.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb, set_json_loads

from outbox.consumer.errors import LONGEST_ERROR

_MOST_ZEROS = 400
"""How many an exponent may stand for: jsonb spells numbers out, and 1e100000 would get long."""
_MOST_LEVELS = 500
"""Of a response that is stored. Python's parser and writer recurse, and may be deeper in the stack the next time."""
_CONTAINERS = (dict, list, tuple)


@dataclass(frozen=True, slots=True)
class TooDeep:
    """A stored request that is nested too deep for Python's parser, as its ``text``. ``dumps`` writes it unchanged."""

    text: str


def loads(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, and RecursionError for what is nested too deep."""
    return json.loads(text, parse_float=_fraction, parse_int=_whole)


def dumps(value: object, default: Callable[[object], object] | None = None, *, ensure_ascii: bool = True) -> str:
    """Return a value as JSON, with Decimals as numbers. Raises TypeError or ValueError for what JSON can't represent.

    default  as that of ``json.dumps``; also gets the Decimals that jsonb would refuse or write very long.
    """
    texts: list[str] = []
    mark = uuid.uuid4().hex

    def encode(one: object) -> object:
        if isinstance(one, TooDeep) or (isinstance(one, Decimal) and _fits(one)):
            texts.append(one.text if isinstance(one, TooDeep) else str(one))
            return f"{mark}{len(texts) - 1}"
        if default is None:
            raise TypeError(f"Object of type {type(one).__name__} is not JSON serializable")
        return default(one)

    text = json.dumps(value, default=encode, allow_nan=False, ensure_ascii=ensure_ascii)
    return re.sub(f'"{mark}([0-9]+)"', lambda found: texts[int(found[1])], text) if texts else text


def cursor(connection: psycopg.Connection[Any]) -> psycopg.Cursor[dict[str, Any]]:
    """Return a cursor for rows of reservations: it rounds no number of a request or response."""
    rows = connection.cursor(row_factory=dict_row)
    set_json_loads(_loads_any, rows)
    return rows


def is_deep(value: object) -> bool:
    """Return whether a response is nested too deep to be stored."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        containers = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, _CONTAINERS))
        level = [item for container in containers for item in container if isinstance(item, _CONTAINERS)]
        if not level:
            return False
    return True


def jsonb(response: object) -> Jsonb:
    """Return a response as jsonb. What jsonb can't hold is stored as text: the confirmation matters more."""
    try:
        text = dumps(response, default=str, ensure_ascii=False)
        text.encode()
        # Not where an escaped backslash is followed by these letters.
        if r"\u0000" in text.replace(r"\\", ""):
            raise ValueError("jsonb holds no NUL")
        if is_deep(response):
            raise ValueError("nested too deep")
    except Exception:  # noqa: BLE001  also those of an object's own __str__
        text = json.dumps({"text": _shown(response)})
    return Jsonb(None, dumps=lambda _: text)


def _shown(response: object) -> str:
    try:
        return ascii(response)[:LONGEST_ERROR]
    except Exception:  # noqa: BLE001  of an object's own __repr__, or too deep for it
        return type(response).__name__


def _loads_any(text: str | bytes) -> Any:
    try:
        return loads(text)
    except RecursionError:
        # One such row must not end everyone who reads it.
        return TooDeep(text if isinstance(text, str) else text.decode())


def _fraction(text: str) -> float | Decimal:
    number = float(text)
    try:
        exact = Decimal(text)
    except ArithmeticError:
        # An exponent of more than 18 digits.
        return number
    # repr() of an infinity is a Decimal, too.
    return number if exact == Decimal(repr(number)) else exact


def _whole(text: str) -> int | Decimal:
    # Python refuses to convert longer ones to int.
    limit = sys.get_int_max_str_digits()
    return Decimal(text) if limit and len(text) > limit else int(text)


def _fits(number: Decimal) -> bool:
    """Return whether it is a number of jsonb, and not one whose exponent stands for many zeros."""
    exponent = number.as_tuple().exponent
    # Of an infinity or NaN, this is a letter.
    return (
        isinstance(exponent, int) and -16_383 <= exponent <= _MOST_ZEROS and -_MOST_ZEROS <= number.adjusted() < 131_072
    )
