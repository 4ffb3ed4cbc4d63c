"""`outbox audit` after a run: it knows nothing of the run, and must come to what the checker has found.

Of the groups it knows those that keep their positions and ids in Postgres: the inbox's, or Spark's.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any, Final

from support import nested

from chaos.checker import LossBound, RepeatBound, Verdict
from chaos.history import EventIds
from chaos.payments import GROUP
from chaos.stage import Stage
from relay.audit.comparison import audit
from relay.audit.findings import EXPIRED, MOST_NAMED, Audit, Scope
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


def compare_with_audit(
    stage: Stage, verdict: Verdict, bound: RepeatBound, *, sure: bool, losses: LossBound | None = None
) -> None:
    """Audit the run's outbox, and add to the verdict where the two don't agree; see ``compare``."""
    now = dt.datetime.now(dt.UTC)
    found = audit(load(**_nested(stage.settings, stage.url)), Scope(now - _RUN, now + dt.timedelta(minutes=1)))
    compare(found, stage.ids, verdict, bound, sure=sure, deleted=bool(stage.deleted), losses=losses)


def compare(
    found: Audit,
    ids: EventIds,
    verdict: Verdict,
    bound: RepeatBound,
    *,
    sure: bool,
    deleted: bool = False,
    losses: LossBound | None = None,
) -> None:
    """Add to the verdict what the audit has found and the checker has not, or the other way round.

    Repeats are no anomaly where the faults may explain them (``bound``), but both must find as many. ``sure``: no
    operator has moved a key to another partition. ``deleted``: records were deleted from Kafka, and of these the audit
    compares nothing but how many were committed. ``losses``: at-most-once both must find as many lost events, and the
    same ones that the group gave up.
    """
    allowed = {"repeated"} if bound.faults else set()
    if losses is not None:
        allowed.add("missing")
        _compare_losses(found, ids, verdict)
    allowed |= set() if sure else {"order", "partition"}
    less = any(one.state == EXPIRED for one in found.windows)
    if less and not deleted:
        verdict.found("audit", "it takes records for deleted, and none was")
    if any(one.committed is None for one in found.windows):
        verdict.found("audit", "it does not know what was committed")
    committed = sum(one.committed or 0 for one in found.windows)
    if committed != verdict.committed:
        verdict.found("audit", f"it knows of {committed} committed events, and there are {verdict.committed}")
    repeated, repeats = sum(one.repeated for one in found.windows), verdict.repeats - verdict.repeats_of_replays
    if not (repeated <= repeats if less else repeated == repeats):
        verdict.found("audit", f"it has found {repeated} repeats, and there are {repeats}")
    kinds = {kind for counts in found.counts.values() for kind in counts}
    # The archive names one place of an event that was repeated, which need not be the first.
    unsure = set() if sure and not bound.faults else {"order"}
    # The ledger has no ids, so it knows nothing of them.
    unsure |= set() if losses is None else {"order", "partition", "payload"}
    for kind in sorted(verdict.for_audit - kinds - unsure) if not less else ():
        verdict.found("audit", f"it has found nothing that is {kind}: {dict(verdict.counts)}")
    _compare_group(found, verdict, less=less, lossy=losses is not None)
    for one in found.differences:
        if one.kind == "unknown" and one.event_id and ids.event(one.event_id) is None:
            # A stranger's, with an id as events have it. The checker finds those that no stranger has written.
            continue
        if one.kind not in allowed and not _SAME[one.kind] & verdict.counts.keys():
            verdict.found("audit", f"{one.kind}: {one.topic}, group {one.group}, {one.event_id}: {one.text}")


def _compare_group(found: Audit, verdict: Verdict, *, less: bool, lossy: bool) -> None:
    # Messages of strangers that have ids as events have them are counted, too.
    counts = [one.groups[GROUP] for one in found.windows if GROUP in one.groups]
    applied, waiting = sum(count.applied or 0 for count in counts), sum(count.waiting for count in counts)
    ours = verdict.applied[GROUP]
    # A group at-most-once keeps no ids for it.
    counted = any(count.applied is not None for count in counts) or not lossy
    if waiting or (counted and not (0 if less else ours) <= applied <= ours + verdict.strangers):
        verdict.found("audit", f"group {GROUP} has applied {applied} events, {waiting} wait; it has applied {ours}")


def _compare_losses(found: Audit, ids: EventIds, verdict: Verdict) -> None:
    known = sum(one.kafka + one.waiting + one.dead + one.discarded for one in found.windows)
    lost = sum(one.committed or 0 for one in found.windows) - known
    if lost != verdict.lost:
        verdict.found("audit", f"it has found that {lost} events are lost, and there are {verdict.lost}")
    named = [one for one in found.differences if one.kind == "missing" and one.group == GROUP and one.event_id]
    events = {event for one in named if (event := ids.event(one.event_id or "")) is not None}
    given_up = verdict.given_up.get(GROUP, set())
    if not (events == given_up if found.count < MOST_NAMED else events <= given_up):
        verdict.found("audit", f"it names {len(events)} events that {GROUP} gave up, and there are {len(given_up)}")


def _nested(settings: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return settings as ``load`` takes them, with an address past the proxies."""
    given = nested(settings)
    kafka = {"bootstrap.servers": given.pop("bootstrap_servers")}
    return given | {"kafka": kafka, "database_url": url, "routes": json.loads(settings["routes"])}
