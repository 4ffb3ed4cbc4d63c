"""What the kinds of schemas have in common."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

from outbox.registry.client import Definition


class RegisteredSchema(Protocol):
    """A schema of a subject, and how a payload is encoded with it."""

    subject: str

    @property
    def content_type(self) -> str:
        """The media type of what ``encode`` returns, behind its id."""
        ...

    @property
    def definition(self) -> Definition:
        """The schema as the registry has it."""
        ...

    def encode(self, payload: object) -> bytes:
        """Return the payload encoded, without the schema's id. Raises SchemaMismatch."""
        ...


def plain(value: object) -> object:
    """Return a dataclass or pydantic model as a dict, an Enum as its value, and anything else as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: getattr(value, part.name) for part in dataclasses.fields(value) if part.name[0] != "_"}
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return value.model_dump()
    if isinstance(value, Enum):
        return value.value
    return value


def member(path: str, key: object) -> str:
    """Return the path of a value inside a mapping."""
    return f"{path}[{key!r}]"


Tree = Mapping[str, Any]
