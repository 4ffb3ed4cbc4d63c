"""Payloads: from what a service has in hand to what the row holds, and how large the database will find it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import orjson

from outbox.errors import PayloadError
from outbox.event import BYTES_CONTENT_TYPE, JSON_CONTENT_TYPE, Event

_JSON_TYPE: Final = re.compile(r"application/(json|[a-z0-9.!#$&^_-]+\+json)(\s*;.*)?", re.IGNORECASE)
# A number like 1e300, which jsonb spells out in full. Also found inside text: it only makes the estimate larger.
_EXPONENT: Final = re.compile(rb"\de[+-]?\d")
_LONGEST_NUMBER: Final = 330


def encode(event: Event) -> tuple[str | None, bytes | None, str | None]:
    """Give the row's ``payload`` (JSON text), ``payload_bytes``, and the content type if it has to be stored.

    Raises PayloadError when the payload has no faithful form; the error names the place inside it where it can.
    """
    payload, content_type = event.payload, event.content_type
    if payload is None:
        return None, None, content_type
    if isinstance(payload, bytes | bytearray | memoryview):
        return None, bytes(payload), content_type or BYTES_CONTENT_TYPE
    if content_type is not None and not _JSON_TYPE.fullmatch(content_type):
        raise PayloadError(
            "content_type", f"{content_type!r} does not go with a JSON payload; give the payload as bytes, encoded"
        )
    text = _to_json(payload).decode()
    return text, None, None if content_type == JSON_CONTENT_TYPE else content_type


def stored_size(json_text: str | None, raw: bytes | None, longest: int) -> int:
    """Give at least the number of bytes that the table's CHECK will count, exactly so when it is near ``longest``.

    jsonb is stored parsed and printed anew: a space after every comma and colon, numbers without exponent.
    """
    if json_text is None:
        return len(raw or b"")
    encoded = json_text.encode()
    size = len(encoded) + encoded.count(b",") + encoded.count(b":")
    size += _LONGEST_NUMBER * len(_EXPONENT.findall(encoded))
    return size if size <= longest else _jsonb_length(orjson.loads(encoded))


def _to_json(payload: object) -> bytes:
    model_dump = getattr(payload, "model_dump", None)
    if model_dump is not None and _is_pydantic(payload):
        payload = model_dump(mode="json")
    if not isinstance(payload, dict | list) and not (
        dataclasses.is_dataclass(payload) and not isinstance(payload, type)
    ):
        raise PayloadError(
            "payload",
            f"a {type(payload).__name__} is neither a JSON object nor a list; give a dict, list, dataclass, pydantic "
            "model, bytes, or None for a tombstone",
        )
    try:
        encoded = orjson.dumps(payload, default=_default)
    except PayloadError:
        raise
    except TypeError as error:
        # orjson says what, not where.
        where, problem = _find(payload, _unserializable) or ("payload", str(error))
        raise PayloadError(where, problem) from error
    # orjson writes null for NaN and Infinity without a word; and jsonb can't hold a NUL.
    if b"null" in encoded and (found := _find(payload, _not_finite)):
        raise PayloadError(*found)
    if b"\\u0000" in encoded and (found := _find(payload, _holds_nul)):
        raise PayloadError(*found)
    return encoded


def _default(value: object) -> object:
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise PayloadError("payload", f"holds {value}, which JSON has no form for")
        return str(value)
    if _is_pydantic(value):
        return value.model_dump(mode="json")  # type: ignore[attr-defined]
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _is_pydantic(value: object) -> bool:
    # An object of a pydantic model exists only where pydantic has been imported.
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(value, pydantic.BaseModel)


def _find(payload: object, problem: Callable[[object], str | None]) -> tuple[str, str] | None:
    """Walk the payload and give the path and the problem of the first value that has one."""
    stack: list[tuple[str, object, tuple[int, ...]]] = [("payload", payload, ())]
    while stack:
        path, value, above = stack.pop()
        if id(value) in above:
            return path, "holds itself"
        found = problem(value)
        if found is not None:
            return path, found
        inside: list[tuple[str, object]] = []
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = [(f"{path}.{part.name}", getattr(value, part.name)) for part in dataclasses.fields(value)]
        elif isinstance(value, dict):
            for key, item in value.items():
                found = problem(key) if isinstance(key, str) else _key_problem(key)
                if found is not None:
                    return path, f"the key {key!r} {found}"
                inside.append((f"{path}[{key!r}]", item))
        elif isinstance(value, list | tuple):
            inside = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        elif _is_pydantic(value):
            inside = [(path, value.model_dump(mode="json"))]  # type: ignore[attr-defined]
        stack.extend((where, item, (*above, id(value))) for where, item in reversed(inside))
    return None


def _key_problem(key: object) -> str:
    return f"is a {type(key).__name__}; the keys of a JSON object are text"


def _not_finite(value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which JSON has no form for"
    return None


def _holds_nul(value: object) -> str | None:
    return (
        "holds a NUL character, which Postgres can't store in jsonb"
        if isinstance(value, str) and "\0" in value
        else None
    )


def _unserializable(value: object) -> str | None:
    if isinstance(value, dict | list | tuple):
        return None
    try:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return None
        orjson.dumps(value, default=_default)
    except PayloadError as error:
        return error.problem
    except TypeError as error:
        text = str(error)
        if isinstance(value, int):
            return "is an integer of more than 64 bits; give it as text"
        if "surrogates" in text:
            return "holds a lone surrogate, which has no UTF-8 form"
        if "not JSON serializable" in text:
            return f"is a {type(value).__name__}, which JSON has no form for"
        return text
    return None


def _jsonb_length(value: Any) -> int:
    """Count the bytes of jsonb's text form."""
    if isinstance(value, dict):
        inside = sum(_jsonb_length(key) + 2 + _jsonb_length(item) for key, item in value.items())
        return 2 + inside + 2 * max(0, len(value) - 1)
    if isinstance(value, list):
        return 2 + sum(map(_jsonb_length, value)) + 2 * max(0, len(value) - 1)
    if isinstance(value, float):
        return len(format(Decimal(repr(value)), "f"))
    return len(json.dumps(value, ensure_ascii=False).encode())
