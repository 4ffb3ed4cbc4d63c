"""`outbox audit` after a run: it knows nothing of the run, and must come to what the checker has found.

Of the groups it knows those that keep their positions and ids in Postgres: the inbox's, or Spark's.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any, Final

from support import nested

from chaos.checker import RepeatBound, Verdict
from chaos.payments import GROUP
from chaos.stage import Stage
from relay.audit.comparison import audit
from relay.audit.findings import Scope
from relay.config import load

_RUN: Final = dt.timedelta(hours=2)
# What the checker calls it.
_SAME: Final = {
    "missing": {"lost", "unapplied"},
    "unknown": {"invented", "aborted", "misapplied"},
    "payload": {"corrupted"},
    "repeated": {"duplicated", "dead_letters"},
    "order": {"reordered"},
    "partition": {"wrong_partition"},
}

_FOUND_BY_BOTH: Final = {"lost": "missing", "duplicated": "repeated", "invented": "unknown", "aborted": "unknown"}


def compare_with_audit(stage: Stage, verdict: Verdict, bound: RepeatBound, *, sure: bool) -> None:
    """Add to the verdict what the audit has found and the checker has not, or the other way round.

    Repeats are no anomaly where the faults may explain them (``bound``). ``sure``: no operator has moved a key to
    another partition.
    """
    allowed = {"repeated"} if bound.faults else set()
    allowed |= set() if sure else {"order", "partition"}
    now = dt.datetime.now(dt.UTC)
    found = audit(load(**_nested(stage.settings, stage.url)), Scope(now - _RUN, now + dt.timedelta(minutes=1)))
    if any(one.committed is None for one in found.windows):
        verdict.found("audit", "it does not know what was committed")
    committed = sum(one.committed or 0 for one in found.windows)
    if committed != verdict.committed:
        verdict.found("audit", f"it knows of {committed} committed events, and there are {verdict.committed}")
    kinds = {kind for counts in found.counts.values() for kind in counts}
    for name in verdict.counts.keys() & _FOUND_BY_BOTH.keys():
        if _FOUND_BY_BOTH[name] not in kinds:
            verdict.found("audit", f"it has found nothing that is {_FOUND_BY_BOTH[name]}, and events are {name}")
    # Messages of strangers that have ids as events have them are counted, too.
    counts = [one.groups[GROUP] for one in found.windows if GROUP in one.groups]
    applied, waiting = sum(count.applied or 0 for count in counts), sum(count.waiting for count in counts)
    ours = verdict.applied[GROUP]
    if waiting or not ours <= applied <= ours + verdict.strangers:
        verdict.found("audit", f"group {GROUP} has applied {applied} events, {waiting} wait; it has applied {ours}")
    for one in found.differences:
        if one.kind == "unknown" and one.event_id and stage.ids.event(one.event_id) is None:
            # A stranger's, with an id as events have it. The checker finds those that no stranger has written.
            continue
        if one.kind not in allowed and not _SAME[one.kind] & verdict.counts.keys():
            verdict.found("audit", f"{one.kind}: {one.topic}, group {one.group}, {one.event_id}: {one.text}")


def _nested(settings: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return settings as ``load`` takes them, with an address past the proxies."""
    given = nested(settings)
    kafka = {"bootstrap.servers": given.pop("bootstrap_servers")}
    return given | {"kafka": kafka, "database_url": url, "routes": json.loads(settings["routes"])}
