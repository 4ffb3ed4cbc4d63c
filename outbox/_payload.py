"""Payloads: encoding a service's objects for the row, and the size that the database will compute for it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import Enum
from typing import Any, Final, NamedTuple
from uuid import UUID

import orjson

from outbox.errors import EventTooLarge, PayloadError
from outbox.event import BYTES_CONTENT_TYPE, JSON_CONTENT_TYPE, Event

_JSON_TYPE: Final = re.compile(r"application/json(\s*;.*)?|[a-z]+/[a-z0-9.!#$&^_-]+\+json(\s*;.*)?", re.IGNORECASE)
# A number like 1e300, which jsonb spells out in full. A match inside text only makes the estimate larger.
_EXPONENT: Final = re.compile(rb"\de[+-]?\d")
_LONGEST_NUMBER: Final = 330
_MOST_GROWTH: Final = 2 + _LONGEST_NUMBER // 3
"""How many times as long JSON can get in ``largest_size``: a space for each byte, and a number for each three."""
_TIME_WITH_OFFSET: Final = re.compile(rb'"\d{4}-\d\d-\d\dT[\d:.]+[+-]\d\d:\d\d"')
_MOST_ZEROS: Final = 40
"""How many a decimal may get in place of its exponent: 1E+1000000 would get a million."""
# By default orjson writes all attributes of a dataclass instance, including cached properties; we write its fields.
_OPTIONS: Final = orjson.OPT_PASSTHROUGH_DATACLASS
_KEYS: Final = "the keys of a JSON object are text (str itself, nothing derived from it)"
_WITHOUT_FLOATS: Final = frozenset({str, int, bool, type(None), Decimal, UUID, dt.datetime, dt.date, dt.time})


class Encoded(NamedTuple):
    """A payload as the row stores it: at most one of ``json`` and ``raw``; the content type if it must be stored."""

    json: bytes | None
    raw: bytes | None
    content_type: str | None


def encode(event: Event) -> Encoded:
    """Return the event's payload as the row will store it.

    Raises PayloadError when the payload can't be stored exactly; where possible, the error names the place inside it.
    """
    payload, content_type = event.payload, event.content_type
    if payload is None:
        return Encoded(None, None, content_type)
    if isinstance(payload, bytes | bytearray | memoryview):
        return Encoded(None, bytes(payload), content_type or BYTES_CONTENT_TYPE)
    if content_type is not None and not _JSON_TYPE.fullmatch(content_type):
        raise PayloadError("content_type", f"{content_type!r} is not a JSON type; give the encoded payload as bytes")
    return Encoded(to_json(payload), None, None if content_type == JSON_CONTENT_TYPE else content_type)


def check_size(aggregate_id: str, payload: Encoded, headers: bytes | None, limit: int) -> None:
    """Raise EventTooLarge if payload, key and headers (as JSON) together exceed the limit.

    Uses the larger of two sizes: the one that the table's CHECK computes, and the bytes as given, which may contain
    spaces that jsonb drops. Computes it exactly only near the limit.
    """
    fixed = len(aggregate_id.encode()) + len(payload.raw or b"")
    printed = [text for text in (payload.json, headers) if text is not None]
    if fixed + _MOST_GROWTH * sum(map(len, printed)) <= limit:
        return
    if fixed + sum(map(largest_size, printed)) <= limit:
        return
    size = fixed + sum(max(len(text), exact_size(text)) for text in printed)
    if size > limit:
        raise EventTooLarge(size, limit)


def largest_size(encoded: bytes) -> int:
    """Return an upper bound of the bytes of jsonb's text form of this JSON; fast.

    jsonb stores JSON parsed and prints it with a space after every comma and colon, and numbers without exponent.
    """
    spaces = encoded.count(b",") + encoded.count(b":")
    return len(encoded) + spaces + _LONGEST_NUMBER * len(_EXPONENT.findall(encoded))


def exact_size(encoded: bytes) -> int:
    """Return the bytes of jsonb's text form of this JSON, which the table's CHECK counts; slow."""
    return _jsonb_length(orjson.loads(encoded))


def to_json(payload: object) -> bytes:
    """Return a payload as JSON. Raises PayloadError; see ``encode``."""
    if _is_row(payload):
        raise PayloadError("payload", _row_problem(payload))
    if is_pydantic(payload):
        try:
            payload = _dump_model(payload)
        except (TypeError, ValueError) as error:
            raise PayloadError("payload", _refused_by_pydantic(payload, error)) from error
    if not isinstance(payload, dict | list) and not is_dataclass(payload):
        raise PayloadError(
            "payload",
            f"a {type(payload).__name__} is neither a JSON object nor a list; give a dict, list, dataclass, pydantic "
            "model, bytes, or None for a tombstone",
        )
    try:
        encoded = orjson.dumps(payload, default=_default, option=_OPTIONS)
        if _TIME_WITH_OFFSET.search(encoded) and _any_not_utc(payload):
            # orjson rounds offsets to minutes, and with them the time.
            encoded = orjson.dumps(payload, default=_with_times, option=_OPTIONS | orjson.OPT_PASSTHROUGH_DATETIME)
    except TypeError as error:
        # orjson reports what, but not where.
        where, problem = _find(payload, _unserializable) or ("payload", _orjson_problem(error))
        raise PayloadError(where, problem) from error
    # orjson silently writes null for NaN and Infinity; and jsonb can't store a NUL.
    if b"null" in encoded and _any_not_finite(payload) and (found := _find(payload, _not_finite)):
        raise PayloadError(*found)
    if b"\\u0000" in encoded and (found := _find(payload, _holds_nul)):
        raise PayloadError(*found)
    return encoded


def _any_not_utc(payload: object) -> bool:
    """Return whether there may be a time of another zone. Here orjson writes Z for UTC, in a tenth of a walk's time."""
    encoded = orjson.dumps(payload, default=_default, option=_OPTIONS | orjson.OPT_UTC_Z)
    return _TIME_WITH_OFFSET.search(encoded) is not None


