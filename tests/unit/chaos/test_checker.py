"""The checker of ``make chaos``: it passes sound histories, and names each anomaly in one that is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from chaos.checker import ANOMALIES, EXACTLY_ONCE, RepeatBound, check
from chaos.history import (
    Committed,
    Effect,
    EventIds,
    Group,
    History,
    Kind,
    Message,
    OnceSpan,
    Place,
    Replay,
    Sightings,
    digest_of,
    event_of,
    partition_of,
)
from chaos_histories import (
    A1,
    A2,
    A3,
    B1,
    FAT,
    KINDS,
    LENIENT,
    ROLLED_BACK,
    ROW_ROLLED_BACK,
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
    row,
)

from relay.audit.sums import minute_of_id


def test_a_sound_history():
    verdict = check(history(), EXACTLY_ONCE)
    assert verdict.sound, verdict
    assert (verdict.messages, verdict.committed, verdict.repeats) == (7, 10, 0)
    assert (verdict.dead, verdict.blocked) == (2, 1)
    assert str(verdict).startswith("sound")


def sightings(*seen: tuple[int, int]) -> Sightings:
    found = Sightings()
    for offset, event in seen:
        found.add(("orders", 0), offset, event)
    return found


def applied(*rows: Committed, sent: list[Message] | None = None, **how: bool) -> History:
    """A history whose group has applied these events of the topic ``orders``, in this order."""
    sent = messages(*SENT) if sent is None else sent
    places = {each.event: each.offset for each in reversed(sent)}
    effects = [Effect(each.event, ("orders", 0), places.get(each.event, 40)) for each in rows]
    return history(sent, groups=[Group("effects", ["orders"], effects, **how)])


WRONG: dict[str, tuple[History, str]] = {
    "lost": (history(messages(A1, A2, A3, X1, S1, S3)), "lost"),
    "the first of a key is lost": (history(messages(A2, A3, B1, X1, S1, S3)), "lost"),
    "twice": (history(messages(*SENT, B1)), "duplicated"),
    "rolled back": (history([*messages(*SENT), Message(ROLLED_BACK, "orders", 0, 9, "a", b"d")]), "aborted"),
    "a dead letter that was rolled back": (history(dead=[FAT.event, STRICT1.event, ROLLED_BACK]), "aborted"),
    "behind a later one": (history(messages(A2, A1, A3, B1, X1, S1, S3)), "reordered"),
    "another partition": (history([*messages(A1, A2, B1, X1, S1, S3), message(A3, 0, partition=1)]), "wrong_partition"),
    "another payload": (
        history([*messages(A1, A2, A3, X1, S1, S3), message(B1, 9)._replace(digest=b"other")]),
        "corrupted",
    ),
    "another key": (history([*messages(A1, A2, A3, X1, S1, S3), message(B1, 9)._replace(key="c")]), "corrupted"),
    "another type's topic": (
        history([*messages(A1, A2, A3, X1, S1, S3), message(B1, 0, topic="bills", partition=1)]),
        "misrouted",
    ),
    "never written": (history([*messages(*SENT), Message(event_of(0, 11), "orders", 0, 9, "a", b"d")]), "invented"),
    "a writer that is not there": (
        history([*messages(*SENT), Message(event_of(7, 0), "orders", 0, 9, "a", b"d")]),
        "invented",
    ),
    "somebody else's": (history([*messages(*SENT), Message(None, "orders", 0, 9, "a", b"d")]), "invented"),
    "seen and gone": (history(seen=sightings((0, A1.event), (40, A2.event))), "unstable"),
    "seen as another": (history(seen=sightings((0, A2.event))), "unstable"),
    "dead without reason": (
        history(messages(A1, A2, A3, X1, S1, S3), dead=[FAT.event, STRICT1.event, B1.event]),
        "dead_letters",
    ),
    "refused and not dead": (history(dead=[STRICT1.event], copies=[message(STRICT1, 1)]), "dead_letters"),
    "refused and published": (history(messages(S1, FAT, *SENT[:4], A3, S3)), "dead_letters"),
    "no copy": (history(copies=[message(FAT, 0, topic="dead")]), "dead_letters"),
    "a copy of one that lives": (
        history(copies=[message(each, n, topic="dead") for n, each in enumerate([FAT, STRICT1, B1])]),
        "dead_letters",
    ),
    "two copies": (
        history(copies=[message(each, n, topic="dead") for n, each in enumerate([FAT, STRICT1, FAT])]),
        "dead_letters",
    ),
    "published before a dead one of its key": (
        history([*messages(*SENT), message(STRICT2, 9)], waiting=[]),
        "reordered",
    ),
    "waits for nothing": (history(messages(A1, A2, A3, X1, S1, S3), waiting=[STRICT2.event, B1.event]), "stuck"),
    "waits where keys go on": (history(messages(*SENT[:6]), waiting=[STRICT2.event, S3.event]), "stuck"),
    "published and still there": (history(waiting=[STRICT2.event, A3.event]), "stuck"),
    "not applied": (applied(A1, B1, A2), "unapplied"),
    "applied twice": (applied(A1, B1, B1, A2, A3), "applied_twice"),
    "applied and rolled back": (applied(A1, B1, A2, A3, ROW_ROLLED_BACK), "misapplied"),
    "applied behind a later one": (applied(A1, A2, B1, A3), "applied_late"),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_anomaly_is_named(case):
    wrong, name = WRONG[case]
    assert names(check(wrong, EXACTLY_ONCE)) == {name}


def test_every_anomaly_has_a_case():
    # What the audit and the specification say is compared elsewhere.
    assert {name for _, name in WRONG.values()} == set(ANOMALIES) - {"audit", "unexplained"}


def test_each_event_that_was_applied_once_is_counted_however_often_it_was_published():
    repeated = messages(*SENT, B1)
    verdict = check(applied(A1, B1, A2, A3, sent=repeated), LENIENT)
    assert (verdict.sound, verdict.applied) == (True, {"effects": 4}), verdict


def test_each_message_has_an_effect_where_a_group_does_not_know_events():
    sent = messages(*SENT, B1)
    effects = [Effect(each.event, ("orders", 0), each.offset) for each in sent if each.topic == "orders"]
    assert check(history(sent, groups=[Group("results", ["orders"], effects, per_message=True)]), LENIENT).sound
    once = history(sent, groups=[Group("results", ["orders"], effects[:-1], per_message=True)])
    assert names(check(once, LENIENT)) == {"unapplied"}
    twice = history(sent, groups=[Group("results", ["orders"], [*effects, effects[-1]], per_message=True)])
    assert names(check(twice, LENIENT)) == {"applied_twice"}


STRANGE = [
    Message(None, "orders", 0, 20, "s", b"d", stranger="applied"),
    Message(None, "orders", 0, 21, "s", b"d", stranger="dead"),
    Message(None, "bills", 0, 22, "s", b"d", stranger="dead"),
]
DEAD = {(("orders", 0), 21): 1}


def beside_strangers(places: Sequence[int], dead: Mapping[tuple[Place, int], int]) -> set[str]:
    """Return what is wrong where a group has these effects of strangers, and these dead letters."""
    sent = messages(*SENT)
    effects = [Effect(each.event, ("orders", 0), each.offset) for each in sent if each.topic == "orders"]
    effects += [Effect(None, ("orders", 0), offset) for offset in places]
    verdict = check(history([*sent, *STRANGE], groups=[Group("g", ["orders"], effects, dead=dead)]), EXACTLY_ONCE)
    assert (verdict.strangers, verdict.messages) == (3, 7)
    return names(verdict)


def test_the_messages_of_strangers_become_what_they_have_to():
    assert beside_strangers([20], DEAD) == set()
    assert beside_strangers([], DEAD) == {"unapplied"}
    assert beside_strangers([20, 20], DEAD) == {"applied_twice"}
    assert beside_strangers([20, 21], DEAD) == {"misapplied"}
    # Aborted: there is no message.
    assert beside_strangers([20, 23], DEAD) == {"misapplied"}
    assert beside_strangers([20], {}) == {"dead_letters"}
    assert beside_strangers([20], {(("orders", 0), 21): 2}) == {"dead_letters"}
    assert beside_strangers([20], {**DEAD, (("orders", 0), 20): 1}) == {"dead_letters"}
    assert beside_strangers([20], {**DEAD, (("orders", 0), 0): 1}) == {"dead_letters"}


def test_only_the_effects_of_a_key_are_in_order_where_keys_are_what_a_group_orders_by():
    assert check(applied(A1, A2, B1, A3, by_key=True), EXACTLY_ONCE).sound
    assert names(check(applied(A2, A1, B1, A3, by_key=True), EXACTLY_ONCE)) == {"applied_late"}


def test_repeats_that_faults_explain():
    repeated = history(messages(A1, A2, B1, A1, A2, A3, X1, S1, S3))
    verdict = check(repeated, LENIENT)
    assert verdict.sound, verdict
    assert verdict.repeats == 2
    assert names(check(repeated, EXACTLY_ONCE)) == {"duplicated"}


def test_a_repeat_does_not_excuse_a_later_event_before_an_earlier_one():
    """A turn that is sent again begins where it began before: a2 must not get there without a1."""
    assert names(check(history(messages(A2, A1, A2, A3, B1, X1, S1, S3)), LENIENT)) == {"reordered"}


def test_more_repeats_than_the_turns_in_flight():
    few = RepeatBound(turn_events=1, faults=9, hits=1)
    assert few.events == 2
    assert check(history(messages(*SENT, A1, A2)), few).sound
    assert names(check(history(messages(*SENT, A1, A2, A3)), few)) == {"duplicated"}


def test_an_event_that_is_repeated_more_often_than_anything_failed():
    assert check(history(messages(*SENT, A3, A3)), LENIENT).sound
    assert names(check(history(messages(*SENT, A3, A3, A3)), LENIENT)) == {"duplicated"}


def test_what_was_seen_and_is_there():
    assert check(history(seen=sightings((0, A1.event), (2, A2.event))), EXACTLY_ONCE).sound


def test_ids_are_recognized_without_a_list():
    ids, others = EventIds("one run", 1.8e9), EventIds("another run", 1.8e9)
    for event in (event_of(0, 0), event_of(3, 12_345_678), event_of(4095, 2**40 - 1)):
        assert ids.event(str(ids.id_of(event))) == event
        assert others.event(str(ids.id_of(event))) is None
    assert ids.id_of(5).version == 7
    assert minute_of_id(ids.id_of(event_of(0, 11_999)).bytes) == 30_000_000
    assert minute_of_id(ids.id_of(event_of(0, 12_000)).bytes) == 30_000_001
    assert ids.event("no id") is None


def test_digests():
    assert digest_of(None, None) != digest_of(b"", None)
    assert digest_of(b"a", None) != digest_of(b"b", None)
    assert digest_of(b'{"a": 1, "b": 2}', "application/json") == digest_of(b'{"b":2,"a":1}', "application/json")
    assert digest_of(b'{"a": 1}', "application/json") != digest_of(b'{"a": 1}', "application/octet-stream")


# What operators change
MENDED = KINDS | {number: replace(KINDS[number], mended=True) for number in (2, 3)}

# Of two partitions, later three: "a" moves from 0 to 1.
SPREAD = KINDS | {0: Kind("Order", "orders", partitions=(2, 3))}
WHOLE_TOPIC = Replay(2, topic="orders")


def replayed(of: Committed, offset: int, mark: str = "2026-01-01T00:00:00Z") -> Message:
    return message(of, offset)._replace(replay=mark)


def moved(*rows: tuple[Committed, int]) -> list[Message]:
    """Messages of topics in partitions of their own choice; B1 and all others where they belong."""
    sent = [message(each, offset, partition=partition) for offset, (each, partition) in enumerate(rows)]
    own = [message(B1, 50, partition=partition_of("b", 2))]
    return sent + own + [message(each, 50 + n) for n, each in enumerate((X1, S1, S3))]


def test_keys_lie_where_java_has_them():
    assert [partition_of(key, 12) for key in ("21", "foobar", "a-little-bit-longer-string")] == [0, 6, 11]
    assert (partition_of("a", 2), partition_of("a", 3)) == (0, 1)


FREED = history(messages(*SENT, STRICT2), dead=[FAT.event], waiting=[], discarded=[STRICT1.event])
RETRIED = history(
    messages(*SENT, STRICT1, STRICT2), kinds=MENDED, dead=[FAT.event], waiting=[], retried={STRICT1.event: 1}
)
REPLAYED = history([*messages(*SENT), replayed(A1, 20), replayed(A2, 21)], replays=[WHOLE_TOPIC])
BEHIND = history(messages(*SENT, STRICT1, STRICT2), kinds=MENDED)

SOUND: dict[str, tuple[History, RepeatBound]] = {
    "discarded, and its key goes on": (FREED, EXACTLY_ONCE),
    "retried after the topic was mended": (RETRIED, EXACTLY_ONCE),
    "died twice, with two copies": (
        replace(
            history(retried={STRICT1.event: 1}),
            copies=[message(each, n, topic="dead") for n, each in enumerate([FAT, STRICT1, STRICT1])],
        ),
        EXACTLY_ONCE,
    ),
    "retried, and behind later ones where keys go on": (
        history(messages(*SENT, FAT), kinds=MENDED, dead=[STRICT1.event], retried={FAT.event: 1}),
        EXACTLY_ONCE,
    ),
    "published before it died, by a relay that died": (
        history(messages(*SENT[:5], FAT, *SENT[5:]), kinds=MENDED),
        LENIENT,
    ),
    "published before it died, with what waits behind it": (BEHIND, LENIENT),
    "replayed": (REPLAYED, EXACTLY_ONCE),
    "replayed twice": (
        history(
            [*messages(*SENT), replayed(A1, 20), replayed(A1, 21, "2026-01-01T00:00:09Z")],
            replays=[Replay(1, kind="Order", key="a"), Replay(1, kind="Order", key="a")],
        ),
        EXACTLY_ONCE,
    ),
    "a replay repeated": (
        replace(REPLAYED, messages=[*messages(*SENT), *(replayed(each, n) for n, each in enumerate([A1, A2, A1], 20))]),
        LENIENT,
    ),
    "moved to an added partition, and back with a relay that has not heard of it": (
        history(moved((A1, 0), (A2, 1), (A3, 0)), kinds=SPREAD),
        EXACTLY_ONCE,
    ),
    "repeats in another partition": (
        history(moved((A1, 0), (A2, 0), (A2, 1), (A1, 1), (A3, 1)), kinds=SPREAD),
        LENIENT,
    ),
    "repeated before exactly-once": (
        history(messages(A1, A1, *SENT[1:]), once=[OnceSpan({("orders", 0): 1})]),
        LENIENT,
    ),
    "repeated after exactly-once ended": (
        history([*messages(*SENT), message(A3, 50), message(A3, 51)], once=[OnceSpan({}, {("orders", 0): 3})]),
        LENIENT,
    ),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_operators_explain(case):
    sound, bound = SOUND[case]
    verdict = check(sound, bound)
    assert verdict.sound, verdict


def test_published_and_still_there():
    """At least once that is explained where the dead event before them was published as well."""
    alone = history(messages(*SENT, STRICT2), kinds=MENDED)
    assert names(check(alone, LENIENT)) == {"reordered", "stuck"}
    assert names(check(BEHIND, EXACTLY_ONCE)) == {"dead_letters", "reordered", "stuck"}


UNSOUND: dict[str, tuple[History, RepeatBound, str]] = {
    "a freed key out of order": (
        history(
            messages(*SENT, row(10, "t", 3, kind=3), STRICT2),
            committed=[*ROWS, row(10, "t", 3, kind=3)],
            dead=[FAT.event],
            waiting=[],
            discarded=[STRICT1.event],
        ),
        EXACTLY_ONCE,
        "reordered",
    ),
    "a retried event behind later ones of a key that waits": (
        replace(RETRIED, messages=messages(*SENT, STRICT2, STRICT1)),
        EXACTLY_ONCE,
        "reordered",
    ),
    "retried by nobody, and behind later ones": (
        history(messages(*SENT, FAT), kinds=MENDED, dead=[STRICT1.event], copies=[message(STRICT1, 0, topic="dead")]),
        EXACTLY_ONCE,
        "reordered",
    ),
    "discarded, and published": (
        replace(FREED, messages=messages(*SENT, STRICT1, STRICT2)),
        EXACTLY_ONCE,
        "dead_letters",
    ),
    "discarded without a copy": (replace(FREED, copies=[message(FAT, 0, topic="dead")]), EXACTLY_ONCE, "dead_letters"),
    "discarded without reason": (
        history(messages(A1, A2, A3, X1, S1, S3), discarded=[B1.event]),
        EXACTLY_ONCE,
        "dead_letters",
    ),
    "discarded and never written": (history(discarded=[event_of(0, 11)]), EXACTLY_ONCE, "invented"),
    "retried, and gone": (replace(RETRIED, messages=messages(*SENT, STRICT2)), EXACTLY_ONCE, "dead_letters"),
    "a replay is missing": (replace(REPLAYED, messages=[*messages(*SENT), replayed(A1, 20)]), EXACTLY_ONCE, "lost"),
    "a replay that is one message too many": (
        replace(REPLAYED, messages=[*messages(*SENT), *(replayed(each, n) for n, each in enumerate([A1, A2, A3], 20))]),
        EXACTLY_ONCE,
        "invented",
    ),
    "another key's replay": (replace(REPLAYED, replays=[Replay(2, kind="Order", key="b")]), EXACTLY_ONCE, "invented"),
    "a replay in another order": (
        replace(REPLAYED, messages=[*messages(*SENT), replayed(A2, 20), replayed(A1, 21)]),
        EXACTLY_ONCE,
        "reordered",
    ),
    "a replay twice": (
        replace(REPLAYED, messages=[*messages(*SENT), *(replayed(each, n) for n, each in enumerate([A1, A2, A1], 20))]),
        EXACTLY_ONCE,
        "duplicated",
    ),
    "a replay does not excuse a repeat": (
        replace(REPLAYED, messages=[*messages(*SENT), replayed(A1, 20), replayed(A2, 21), message(A1, 22)]),
        EXACTLY_ONCE,
        "duplicated",
    ),
    "in a partition that the key never had": (
        history(moved((A1, 0), (A2, 2), (A3, 1)), kinds=SPREAD),
        EXACTLY_ONCE,
        "wrong_partition",
    ),
    "out of order in an added partition": (
        history(moved((A1, 0), (A3, 1), (A2, 1)), kinds=SPREAD),
        EXACTLY_ONCE,
        "reordered",
    ),
    "in both partitions, exactly once": (
        history(moved((A1, 0), (A2, 0), (A2, 1), (A3, 1)), kinds=SPREAD),
        EXACTLY_ONCE,
        "duplicated",
    ),
    "repeated while there was only exactly-once": (
        history([*messages(*SENT), message(A3, 50)], once=[OnceSpan({("orders", 0): 3})]),
        LENIENT,
        "duplicated",
    ),
    "first published exactly once, and repeated later": (
        history([*messages(*SENT), message(A1, 50)], once=[OnceSpan({}, {("orders", 0): 3})]),
        LENIENT,
        "duplicated",
    ),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_what_operators_do_not_explain(case):
    wrong, bound, name = UNSOUND[case]
    assert names(check(wrong, bound)) == {name}


def test_the_end_of_what_was_seen():
    assert sightings((0, A1.event), (7, A2.event)).ends() == {("orders", 0): 8}
    assert Sightings().ends() == {}
