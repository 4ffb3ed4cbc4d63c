"""Of which minutes a difference from the ledger is one."""

from __future__ import annotations

import pytest

from relay.audit.coverage import Coverage
from relay.audit.findings import EQUAL, WindowAudit
from relay.audit.records import unlike_ledger
from relay.audit.sums import Sum, Window

WINDOW = Window("orders", 100)


@pytest.mark.parametrize(
    ("written", "now", "closed", "kind"),
    [
        (3, 101, 101, "missing"),
        (1, 101, 101, "unknown"),
        # What a transaction commits meanwhile may be on Kafka, and not in what was read of the ledger: not the other
        # way round.
        (3, 101, 96, "missing"),
        (1, 101, 96, None),
        (2, 101, 96, "missing"),
        (3, 100, 100, None),
        (1, 100, 101, None),
    ],
)
def test_more_than_the_ledger_has_is_unknown_when_no_transaction_may_bring_it(written, now, closed, kind):
    one = WindowAudit(WINDOW, None, 2)
    known, in_ledger = {WINDOW: (Sum(2, 7), True)}, {WINDOW: Sum(written, 8)}
    found = list(unlike_ledger({WINDOW: one}, known, in_ledger, Coverage(range(90, 110)), (), now, closed))
    assert [name for _, name, _ in found] == ([] if kind is None else [kind])
    assert (one.state, one.committed) == (EQUAL, written)
