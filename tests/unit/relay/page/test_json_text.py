"""JSON as the page writes it: nothing but the space between its parts differs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.page.api import pretty

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.sampled_from([None, 1, "\t"]))
def test_it_is_what_json_would_write(value, indent):
    assert pretty(json.dumps(value, indent=indent)) == json.dumps(value, indent=2)


def test_numbers_and_repeated_names_stay():
    text = '{"n":1.000000000000000000000001,"n":-0.0e+7,"s":"a,b{}\\" :"}'
    assert pretty(text) == '{\n  "n": 1.000000000000000000000001,\n  "n": -0.0e+7,\n  "s": "a,b{}\\" :"\n}'


@pytest.mark.parametrize("text", ["", "no JSON", "{", '{"a": 1} x', "[" * 100_000, "[" * 5_000 + "]" * 5_000])
def test_other_texts_stay(text):
    assert pretty(text) is text


def test_levels_far_below_are_not_indented_further():
    assert len(pretty("[" * 1_000 + "]" * 1_000)) < 200_000


def test_a_very_long_text_stays():
    text = "[" * 500 + ",".join(["[]"] * 34_000) + "]" * 500
    assert pretty(text) is text
    assert len(pretty("[" * 500 + "0" + ",0" * 49_000 + "]" * 500)) < 10_000_000
