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


def test_names_are_of_one_mutant():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 24
