"""The checker of ``make chaos`` on random histories: sound ones pass. test_checker.py has each anomaly."""

from __future__ import annotations

import random

from chaos.checker import EXACTLY_ONCE, RepeatBound, check
from chaos.history import Committed, History, Message, Sightings
from chaos_histories import KINDS, message, row
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
