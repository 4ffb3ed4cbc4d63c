"""The response of a call as it is stored: exactly, or as text where jsonb can't hold it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.external import exact_json

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
