"""The checker of ``make chaos`` at-most-once: losses are explained and counted, and nothing else is excused."""

from __future__ import annotations

import datetime as dt
import signal
from dataclasses import replace

import pytest
from chaos.audit import compare
from chaos.checker import EXACTLY_ONCE, LossBound, Verdict, check
from chaos.course import Fault
from chaos.faults import loss_bound_of
from chaos.history import Effect, EventIds, Group, History, Message
from chaos.payments import GROUP
from chaos_histories import (
    A1,
    A2,
    A3,
    B1,
    FAT,
    KINDS,
    ROWS,
    S1,
    S3,
    SENT,
    STRICT1,
    STRICT2,
    X1,
    history,
    message,
    messages,
    names,
)

from relay.audit.findings import Audit, Difference, GroupCount, WindowAudit
from relay.audit.sums import Window

BOUND = LossBound(lost=1, late=1)
PLACE = ("orders", 0)
FREE = {"waiting": [], "dead": [FAT.event, STRICT1.event]}
"""At-most-once no key waits for a dead letter."""


def lossy(sent: list[Message] | None = None, **changes: object) -> History:
    """A sound history at-most-once, but for what is given: strict keys go on behind a dead letter."""
    return history(messages(*SENT, STRICT2) if sent is None else sent, **(FREE | changes))


def at(of: Message, milliseconds: int) -> Message:
    return of._replace(milliseconds=milliseconds)


def test_what_is_lost_is_counted_and_what_nothing_explains_is_an_anomaly():
    one, two = lossy(messages(A1, A2, A3, X1, S1, S3, STRICT2)), lossy(messages(A1, A2, X1, S1, S3, STRICT2))
    verdict = check(one, EXACTLY_ONCE, BOUND)
    assert (verdict.sound, verdict.lost) == (True, 1), verdict
    assert "1 lost" in str(verdict)
    verdict = check(two, EXACTLY_ONCE, BOUND)
    assert (names(verdict), verdict.lost) == ({"lost"}, 2)
    assert names(check(one, EXACTLY_ONCE, LossBound(0, 0))) == {"lost"}
    # Of the other deliveries none may be missing.
    assert names(check(history(messages(A1, A2, A3, X1, S1, S3)), EXACTLY_ONCE)) == {"lost"}


def test_what_was_to_become_a_dead_letter_may_be_lost_too():
    gone = lossy(dead=[STRICT1.event], copies=[])
    assert (check(gone, EXACTLY_ONCE, BOUND).lost, names(check(gone, EXACTLY_ONCE, BOUND))) == (1, set())
    assert names(check(gone, EXACTLY_ONCE, LossBound(0, 9))) == {"lost"}


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lossy(messages(*SENT, STRICT2, B1)), "duplicated"),
        (lossy(messages(*SENT, STRICT2, FAT)), "dead_letters"),
        (lossy([*messages(*SENT, STRICT2), Message(None, "orders", 0, 9, "a", b"d")]), "invented"),
        (lossy(messages(*SENT), waiting=[STRICT2.event]), "stuck"),
        (lossy(messages(A1, A2, A3, X1, S1, S3, STRICT2), dead=[FAT.event, STRICT1.event, B1.event]), "dead_letters"),
    ],
    ids=["twice", "refused and published", "never written", "waits for a dead letter", "dead without reason"],
)
def test_nothing_else_is_excused(wrong, name):
    assert names(check(wrong, EXACTLY_ONCE, LossBound(9, 9))) == {name}


def test_what_is_in_a_request_that_is_refused_is_a_dead_letter_with_it():
    beside = lossy(messages(A1, B1, A2, X1, A3, S3, STRICT2), dead=[FAT.event, STRICT1.event, S1.event])
    assert check(beside, EXACTLY_ONCE, LossBound(0, 0)).sound
    assert names(check(history(beside.messages, dead=beside.dead), EXACTLY_ONCE)) >= {"dead_letters"}


def test_a_copy_may_be_lost_and_is_there_once():
    assert check(lossy(copies=[]), EXACTLY_ONCE, BOUND).sound
    twice = [message(each, number, topic="dead") for number, each in enumerate([FAT, FAT])]
    assert names(check(lossy(copies=twice), EXACTLY_ONCE, BOUND)) == {"dead_letters"}


def test_an_event_may_be_late_only_where_it_was_sent_before_what_it_follows():
    rest = messages(B1, X1, S1, S3, STRICT2)
    rest = [each._replace(offset=10 + each.offset) for each in rest]

    def behind(sent_a1: int, bound: LossBound) -> set[str]:
        sent = [at(message(A2, 0), 5), at(message(A1, 1), sent_a1), at(message(A3, 2), 9)]
        return names(check(lossy([*sent, *rest]), EXACTLY_ONCE, bound))

    assert behind(4, BOUND) == set()
    assert behind(6, BOUND) == {"reordered"}
    assert behind(4, LossBound(9, 0)) == {"reordered"}
    late = check(lossy([at(message(A2, 0), 5), at(message(A1, 1), 4), at(message(A3, 2), 9), *rest]), EXACTLY_ONCE)
    assert names(late) == {"reordered"}


