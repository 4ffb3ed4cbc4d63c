"""``outbox …`` with less patience, for tests of what never ends. Nothing else differs.

| what                                                              | seconds | here |
|-------------------------------------------------------------------|---------|------|
| for a broker to write the markers of a transaction that has ended | 10      | 1    |
| … of one that reconcile has aborted                               | 5       | 1    |
| for a lane's row that another session has locked, in reconcile    | 10      | 1    |
| between two looks for transactions that hang                      | 60      | 0.5  |
| between two looks at the slot                                     | 10      | 0.5  |
| between two looks at the topics' partitions                       | 60      | 0.5  |
| for a coordinator to abort what has outlasted its time-out        | 15      | 1    |
| until a wait is an error                                          | 60      | 1.5  |
| for the count of the waiting events                               | 10      | 1    |
| for the state topic to be read to its end                         | 10      | 3    |
| until lanes that can't be taken over delay the others no longer   | 10      | 2    |
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from relay import insights, wiring
from relay.cli import main
from relay.core import lane, reports
from relay.kafka import open_transactions, state_topic
from relay.kafka.state_topic import StateTopic


def changes(*, reconcile: bool, decide: float = 1.0) -> list[tuple[Any, str, float]]:
    """Return what has another value here: a module, or a function's defaults, with the name and the value.

    reconcile  whether the command is one of these; no other needs to import them.
    decide     the first two in the table.
    """
    found = [
        (StateTopic.__init__.__kwdefaults__, "decide_seconds", decide),
        (wiring, "_TRANSACTIONS_SECONDS", 0.5),
        (wiring, "_WATCH_SECONDS", 0.5),
        (wiring, "_PARTITIONS_SECONDS", 0.5),
        (open_transactions, "_GRACE_SECONDS", 1.0),
        (reports, "_STANDING_SECONDS", 1.5),
        (insights, "_STATEMENT_SECONDS", 1.0),
        (state_topic, "_READ_SECONDS", 3.0),
        (lane, "_LONG_SECONDS", 2.0),
    ]
    if reconcile:
        of = {name: importlib.import_module(f"relay.operations.{name}") for name in ("hidden_events", "reconcile")}
        found += [(of["hidden_events"], "_DECIDE_SECONDS", decide), (of["reconcile"], "LOCK_SECONDS", 1)]
    return found


if __name__ == "__main__":
    for changed, name, value in changes(reconcile="reconcile" in sys.argv):
        if isinstance(changed, dict):
            assert name in changed
            changed[name] = value
        else:
            assert hasattr(changed, name)
            setattr(changed, name, value)
    main()
