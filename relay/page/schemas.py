"""JSON Schemas of what the page answers, made from the types of the values, as ``api.json_of`` writes them.

| type                             | schema                                                                       |
|----------------------------------|------------------------------------------------------------------------------|
| a dataclass                      | an object: its fields, which are required, and its properties                |
| a class with ``as_dict``         | what that returns: a TypedDict                                               |
| ``Annotated[…, type]``           | the schema of this type: a mapping that was made of it                       |
| a tuple of types                 | an array of these, in this order                                             |
| ``Mapping[str, Any]``, ``Any``   | an object, and anything: rows, whose columns are those of their query        |
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints, is_typeddict
from uuid import UUID

Schema = dict[str, Any]

_PLAIN: Final[Mapping[Any, Schema]] = {
    Any: {},
    NoneType: {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bytes: {"type": "string", "contentEncoding": "base64"},
    dt.datetime: {"type": "string", "format": "date-time"},
    dt.date: {"type": "string", "format": "date"},
    dt.timedelta: {"type": "number"},
    UUID: {"type": "string", "format": "uuid"},
}


class Schemas:
    """Makes schemas. ``named`` collects those of classes, for ``components``."""

    def __init__(self) -> None:
        self.named: dict[str, Schema] = {}
        self._classes: dict[str, type] = {}

    def of(self, kind: Any) -> Schema:
        """Return the schema of a type. Raises TypeError for one that has no form in JSON."""
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self.of(arguments[1])
        if origin in {Union, UnionType}:
            return {"anyOf": [self.of(one) for one in arguments]}
        if origin is tuple:
            return {"type": "array", "prefixItems": [self.of(one) for one in arguments], "items": False}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.of(arguments[0])}
        if isinstance(kind, type):
            return self._of_class(kind)
        raise TypeError(f"{kind} has no form in JSON")

    def of_fields(self, fields: Mapping[str, Any]) -> Schema:
        """Return the schema of an object with these fields and no others."""
        properties = {name: self.of(kind) for name, kind in fields.items()}
        return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}

    def _of_class(self, kind: type) -> Schema:
        if issubclass(kind, Enum):
            return {"type": "string", "enum": [one.value for one in kind]}
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        if self._classes.setdefault(kind.__name__, kind) is not kind:
            raise TypeError(f"{kind.__name__} is the name of two classes")
        if kind.__name__ in self.named:
            return reference
        # Before its fields, which may refer to it.
        self.named[kind.__name__] = {}
        if (as_dict := getattr(kind, "as_dict", None)) is not None:
            self.named[kind.__name__] = self.of(_hints(as_dict)["return"])
        elif is_typeddict(kind):
            self.named[kind.__name__] = self.of_fields(_hints(kind))
        elif dataclasses.is_dataclass(kind):
            self.named[kind.__name__] = self._of_dataclass(kind)
        else:
            raise TypeError(f"{kind.__name__} has no form in JSON")
        return reference

    def _of_dataclass(self, kind: type) -> Schema:
        hints = _hints(kind)
        fields = {each.name: hints[each.name] for each in dataclasses.fields(kind)}
        derived = {
            name: _hints(value.fget)["return"] for name, value in vars(kind).items() if isinstance(value, property)
        }
        # A mapping that was made of it lacks what it derives, and may have more.
        schema = self.of_fields(fields | derived)
        return schema | {"required": list(fields), "additionalProperties": True}


def _hints(of: Any) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)
