"""The demo's processes and its verdict, without servers."""

from __future__ import annotations

import pytest

from examples.demo.ledger import Reconciliation


@pytest.mark.parametrize(
    "changes",
    [
        {"applied": 9, "lost": 1},
        {"applied": 11, "applied_twice": 1},
        {"out_of_order": 1},
        {"published": 9},
        {"differing_orders": 1},
        {"phantom_orders": 1},
    ],
)
def test_any_difference_is_not_clean(changes):
    good = {
        "committed": 10,
        "published": 10,
        "repeated": 0,
        "applied": 10,
        "lost": 0,
        "applied_twice": 0,
        "out_of_order": 0,
        "differing_orders": 0,
        "phantom_orders": 0,
    }
    assert Reconciliation(**good).clean
    assert not Reconciliation(**good | changes).clean
