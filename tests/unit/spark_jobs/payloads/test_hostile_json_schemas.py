"""Payloads made to take long where a JSON Schema is asked: unique items."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from spark_jobs.payloads import json_schema as json_schema_payload
from spark_jobs.payloads.reading import Problem
from spark_jobs.payloads.registry import Schema

DRAFT = "http://json-schema.org/draft-07/schema#"
UNIQUE = {"type": "array", "uniqueItems": True}
AT_ITEMS = {"properties": {"items": UNIQUE}}
TREE = {**UNIQUE, "items": {"anyOf": [{"not": {"type": "array"}}, {"$ref": "#/definitions/tree"}]}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "alone": AT_ITEMS,
    "of a draft": {"$schema": DRAFT, **AT_ITEMS},
    "of another draft": {"$schema": "https://json-schema.org/draft/2020-12/schema", **AT_ITEMS},
    # Through the root, which names its draft.
    "of itself": {"$schema": DRAFT, "properties": {"items": UNIQUE, "inner": {"$ref": "#"}}},
}


def json_schema(schema: Any) -> Callable[[bytes], None]:
    """Return what holds a payload against a schema, as the decoder does. It raises Problem."""
    client = MappingProxyType({1: Schema("JSON", json.dumps(schema))})
    validator = json_schema_payload._validator(SimpleNamespace(schema=client.__getitem__), 1)
    return lambda payload: json_schema_payload._validate(validator, 1, payload)


def calls(work: Callable[[], object]) -> int:
    """Return how many functions Python calls, in Python and in C."""
    count = 0

    def counted(_frame: object, event: str, _of: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("schema", "item"),
    [
        ("alone", lambda number: {"sku": f"s{number}", "of": [number]}),
        ("of a draft", lambda number: [number, {"a": [str(number)]}]),
        ("of another draft", lambda number: number if number % 2 else str(number)),
        ("of itself", lambda number: [[None, number], {}][number % 2] if number > 1 else number),
    ],
    ids=["objects", "arrays", "numbers and texts", "all kinds"],
)
def test_unique_items_are_found_by_as_many_steps_as_there_are_items(schema, item):
    check = json_schema(SCHEMAS[schema])

    def steps(size: int) -> int:
        items = [item(number) for number in range(size)]
        items = [one for number, one in enumerate(items) if one != {} or number == 3]
        payload: Any = {"items": items}
        if schema == "of itself":
            payload = {"inner": payload}
        return calls(lambda: check(json.dumps(payload).encode()))

    assert steps(1600) < 4.5 * steps(400)


def test_unique_items_at_every_level_are_found_by_as_many_steps():
    """Each level looks at what it holds, and not again at all that lies inside of that."""
    check = json_schema({"definitions": {"tree": TREE}, "$ref": "#/definitions/tree"})

    def steps(levels: int) -> int:
        nested: Any = list(range(2000))
        for _ in range(levels):
            nested = [nested]
        return calls(lambda: check(json.dumps(nested).encode()))

    alone = steps(0)
    assert steps(20) < 2 * alone


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("1", "1.0", True),
        ("1", "1e0", True),
        ("100", "1e2", True),
        ("0", "-0.0", True),
        ("1", "true", False),
        ("0", "false", False),
        ("1.0", "true", False),
        ("null", "false", False),
        ("null", '"null"', False),
        ("1", '"1"', False),
        ("true", '"true"', False),
        ("0.1", "0.10", True),
        ("0.1", "0.2", False),
        ("9007199254740993", "9007199254740992.0", False),
        ("9007199254740992", "9007199254740992.0", True),
        ("1e300", "1" + "0" * 300, False),
        (r'"\u00e9"', '"é"', True),
        (r'"\ud800"', r'"\ud801"', False),
        ('"é"', r'"e\u0301"', False),
        ("[]", "{}", False),
        ("[]", "[]", True),
        ("[]", "[[]]", False),
        ("[1, 2]", "[2, 1]", False),
        ("[1, 2]", "[1.0, 2]", True),
        ("[1]", "[true]", False),
        ('["1"]', "[1]", False),
        ('["a", "b"]', '["ab"]', False),
        ('[["a"], "b"]', '[["a", "b"]]', False),
        ('{"a": 1, "b": [{"c": 2, "d": 3}]}', '{"b": [{"d": 3.0, "c": 2}], "a": 1}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1}', '{"b": 1}', False),
        ('{"a": "b"}', '["a", "b"]', False),
        ('{"a": null}', "{}", False),
        ('{"": 0}', '{"": false}', False),
    ],
)
def test_unique_items_are_told_apart_as_json_schema_has_it(one, other, equal):
    """In both orders; also beside items that can't be sorted with them."""
    check = json_schema(UNIQUE)
    mixed = "" if "null" in (one, other) else ', {"beside": 1}, "beside", [7], null'
    for first, second, beside in ((one, other, ""), (other, one, ""), (one, other, mixed), (other, one, mixed)):
        payload = f"[{first}, {second}{beside}]".encode()
        if equal:
            with pytest.raises(Problem, match="the payload is not as schema 1 has it: uniqueItems"):
                check(payload)
        else:
            check(payload)


def test_unique_items_mean_nothing_where_the_schema_does_not_ask_for_them():
    for schema in ({"uniqueItems": False}, {"type": ["array", "string"]}, {"properties": {"a": UNIQUE}}):
        json_schema(schema)(b"[1, 1]")
    json_schema(UNIQUE | {"type": "string"})(b'"aa"')
    json_schema({"$schema": "http://json-schema.org/draft-04/schema#", **UNIQUE})(b"[1, 2]")
