"""Write nested Arrow values as the JSON text of Spark's ``to_json``, one column at a time, for jsonb.

NULLs are left out of structs but kept in arrays and maps; bytes are base64; times are ISO 8601 with microseconds, in
UTC; NaN and the infinities are strings, because JSON has no numbers for them. Spark writes some doubles with more
digits than needed, and large ones with an exponent; this module writes the shortest text of each value.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

# Quotes and backslashes are escaped with Arrow. A column with control characters, which are rare, goes through orjson.
_CONTROL: Final = "[\\x00-\\x1f]"
# A double that Arrow prints as a whole number.
_WHOLE: Final = "^-?[0-9]+$"


def json_text(values: pa.Array) -> pa.Array:
    """Return each value as JSON text; NULL where the value is NULL.

    Raises TypeError for a type without a counterpart in JSON; see ``has_json``.
    """
    kind = values.type
    if pa.types.is_struct(kind):
        return _objects(values)
    if pa.types.is_list(kind):
        return _listed(values, json_text(values.flatten()), "[", "]")
    return _maps(values) if pa.types.is_map(kind) else _plain(values)


def _plain(values: pa.Array) -> pa.Array:
    kind = values.type
    if pa.types.is_string(kind):
        return _strings(values)
    if pa.types.is_floating(kind):
        texts = values.cast(pa.string())
        texts = pc.if_else(pc.match_substring_regex(texts, _WHOLE), _joined(texts, ".0"), texts)
        for number, said in (("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")):
            texts = pc.if_else(pc.equal(texts, number), f'"{said}"', texts)
        return texts
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        return values.cast(pa.string())
    if pa.types.is_date(kind):
        return _quoted(values.cast(pa.string()))
    if pa.types.is_timestamp(kind):
        local = values.cast(pa.timestamp("us")).cast(pa.string())
        return _quoted(pc.replace_substring(local, " ", "T"), "Z" if kind.tz else "")
    if pa.types.is_binary(kind):
        encoded = [None if one is None else base64.b64encode(one).decode() for one in values.to_pylist()]
        return _quoted(pa.array(encoded, pa.string()))
    raise TypeError(f"{kind} has no counterpart in JSON")


def has_json(kind: pa.DataType) -> bool:
    """Return whether values of this type can be written as JSON."""
    try:
        json_text(pa.array([], kind))
    except TypeError:
        return False
    return True


def offsets_of(lists: pa.ListArray) -> pa.Array:
    """Return the offsets of the lists in ``lists.flatten()``.

    Not the array's own offsets: a list that is NULL may have items, and a slice has the offsets of the whole array.
    """
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


def _quoted(texts: pa.Array, after: str = "") -> pa.Array:
    return _joined('"', texts, f'{after}"')


def _joined(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


def _strings(values: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(values, _CONTROL)).as_py():
        return pa.array([None if one is None else orjson.dumps(one) for one in values.to_pylist()], pa.string())
    return _quoted(pc.replace_substring(pc.replace_substring(values, "\\", "\\\\"), '"', '\\"'))


def _objects(values: pa.StructArray) -> pa.Array:
    # flatten() and not field(): a struct that is NULL may have values in its fields. Each field is written with a comma
    # before it, and the first comma is removed: if Arrow skipped the NULLs, it would drop a row that has only NULLs.
    fields = [
        pc.fill_null(_joined(f",{orjson.dumps(field.name).decode()}:", json_text(column)), "")
        for field, column in zip(values.type, values.flatten(), strict=True)
    ]
    inner = pc.utf8_ltrim(_joined(*fields), ",") if fields else ""
    return pc.if_else(values.is_valid(), _joined("{", inner, "}"), pa.scalar(None, pa.string()))


def _maps(values: pa.MapArray) -> pa.Array:
    kind = values.type
    lists = values.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    names, items = lists.flatten().flatten()
    return _listed(lists, _joined(_names(names), ":", pc.fill_null(json_text(items), "null")), "{", "}")


def _names(keys: pa.Array) -> pa.Array:
    """Return a map's keys as JSON texts, which the names in an object have to be, whatever the keys' type."""
    kind = keys.type
    if pa.types.is_string(kind):
        return _strings(keys)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        return _quoted(keys.cast(pa.string()))
    raise TypeError(f"a map's keys of {kind} have no counterpart in JSON")


def _listed(lists: pa.ListArray, items: pa.Array, opening: str, closing: str) -> pa.Array:
    """Return the items of each list as one text. ``items`` has the items of all lists, one list after the other."""
    texts = pc.binary_join(pa.ListArray.from_arrays(offsets_of(lists), pc.fill_null(items, "null")), ",")
    return pc.if_else(lists.is_valid(), _joined(opening, texts, closing), pa.scalar(None, pa.string()))
