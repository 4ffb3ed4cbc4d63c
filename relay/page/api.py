"""What the page serves: each view and action is declared once, for a browser as HTML and for programs as JSON.

Below ``/api`` are the same addresses, with the same code, rights and audit. ``/api/openapi.json`` describes them.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import orjson
from starlette.responses import Response

from outbox import __version__
from outbox.external import exact_json
from relay.page.schemas import Schema, Schemas

PREFIX: Final = "/api"
MANY: Final = "list: "
"""How the description of a field begins that takes several values."""
REASON: Final = {"reason": "why: the audit keeps it"}
Rows = Sequence[Mapping[str, Any]]
"""The type of rows of a query."""
_DONE: Final = {"$ref": "#/components/schemas/Done"}
_ERROR: Final = {"$ref": "#/components/schemas/Error"}
_DEEPEST: Final = 40
"""Levels that are indented: what is below them would be mostly spaces."""
_LONGEST: Final = 100_000
"""Characters: lists in lists would become many times as long."""
_PART: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]\s*[\]}]|[\[\]{},:]|[^\s"\[\]{},:]+')
CONFIRMED: Final = {"confirmed": "what the first answer gives for it: then it is done"}


@dataclass(frozen=True, slots=True)
class View:
    """What is served at one address.

    path      with ``{names}`` of its parts, as for Starlette.
    endpoint  gets the page and a request, and an action's the fields that were sent; returns ``Page.render``'s answer.
    summary   what it shows or does.
    query     the names that it reads from an address, each with what it means.
    fields    the same of an action's fields; None: it is a view.
    shows     what a view answers: the types of its values by their names, or several such, one of which it answers.
    """

    path: str
    endpoint: Callable[..., Response]
    summary: str
    query: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] | None = None
    shows: Mapping[str, Any] | Sequence[Mapping[str, Any]] = ()


def view(path: str, summary: str, query: Mapping[str, str] | None = None, **more: Any) -> Callable[..., View]:
    """Return a decorator that makes a View of an endpoint. ``more``: its ``fields`` and what it ``shows``."""
    return lambda endpoint: View(path, endpoint, summary, query or {}, **more)


def answer(values: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json_of(values), status, media_type="application/json")


def json_of(values: object) -> str:
    """Return values of the page as JSON. Numbers from JSON in a table may have any size, and are not rounded."""
    return exact_json.dumps(values, default=_plain, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    match value:
        case dt.datetime() | dt.date():
            return value.isoformat()
        case dt.timedelta():
            return value.total_seconds()
        case UUID() | Decimal():
            # Of the numbers only those that would have very many zeros.
            return str(value)
        case bytes() | memoryview():
            return base64.b64encode(value).decode()
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if dataclasses.is_dataclass(value):
        # With what it says of itself, such as a topic's problem.
        names = [each.name for each in dataclasses.fields(value)]
        names += [name for name, kind in vars(type(value)).items() if isinstance(kind, property)]
        return {name: getattr(value, name) for name in names}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def pretty(text: str) -> str:
    """Return JSON with a line for each member; any other text, and a very long one, as it is.

    Only the space between its parts is changed: numbers that a parser would round and names that occur twice stay.
    """
    if len(text) > _LONGEST:
        return text
    try:
        orjson.loads(text)
    except ValueError:
        return text
    parts: list[str] = []
    depth = 0
    for part in _PART.findall(text):
        if part in "]}":
            depth -= 1
            parts.append(_line(depth))
        parts.append(part)
        if part in "[{":
            depth += 1
            parts.append(_line(depth))
        elif part == ",":
            parts.append(_line(depth))
        elif part == ":":
            parts.append(" ")
    return "".join(parts)


def _line(depth: int) -> str:
    return "\n" + "  " * min(depth, _DEEPEST)


def fields_of(body: bytes) -> list[tuple[str, str]] | None:
    """Return the fields of an action that were sent as one JSON object; None if they are no such object."""
    try:
        sent = orjson.loads(body)
    except ValueError:
        return None
    if not isinstance(sent, dict):
        return None
    found = []
    for name, value in sent.items():
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, str | int) or isinstance(one, bool):
                return None
            found.append((name, str(one)))
    return found


def openapi(views: Sequence[View], base: str) -> dict[str, Any]:
    """Return the description of the API in OpenAPI 3.1. ``base``: the path that the page lies below."""
    paths: dict[str, dict[str, Any]] = {}
    schemas = Schemas()
    for view in views:
        path = re.sub(r"\{(\w+)(:\w+)?\}", r"{\1}", view.path)
        parts = [_parameter(name, "path", "") for name in re.findall(r"\{(\w+)\}", path)]
        operation: dict[str, Any] = {
            "summary": view.summary,
            "parameters": [*parts, *(_parameter(name, "query", text) for name, text in view.query.items())],
            "responses": {
                "200": _json("what was done, or what would be", _DONE)
                if view.fields is not None
                else _json("found", _shown(view, schemas)),
                "default": _json("refused, not found, or not available", _ERROR),
            },
        }
        if view.fields is not None:
            properties = {name: _field(text) for name, text in view.fields.items()}
            schema = {"type": "object", "properties": properties}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})["get" if view.fields is None else "post"] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "The operations of an outbox", "version": __version__},
        "servers": [{"url": f"{base}{PREFIX}"}],
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                **schemas.named,
                "Error": {"type": "object", "properties": {"error": {"type": "string"}}},
                "Done": {
                    "type": "object",
                    "description": "Without `done` nothing was changed: send the same with this `confirmed` to do it.",
                    "properties": {
                        "done": {"type": "string"},
                        "title": {"type": "string"},
                        "lines": {"type": "array", "items": {"type": "string"}},
                        "confirmed": {"type": "string"},
                    },
                },
            },
        },
    }


def _parameter(name: str, place: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": place, "description": text, "required": place == "path", "schema": {"type": "string"}}


def _field(text: str) -> dict[str, Any]:
    if text.startswith(MANY):
        return {"type": "array", "items": {"type": "string"}, "description": text.removeprefix(MANY)}
    return {"type": "string", "description": text}


def _shown(view: View, schemas: Schemas) -> Schema:
    if isinstance(view.shows, Mapping):
        return schemas.of_fields(view.shows)
    return {"anyOf": [schemas.of_fields(one) for one in view.shows]}


def _json(text: str, schema: Schema) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