def _default(value: object) -> object:
    if isinstance(value, Decimal) and value.is_finite():
        text = str(value)
        return format(value, "f") if "E" in text and abs(value.adjusted()) <= _MOST_ZEROS else text
    if _is_row(value):
        raise TypeError(_row_problem(value))
    if is_dataclass(value):
        return {name: getattr(value, name) for name in fields(value)}
    if is_pydantic(value):
        return _dump_model(value)
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _with_times(value: object) -> object:
    """As ``_default``, and for times too: as orjson writes them, but in UTC if the offset has seconds."""
    if isinstance(value, dt.datetime):
        offset = value.utcoffset() or dt.timedelta()
        return (value.astimezone(dt.UTC) if offset % dt.timedelta(minutes=1) else value).isoformat()
    return value.isoformat() if isinstance(value, dt.date | dt.time) else _default(value)


def _is_row(value: object) -> bool:
    # SQLAlchemy's own mark of a mapped class, however it was mapped. SQLModel's are pydantic models as well.
    return hasattr(type(value), "__mapper__")


def _row_problem(value: object) -> str:
    return (
        f"{type(value).__name__} is a row that SQLAlchemy maps: all of its columns would be published, later ones too; "
        "give a dict, dataclass or pydantic model with the fields for consumers"
    )


def is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields(value: Any) -> Iterator[str]:
    """Yield the names of a dataclass's public fields."""
    return (part.name for part in dataclasses.fields(value) if not part.name.startswith("_"))


def is_pydantic(value: object) -> bool:
    # A pydantic model's instance exists only if pydantic has been imported. Another thread may be importing it.
    model = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    return model is not None and isinstance(value, model)


def _dump_model(model: Any) -> object:
    return model.model_dump(mode="json")


def _refused_by_pydantic(model: object, error: Exception) -> str:
    return f"the pydantic model {type(model).__name__} can't be written as JSON: {error}"


