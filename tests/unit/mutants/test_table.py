"""``make mutants``: each mutant still changes what it was made for, and its tests are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.table import MUTANTS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant):
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert all((ROOT / test).exists() for test in mutant.tests)


def test_what_a_mutant_of_the_protocol_breaks_is_an_invariant_of_it():
    specification = (ROOT / "docs" / "explanation" / "protocol.tla").read_text()
    named = {mutant.breaks.partition(":")[0] for mutant in MUTANTS if mutant.breaks[0].isupper()}
    assert len(named) > 4
    assert not [name for name in named if f"\n{name} ==" not in specification]


def test_names_are_of_one_mutant():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 24
