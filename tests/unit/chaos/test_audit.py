"""What ``make chaos`` makes of an audit beside its checker: they agree, or the verdict says where they don't."""

from __future__ import annotations

import datetime as dt

import pytest
from chaos.audit import compare
from chaos.checker import EXACTLY_ONCE, Verdict, check
from chaos.history import Effect, EventIds, Group, History
from chaos.payments import GROUP
from chaos_histories import A1, A2, A3, B1, LENIENT, ROW_ROLLED_BACK, ROWS, S1, S3, SENT, X1, history, message, messages

from relay.audit.findings import EXPIRED, Audit, Difference, GroupCount, WindowAudit
from relay.audit.sums import Window

IDS = EventIds("a run", 1.8e9)
WINDOW = Window("orders", 30_000_000)
EVENTS = [A1, B1, A2, A3]


def applied(sent, rows=EVENTS, **changes) -> History:
    places = {each.event: each.offset for each in reversed(sent)}
    effects = [Effect(each.event, ("orders", 0), places.get(each.event, 40)) for each in rows]
    return history(sent, groups=[Group(GROUP, ["orders"], effects, by_key=True, audited=True)], **changes)


def audited(*kinds: str, repeated: int = 0, committed: int = len(ROWS), group: int = len(EVENTS), waiting: int = 0):
    found = Audit(WINDOW.start, WINDOW.start + dt.timedelta(minutes=1), b"key")
    groups = {GROUP: GroupCount(group, waiting)}
    found.windows.append(WindowAudit(WINDOW, committed, len(SENT), repeated=repeated, groups=groups))
    for kind in kinds:
        found.add(WINDOW, Difference(kind, str(IDS.id_of(A1.event)), "orders", WINDOW.start, "a text"))
    return found


def compared(verdict: Verdict, found: Audit, bound=EXACTLY_ONCE, *, sure: bool = True, deleted: bool = False) -> bool:
    """Return whether the two agree."""
    compare(found, IDS, verdict, bound, sure=sure, deleted=deleted)
    return "audit" not in verdict.counts


def test_an_audit_that_agrees():
    assert compared(check(applied(messages(*SENT)), EXACTLY_ONCE), audited())


FOUND_BY_BOTH = {
    "lost": (applied(messages(A1, A2, A3, X1, S1, S3), [A1, A2, A3]), "missing"),
    "duplicated": (applied(messages(*SENT, B1)), "repeated"),
    "aborted": (applied([*messages(*SENT), message(ROW_ROLLED_BACK, 9)]), "unknown"),
    "corrupted": (applied([*messages(*SENT[:6]), message(S3, 6)._replace(digest=b"other")]), "payload"),
    "reordered": (applied(messages(A2, A1, A3, B1, X1, S1, S3), [A2, A1, A3, B1]), "order"),
    "unapplied": (applied(messages(*SENT), [A1, B1, A2]), "missing"),
    "misapplied": (applied(messages(*SENT), [*EVENTS, ROW_ROLLED_BACK]), "unknown"),
}


@pytest.mark.parametrize("anomaly", FOUND_BY_BOTH)
def test_what_the_checker_finds_the_audit_must_find_too(anomaly):
    wrong, kind = FOUND_BY_BOTH[anomaly]

    def verdict() -> Verdict:
        found = check(wrong, EXACTLY_ONCE)
        assert set(found.counts) == {anomaly}
        return found

    same = {"repeated": int(anomaly == "duplicated"), "group": verdict().applied[GROUP]}
    assert compared(verdict(), audited(kind, **same))
    assert not compared(verdict(), audited(**same))


@pytest.mark.parametrize("kind", ["missing", "unknown", "payload", "repeated", "order", "partition"])
def test_what_the_audit_finds_the_checker_must_find_too(kind):
    assert not compared(check(applied(messages(*SENT)), EXACTLY_ONCE), audited(kind))


def test_what_operators_have_moved_is_no_matter():
    sound = applied(messages(*SENT))
    assert compared(check(sound, EXACTLY_ONCE), audited("order", "partition"), sure=False)
    assert not compared(check(sound, EXACTLY_ONCE), audited("payload"), sure=False)


def test_both_must_find_as_many_repeats():
    repeated = applied(messages(A1, B1, A2, A1, A2, A3, X1, S1, S3))
    assert compared(check(repeated, LENIENT), audited("repeated", "repeated", repeated=2), LENIENT)
    assert not compared(check(repeated, LENIENT), audited("repeated", repeated=1), LENIENT)


def test_both_must_count_the_same():
    assert not compared(check(applied(messages(*SENT)), EXACTLY_ONCE), audited(committed=len(ROWS) - 1))
    assert not compared(check(applied(messages(*SENT)), EXACTLY_ONCE), audited(group=len(EVENTS) - 1))
    assert not compared(check(applied(messages(*SENT)), EXACTLY_ONCE), audited(waiting=1))
    unknown = audited()
    unknown.windows.append(WindowAudit(Window("bills", WINDOW.minute), None, 0))
    assert not compared(check(applied(messages(*SENT)), EXACTLY_ONCE), unknown)


def test_of_records_that_were_deleted_only_their_number_is_compared():
    repeated = applied(messages(A1, B1, A2, A1, A2, A3, X1, S1, S3))

    def expired(**found: int) -> Audit:
        audit = audited(**{"group": 0, **found})
        audit.windows[0].state = EXPIRED
        return audit

    assert compared(check(repeated, LENIENT), expired(repeated=1), LENIENT, deleted=True)
    assert not compared(check(repeated, LENIENT), expired(repeated=1), LENIENT)
    assert not compared(check(repeated, LENIENT), expired(repeated=3), LENIENT, deleted=True)
    assert not compared(check(repeated, LENIENT), expired(committed=len(ROWS) - 1), LENIENT, deleted=True)
