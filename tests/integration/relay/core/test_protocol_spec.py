"""The specification of the relay's protocol, docs/explanation/protocol.tla. `make spec` lets TLC check it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tlc
from invariants import Invariant

_ROOT = Path(__file__).parents[4]


def test_it_is_as_it_was_checked() -> None:
    assert tlc.CHECKED.read_text().strip() == tlc.digest(), "it has changed, or a configuration: run `make spec`"


def test_the_promises_hold() -> None:
    """In small bounds: TLC runs, and its answer is read right."""
    checked = tlc.check("exactly_once", Faults="1")
    assert checked.states is not None, checked
    assert checked.states > 1_000, "too few states: what is to be checked can't be reached"


@pytest.mark.parametrize("config", ["wrong_publishes_blind", "wrong_mark_past_a_transaction_live"])
def test_a_mistake_breaks_the_promise_that_is_named(config: str) -> None:
    """A specification that forgives a mistake proves nothing: `make spec` has one for each promise."""
    checked = tlc.check(config)
    assert checked.broken == tlc.expected(config), checked


def test_what_it_abstracts_is_in_the_code() -> None:
    named = re.findall(r"\b([a-z_/]+\.py), (\w+(?:\.\w+)?)", "".join(module.read_text() for module in tlc.MODULES))
    assert len(named) > 20
    for path, name in named:
        file = next((file for file in (_ROOT / path, _ROOT / "relay" / path) if file.is_file()), None)
        assert file, f"the specification names {path}, which is no file"
        last = name.rpartition(".")[2]
        assert re.search(rf"\b{last}\b", file.read_text()), f"the specification names {name} of {path}, which has none"


@pytest.mark.parametrize("invariant", Invariant)
def test_what_mutations_break_is_an_invariant_of_it(invariant: Invariant) -> None:
    assert re.search(rf"(?m)^{invariant} ==", tlc.SPEC.read_text())


def test_each_configuration_is_on_the_page() -> None:
    page = tlc.SPEC.with_suffix(".md").read_text()
    missing = [config for config in tlc.CONFIGS if f"`{config}`" not in page]
    assert not missing


def test_each_action_and_each_variable_is_on_the_page() -> None:
    page, text = tlc.SPEC.with_suffix(".md").read_text(), "".join(module.read_text() for module in tlc.MODULES)
    definitions = re.findall(r"(?m)^(\w+)(?:\(.*\))? ==((?:\n?.+)*)", text)
    actions = {name for name, body in definitions if re.search(r"\b(?:pg|relay|kafka)' (?:=|\\in) ", body)}
    assert len(actions) > 25
    variables = re.findall(r"\w+", re.search(r"vars == <<(.*?)>>", text)[1])
    assert not [name for name in [*variables, *sorted(actions)] if f"`{name}`" not in page]