def _find(payload: object, problem: Callable[[object], str | None]) -> tuple[str, str] | None:
    """Walk the payload and return the path and the problem of the first value that has one."""
    stack: list[tuple[str, object, tuple[object, ...]]] = [("payload", payload, ())]
    while stack:
        path, value, above = stack.pop()
        if any(value is container for container in above):
            return path, "contains itself"
        found = problem(value)
        if found is not None:
            return path, found
        if isinstance(value, dict):
            for key in value:
                found = problem(key) if type(key) is str else f"is a {type(key).__name__}; {_KEYS}"
                if found is not None:
                    return path, f"the key {key!r} {found}"
        inside = reversed(list(_inside(path, value)))
        stack.extend((where, item, (*above, value)) for where, item in inside)
    return None


def _inside(path: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield the values that orjson descends into, each with its path."""
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, Enum):
        yield path, value.value
    elif is_dataclass(value):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in fields(value))
    elif is_pydantic(value):
        yield path, _dump_model(value)


def _any_not_finite(value: Any) -> bool:
    """Return whether ``_find`` would find such a number, ten times as fast: nulls in a payload are common."""
    kind = type(value)
    if kind in _WITHOUT_FLOATS:
        return False
    if kind is dict:
        return any(map(_any_not_finite, value.values()))
    if kind is list:
        return any(map(_any_not_finite, value))
    if isinstance(value, float):
        return not math.isfinite(value)
    return any(_any_not_finite(item) for _, item in _inside("", value))


def _not_finite(value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which JSON can't represent"
    return None


def _holds_nul(value: object) -> str | None:
    if isinstance(value, str) and "\0" in value:
        return "contains a NUL character, which Postgres can't store in jsonb"
    return None


def _unserializable(value: object) -> str | None:  # noqa: C901  one case for each type
    """Return the problem of this value itself, ignoring the values inside it."""
    if isinstance(value, dict | list | Enum) or type(value) is tuple:
        return None
    if _is_row(value):
        return _row_problem(value)
    if is_dataclass(value):
        missing = [name for name in fields(value) if not hasattr(value, name)]
        return f"the field {missing[0]} of {type(value).__name__} has no value" if missing else None
    if is_pydantic(value):
        try:
            _dump_model(value)
        except (TypeError, ValueError) as error:
            return _refused_by_pydantic(value, error)
        return None
    if isinstance(value, Decimal):
        return None if value.is_finite() else f"is {value}, which JSON can't represent"
    try:
        orjson.dumps(value)
        if isinstance(value, dt.datetime):
            _with_times(value)
    except OverflowError:
        return f"is {value}: its offset has seconds, and as a time in UTC it can't be represented"
    except TypeError as error:
        if isinstance(value, int):
            return "is an integer of more than 64 bits; give it as text"
        if "surrogates" in str(error):
            return "contains a lone surrogate, which UTF-8 can't encode"
        if "not JSON serializable" in str(error):
            return f"is a {type(value).__name__}, which JSON can't represent"
        return _orjson_problem(error)
    return None


def _orjson_problem(error: TypeError) -> str:
    if "recursion" in str(error).lower():
        return "is nested too deeply; orjson takes about 250 levels"
    return f"can't be written as JSON: {error}"


def _jsonb_length(value: Any) -> int:
    """Return the bytes of jsonb's text form."""
    if isinstance(value, dict):
        inside = sum(_jsonb_length(key) + 2 + _jsonb_length(item) for key, item in value.items())
        return 2 + inside + 2 * max(0, len(value) - 1)
    if isinstance(value, list):
        return 2 + sum(map(_jsonb_length, value)) + 2 * max(0, len(value) - 1)
    if isinstance(value, float):
        # Postgres's numeric has no negative zero.
        return len(format(Decimal(repr(value or 0.0)), "f"))
    return len(json.dumps(value, ensure_ascii=False).encode())
