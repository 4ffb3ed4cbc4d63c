"""The response of a call as it is stored: exactly, or as text where jsonb can't hold it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.external import exact_json
from outbox.external.http_call import _json

TEXTS = st.text(st.sampled_from(["\\", "\0", "u", "0", '"', "a"]))
VALUES = st.recursive(TEXTS, lambda inside: st.lists(inside) | st.dictionaries(TEXTS, inside))


def stored(value: object) -> Any:
    encode = exact_json.jsonb(value).dumps
    assert encode is not None
    return json.loads(encode(None))


def holds_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(holds_nul, [*value, *value.values()]))
    return "\0" in value if isinstance(value, str) else any(map(holds_nul, value))


@given(VALUES)
def test_only_a_response_with_a_nul_is_stored_as_text(value):
    kept = stored(value)
    assert set(kept) == {"text"} if holds_nul(value) else kept == value


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({1: r"\u0000"}, {"1": r"\u0000"}),
        ({1: "\0"}, {"text": r"{1: '\x00'}"}),
        ({"\0": 1}, {"text": r"{'\x00': 1}"}),
        ("\\\0", {"text": r"'\\\x00'"}),
        (ValueError("a\0"), {"text": r"ValueError('a\x00')"}),
    ],
)
def test_wherever_the_nul_is(value, kept):
    assert stored(value) == kept


def nested(levels: int) -> Any:
    value: Any = []
    for level in range(levels - 1):
        value = [value] if level % 2 else {"a": (value,)}
    return value


def test_a_response_is_stored_however_deep_it_is_and_read_again_deep_in_the_stack():
    def deep(frames: int, work: Callable[[], Any]) -> Any:
        return work() if frames == 0 else deep(frames - 1, work)

    for levels in (1, 100, 330):
        text = json.dumps(nested(levels))
        assert deep(300, lambda text=text: stored(exact_json.loads(text))) == json.loads(text)
    # From here on writing it, or showing it as text, would end in a RecursionError; how deep depends on the stack.
    for levels in (501, 600, *range(900, 1000, 10), 5_000, 100_000):
        assert set(stored(nested(levels))) == {"text"}
        assert set(deep(100, lambda levels=levels: stored(nested(levels)))) == {"text"}
        body = b"[" * levels + b"]" * levels
        assert _json(body) == {"text": body.decode()}


class Unspeakable:
    def __str__(self) -> str:
        raise KeyError("name")

    __repr__ = __str__


def test_a_response_that_has_no_text_is_stored_by_its_type():
    assert stored(Unspeakable()) == {"text": "Unspeakable"}
    assert stored({"a": Unspeakable()}) == {"text": "dict"}
