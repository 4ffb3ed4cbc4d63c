"""Compares the number of events that were written with those that are known; the ledger has no ids."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from relay.audit.coverage import Coverage
from relay.audit.findings import OPEN, WindowAudit
from relay.audit.sums import NOTHING, Sum, Window, unlike


def unlike_ledger(
    found: Mapping[Window, WindowAudit],
    accounted: Mapping[Window, tuple[Sum, bool]],
    written: Mapping[Window, Sum],
    coverage: Coverage,
    former: Collection[str],
    now: int,
) -> Iterator[tuple[WindowAudit, str, str]]:
    """Yield windows of which the ledger counts something else, each with the kind of the difference and a text.

    accounted  by window, the sum over the events that are known, and whether these must be all.
    former     topics that count only for others: see ``unlike``. ``now``: this minute is not over.
    """
    accounted = {window: known for window, known in accounted.items() if coverage.counted(window)}
    for window in accounted:
        in_ledger = written.get(window, NOTHING)
        found[window].committed, found[window].sums["ledger"] = in_ledger.events, in_ledger.hashes
    for window in unlike({window: known for window, (known, _) in accounted.items()}, written, former):
        one, (known, whole) = found[window], accounted[window]
        if coverage.lost(window):
            continue
        if not whole:
            # The rest may be what waits, or what an open transaction hides.
            one.state = OPEN
        # Of a minute that is not over, the readings differ by what is written meanwhile.
        elif window.minute < now:
            events = written.get(window, NOTHING).events
            where = "its archive" if coverage.archived(window) else "on Kafka"
            text = f"{events} events were written, and {known.events} are in the outbox or {where}"
            if where == "on Kafka":
                text += "; if routes have changed since, give --topic for the old and the new topic"
            yield one, "missing" if events >= known.events else "unknown", text
