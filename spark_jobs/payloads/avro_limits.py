"""Limits for what a small Avro payload may claim, such as 2^60 items, and the reader that enforces them.

| what                                            | what follows                                                |
|-------------------------------------------------|-------------------------------------------------------------|
| a record that always contains itself            | the schema is refused: its payloads would be infinite       |
| an array of items of zero bytes, such as null   | read in Python: at most MOST_WEIGHTLESS of them in total    |
| a record that may contain itself, much data     | read in Python: RecursionError instead of a crash           |
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fastavro import parse_schema
from fastavro._read_py import read_data
from fastavro.io.binary_decoder import BinaryDecoder

from spark_jobs.payloads.reading import Problem

MOST_WEIGHTLESS: Final = 10_000
"""The most items of zero bytes in one payload. Nine bytes can claim that there are 2^60 of them."""
_LONGEST_NUMBER: Final = 10
"""The most bytes of a number in Avro: 64 bits, seven in each byte."""


def read_bounded(source: io.BytesIO, size: int, writer: Any, reader: Any) -> Any:
    """Decode with fastavro's reader in Python. Raises Problem for endless numbers and too many items of zero bytes."""

    class Decoder(BinaryDecoder):
        items = 0

        def read_long(self) -> int:
            number = shift = 0
            for byte in iter(lambda: source.read(1), b""):
                number |= (byte[0] & 0x7F) << shift
                shift += 7
                if byte[0] < 0x80:
                    return (number >> 1) ^ -(number & 1)
                if shift == 7 * _LONGEST_NUMBER:
                    raise Problem(f"the payload has a number of more than {_LONGEST_NUMBER} bytes")
            raise EOFError

        def _iter_array_or_map(self) -> Iterator[None]:
            for item in super()._iter_array_or_map():  # type: ignore[no-untyped-call]
                self.items += 1
                # There can't be more items of one byte or more than the payload has bytes.
                if self.items > size + MOST_WEIGHTLESS:
                    raise Problem(f"the payload has more than {MOST_WEIGHTLESS} items without a byte")
                yield item

        read_int = read_long
        read_enum = read_long
        read_index = read_long
        iter_array = _iter_array_or_map
        iter_map = _iter_array_or_map

    names: dict[str, dict[str, Any]] = {"writer": {}, "reader": {}}
    written = parse_schema(writer, names["writer"])
    wanted = None if reader == writer else parse_schema(reader, names["reader"])
    decoder = Decoder(source)  # type: ignore[no-untyped-call]
    return read_data(decoder, written, names, wanted, {"handle_unicode_errors": "strict"})  # type: ignore[no-untyped-call]


def holds_itself(schema: Any, named: Mapping[str, Any], *, always: bool = False) -> str | None:
    """Return the name of a record whose values may hold other values of it, if there is one.

    always  only a record whose values must hold another one. A union, an array or a map can end the recursion.
    """
    done: set[str] = set()

    def found(one: Any, inside: tuple[str, ...]) -> str | None:
        if isinstance(one, str):
            if one in inside:
                return one
            return found(named[one], inside) if one in named and one not in done else None
        if always and (isinstance(one, list) or one["type"] in ("array", "map")):
            return None
        is_record = isinstance(one, dict) and one["type"] in ("record", "error")
        within = (*inside, one["name"]) if is_record else inside
        name = next((name for part in _parts(one) if (name := found(part, within))), None)
        if is_record:
            done.add(one["name"])
        return name

    return next((name for one in (schema, *named.values()) if (name := found(one, ()))), None)


def has_weightless_items(schema: Any, named: Mapping[str, Any]) -> bool:
    """Return whether there is an array whose items may take zero bytes, so that the payload's size is no limit."""
    seen: set[str] = set()
    known: dict[str, bool] = {}

    def has(one: Any) -> bool:
        if isinstance(one, str):
            if one in seen or one not in named:
                return False
            seen.add(one)
            return has(named[one])
        # Each value of a map has a key, which takes at least a byte.
        if isinstance(one, dict) and one["type"] == "array" and _weightless(one["items"], named, known):
            return True
        return any(map(has, _parts(one)))

    return has(schema)


def _parts(schema: Any) -> Sequence[Any]:
    """Return the schemas in a schema that is no name: the branches, the fields, the items or the values."""
    if isinstance(schema, list):
        return schema
    of = schema["type"]
    if of in ("record", "error"):
        return [field["type"] for field in schema["fields"]]
    if of in ("array", "map"):
        return [schema["items" if of == "array" else "values"]]
    return [of] if isinstance(of, (list, dict)) else []


def _weightless(schema: Any, named: Mapping[str, Any], known: dict[str, bool]) -> bool:
    """Return whether a value of this schema may take zero bytes. ``known``: the results of named schemas."""
    if isinstance(schema, list):
        # The number of the branch takes a byte.
        return False
    if isinstance(schema, str):
        if schema not in known:
            known[schema] = schema == "null" or (schema in named and _weightless(named[schema], named, known))
        return known[schema]
    of = schema["type"]
    if of in ("record", "error"):
        return all(_weightless(field["type"], named, known) for field in schema["fields"])
    if of == "fixed":
        return bool(schema["size"] == 0)
    return of == "null" or (isinstance(of, dict) and _weightless(of, named, known))
