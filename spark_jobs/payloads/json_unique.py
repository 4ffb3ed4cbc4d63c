"""JSON Schema's ``uniqueItems`` in linear time.

The library compares each item with every other one, unless they can be sorted: a message with 100,000 objects took it
hours. Here each value has a key, and values that are equal by JSON Schema's rules have equal keys:

| values                                  | keys                                                                |
|-----------------------------------------|---------------------------------------------------------------------|
| 1, 1.0 and 1e0; 0 and -0.0              | equal: numbers are compared by value                                |
| true and 1; "1" and 1; null and false   | different: each begins with its type                                |
| objects with their fields in any order  | equal                                                               |
| arrays, in their order                  | a digest of the items' keys, so that nesting does not make keys long |

Keys are bytes, because their hashes are unpredictable: integers can be chosen to have all the same hash.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Keys:
    """The keys of one payload's values. Keys of arrays and objects are computed once, at any depth."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}

    def key(self, value: Any) -> bytes:
        """Return a value's key. The payload must stay alive and unchanged, because keys are cached by identity."""
        if isinstance(value, str):
            return b'"' + value.encode("utf-8", "surrogatepass")
        if value is None or isinstance(value, bool):
            return {None: b"null", True: b"true", False: b"false"}[value]
        if isinstance(value, (int, float)):
            whole = isinstance(value, float) and value.is_integer()
            return b"#%a" % (int(value) if whole else value)
        found = self._known.get(id(value))
        if found is None:
            found = self._known[id(value)] = self._digest(value)
        return found

    def _digest(self, value: Any) -> bytes:
        parts = hashlib.sha256(b"{" if isinstance(value, Mapping) else b"[")
        items = (
            [part for name, item in sorted(value.items()) for part in (self.key(name), self.key(item))]
            if isinstance(value, Mapping)
            else map(self.key, value)
        )
        for key in items:
            parts.update(len(key).to_bytes(8))
            parts.update(key)
        return b"=" + parts.digest()

    def all_different(self, items: list[Any]) -> bool:
        """Return whether no two items are equal."""
        return len({self.key(item) for item in items}) == len(items)


_KEYS: ContextVar[Keys | None] = ContextVar("outbox_unique_items", default=None)


@contextmanager
def one_payload() -> Iterator[None]:
    """Share the keys in all validations inside the block. They must be of one payload."""
    token = _KEYS.set(Keys())
    try:
        yield
    finally:
        _KEYS.reset(token)


def _unique_items(validator: Any, unique: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if unique and validator.is_type(instance, "array") and not (_KEYS.get() or Keys()).all_different(instance):
        yield ValidationError("an array has equal items")


@functools.cache
def linear(kind: Any) -> Any:
    """Return a validator class that is equal to ``kind`` but checks uniqueItems in linear time."""
    # The library's own classes are built with attrs.
    import attrs
    from jsonschema import validators

    made: Any = validators.extend(kind, {"uniqueItems": _unique_items})
    evolve = made.evolve

    def evolved(self: Any, **changes: Any) -> Any:
        found = evolve(self, **changes)
        if type(found) is made:
            return found
        # For a schema that declares its draft, such as a root that refers to itself, the library uses its own class.
        its_own: Any = type(found)
        fields = [field for field in attrs.fields(its_own) if field.init]
        return linear(its_own)(**{str(field.alias): getattr(found, field.name) for field in fields})

    made.evolve = evolved
    return made
