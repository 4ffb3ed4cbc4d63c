"""The checker of ``make chaos`` on random histories: sound ones pass, and each mutation of one is caught."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from chaos.checker import EXACTLY_ONCE, RepeatBound, check
from chaos.history import (
    Committed,
    History,
    Message,
    Sightings,
    event_of,
)
from chaos_histories import KINDS, message, names, row
from hypothesis import given
from hypothesis import strategies as st


# Random histories
def sound_history(chance: random.Random, *, repeats: bool) -> tuple[list[Committed], list[Message], int]:
    """Rows, what stands on the topics, and how many events were attempted; at-least-once with what was sent again."""
    rows: list[Committed] = []
    seqs: dict[tuple[int, str], int] = {}
    number = 0
    for _ in range(chance.randint(4, 40)):
        if chance.random() < 0.2:
            number += 1  # rolled back
        kind, key = chance.randrange(2), chance.choice("abc")
        seqs[kind, key] = seqs.get((kind, key), 0) + 1
        rows.append(row(number, key, seqs[kind, key], kind=kind))
        number += 1
    logs: dict[tuple[int, int], list[Committed]] = {}
    for each in rows:
        logs.setdefault((each.kind, ord(each.key) % 2), []).append(each)
    sent: list[Message] = []
    for (_, partition), log in logs.items():
        if repeats and chance.random() < 0.7:
            # A turn is sent again from its beginning.
            begin = chance.randrange(len(log))
            end = chance.randint(begin, len(log))
            log[end:end] = log[begin:end]
        sent += [message(each, 2 * offset, partition=partition) for offset, each in enumerate(log)]
    return rows, sent, number + 1


def drop(rows: list[Committed], sent: list[Message], chance: random.Random) -> str:
    gone = chance.choice(sent).event
    sent[:] = [each for each in sent if each.event != gone]
    return "lost"


def duplicate(rows: list[Committed], sent: list[Message], chance: random.Random) -> str:
    again = chance.choice(sent)
    last = max(each.offset for each in sent if each[1:3] == again[1:3])
    sent.append(again._replace(offset=last + 1))
    return "duplicated"


def swap(rows: list[Committed], sent: list[Message], chance: random.Random) -> str:
    """Two events of one key change places."""
    by_key: dict[tuple[str, str], list[int]] = {}
    for index, each in enumerate(sent):
        by_key.setdefault((each.topic, each.key), []).append(index)
    pairs = [indices for indices in by_key.values() if len(indices) > 1]
    if not pairs:
        return drop(rows, sent, chance)
    first, second = sorted(chance.sample(chance.choice(pairs), 2))
    one, other = sent[first], sent[second]
    sent[first], sent[second] = other._replace(offset=one.offset), one._replace(offset=other.offset)
    return "reordered"


def alter(rows: list[Committed], sent: list[Message], chance: random.Random) -> str:
    index = chance.randrange(len(sent))
    sent[index] = sent[index]._replace(digest=b"other")
    return "corrupted"


def move(rows: list[Committed], sent: list[Message], chance: random.Random) -> str:
    """One message of a key that has several goes to a partition that the key does not have."""
    keys = [(each.topic, each.key) for each in sent]
    several = [index for index, key in enumerate(keys) if keys.count(key) > 1]
    if not several:
        return drop(rows, sent, chance)
    sent.append(sent.pop(chance.choice(several))._replace(partition=7, offset=0))
    return "wrong_partition"


def reroute(rows: list[Committed], sent: list[Message], chance: random.Random) -> str:
    moved = sent.pop(chance.randrange(len(sent)))
    sent.append(moved._replace(topic="bills" if moved.topic == "orders" else "orders", partition=7))
    return "misrouted"


def uncommit(rows: list[Committed], sent: list[Message], chance: random.Random) -> str:
    """Postgres forgets a row in a crash."""
    rows.remove(chance.choice(rows))
    return "aborted"


def invent(rows: list[Committed], sent: list[Message], chance: random.Random) -> str:
    sent.append(Message(event_of(0, 10**6), "orders", 5, 0, "z", b"d"))
    return "invented"


MUTATIONS: list[Callable[..., str]] = [drop, duplicate, swap, alter, move, reroute, uncommit, invent]


@given(st.randoms(use_true_random=False), st.booleans())
def test_a_random_sound_history_passes(chance, repeats):
    rows, sent, attempted = sound_history(chance, repeats=repeats)
    bound = RepeatBound(turn_events=1000, faults=1, hits=1) if repeats else EXACTLY_ONCE
    seen = Sightings()
    for each in sent[: chance.randint(0, len(sent))]:
        seen.add((each.topic, each.partition), each.offset, each.event)
    verdict = check(History(KINDS, rows, {0: attempted}, sent, seen=seen), bound)
    assert verdict.sound, verdict
    assert verdict.repeats == len(sent) - len(rows)


@pytest.mark.parametrize("mutation", MUTATIONS)
@given(chance=st.randoms(use_true_random=False))
def test_a_random_history_with_one_mutation_is_caught(mutation, chance):
    rows, sent, attempted = sound_history(chance, repeats=False)
    expected = mutation(rows, sent, chance)
    assert names(check(History(KINDS, rows, {0: attempted}, sent), EXACTLY_ONCE)) == {expected}


@given(chance=st.randoms(use_true_random=False))
def test_a_message_that_changes_between_two_readers_is_caught(chance):
    rows, sent, attempted = sound_history(chance, repeats=False)
    seen = Sightings()
    changed = chance.randrange(len(sent))
    for index, each in enumerate(sent):
        offset = each.offset + 1 if index == changed else each.offset
        seen.add((each.topic, each.partition), offset, each.event)
    verdict = check(History(KINDS, rows, {0: attempted}, sent, seen=seen), EXACTLY_ONCE)
    assert verdict.counts == {"unstable": 1}