def test_a_retried_event_may_come_behind_later_ones_where_no_key_waits():
    mended = KINDS | {number: replace(KINDS[number], mended=True) for number in (2, 3)}
    retried = lossy(messages(*SENT, STRICT2, STRICT1), kinds=mended, dead=[FAT.event], retried={STRICT1.event: 1})
    assert check(retried, EXACTLY_ONCE, LossBound(0, 0)).sound


# Groups


def applied(rows: list, *, losses: list[range], dead: dict | None = None, strangers: list[Message] = ()) -> History:
    sent = messages(*SENT, STRICT2)
    places = {each.event: each.offset for each in sent}
    effects = [Effect(each.event, PLACE, places[each.event]) for each in rows]
    group = Group(GROUP, ["orders"], effects, dead=dead, losses={PLACE: losses})
    return lossy([*sent, *strangers], groups=[group])


def test_a_group_lacks_only_what_it_has_recorded():
    # A2 has offset 2.
    verdict = check(applied([A1, B1, A3], losses=[range(2, 3)]), EXACTLY_ONCE, BOUND)
    assert (verdict.sound, verdict.given_up) == (True, {GROUP: {A2.event}}), verdict
    assert names(check(applied([A1, B1, A3], losses=[range(3, 9)]), EXACTLY_ONCE, BOUND)) == {"unapplied"}
    # Of a range that was given up some may be applied, none of them twice.
    verdict = check(applied([A1, B1, A2, A3], losses=[range(9)]), EXACTLY_ONCE, BOUND)
    assert (verdict.sound, verdict.given_up) == (True, {}), verdict
    assert names(check(applied([A1, B1, A2, A2, A3], losses=[range(9)]), EXACTLY_ONCE, BOUND)) == {"applied_twice"}


def test_the_messages_of_strangers_that_a_group_gave_up_are_no_dead_letters():
    strange = [
        Message(None, "orders", 0, 20, "s", b"d", stranger="applied"),
        Message(None, "orders", 0, 21, "s", b"d", stranger="dead"),
    ]
    given_up = applied([A1, B1, A2, A3], losses=[range(20, 22)], dead={}, strangers=strange)
    assert check(given_up, EXACTLY_ONCE, BOUND).sound
    silent = applied([A1, B1, A2, A3], losses=[], dead={}, strangers=strange)
    assert names(check(silent, EXACTLY_ONCE, BOUND)) == {"unapplied", "dead_letters"}


# The bound


class Ended:
    """A relay that has ended, as Relays has it."""

    running = False

    def __init__(self, status: int, *lost: int) -> None:
        self._status = status
        self._log = "".join(f'{{"event": "events may be lost, as …", "events": {count}}}\n' for count in lost)

    def wait(self) -> int:
        return self._status

    def log(self) -> str:
        return self._log


class Present:
    all = (Ended(0, 2, 3), Ended(-signal.SIGKILL, 1), Ended(0))


def test_relays_explain_what_they_have_counted_and_a_turn_where_one_was_killed():
    assert loss_bound_of([Fault(1.0, "relay_kill"), Fault(2.0, "kafka_cut")], Present(), 100, 1) == (106, 106)
    broken = [Fault(1.0, "broker_pause")]
    # One broker has what it has acknowledged when it is back; of three another one leads meanwhile.
    assert loss_bound_of(broken, Present(), 100, 1) == (106, 406)
    assert loss_bound_of(broken, Present(), 100, 3) == (406, 406)


# The audit

IDS = EventIds("a run", 1.8e9)
WINDOW = Window("orders", 30_000_000)


def compared(verdict: Verdict, *, lost: int, given_up: list, losses: LossBound | None = BOUND) -> bool:
    """Return whether the checker agrees with an audit that has found this."""
    found = Audit(WINDOW.start, WINDOW.start + dt.timedelta(minutes=1), b"key")
    groups = {GROUP: GroupCount(None)}
    # Two are dead letters.
    window = WindowAudit(WINDOW, len(ROWS), len(ROWS) - 2 - lost, dead=2, groups=groups)
    found.windows.append(window)
    for event_id, group in [(None, None)] * bool(lost) + [(str(IDS.id_of(one.event)), GROUP) for one in given_up]:
        found.add(WINDOW, Difference("missing", event_id, "orders", WINDOW.start, "a text", group))
    compare(found, IDS, verdict, EXACTLY_ONCE, sure=True, losses=losses)
    return "audit" not in verdict.counts


def test_the_audit_must_find_as_many_lost_events_and_the_same_that_were_given_up():
    def verdict() -> Verdict:
        return check(applied([A1, B1, A3], losses=[range(2, 3)]), EXACTLY_ONCE, BOUND)

    assert compared(verdict(), lost=0, given_up=[A2])
    assert not compared(verdict(), lost=1, given_up=[A2])
    assert not compared(verdict(), lost=0, given_up=[])
    assert not compared(verdict(), lost=0, given_up=[A1])

    def lost() -> Verdict:
        sent = messages(A1, A2, A3, X1, S1, S3, STRICT2)
        effects = [Effect(each.event, PLACE, each.offset) for each in sent[:3]]
        return check(lossy(sent, groups=[Group(GROUP, ["orders"], effects)]), EXACTLY_ONCE, BOUND)

    assert lost().sound
    assert compared(lost(), lost=1, given_up=[])
    assert not compared(lost(), lost=0, given_up=[])
    assert not compared(lost(), lost=2, given_up=[])
