"""The course of ``make chaos``: the same seed gives the same course, and courses hold what they are meant to."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import islice, product

import pytest
from chaos.course import (
    BLOCKED_SECONDS,
    HELD_KEYS,
    HOT_KEY,
    KIND_NAMES,
    LATER,
    MAX_SIZE,
    MEMBERS,
    ORDER,
    REFUSED_BYTES,
    SMALL,
    STRICT,
    Configuration,
    Course,
    course_of,
    transactions,
)

from relay import failpoints

CONFIGURATIONS = [
    Configuration(source, delivery, brokers)
    for source, delivery, brokers in product(("polling", "wal"), ("at-least-once", "exactly-once"), (1, 3))
]
LOSSY = Configuration("polling", "at-most-once", 3)


@pytest.mark.parametrize("configuration", CONFIGURATIONS[::7], ids=str)
def test_the_same_seed_gives_the_same_course(configuration):
    for seed in range(3):
        course = course_of(seed, configuration)
        assert course == course_of(seed, configuration)
        assert str(course) == str(course_of(seed, configuration))
        assert course.faults != course_of(seed + 1, configuration).faults
        for writer in range(2):
            first = list(islice(transactions(seed, configuration, writer), 50))
            assert first == list(islice(transactions(seed, configuration, writer), 50))
            assert first != list(islice(transactions(seed + 1, configuration, writer), 50))
    assert list(islice(transactions(0, configuration, 0), 9)) != list(islice(transactions(0, configuration, 1), 9))


def courses(configuration: Configuration) -> list[Course]:
    return [course_of(seed, configuration) for seed in range(1, 6)]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_five_seeds_have_every_fault(configuration):
    found = courses(configuration)
    kinds = {fault.name for course in found for fault in course.faults}
    expected = {"relay_kill", "relay_term", "relay_pause", "broker_kill", "broker_pause", "postgres_kill"}
    expected |= {"postgres_cut", "postgres_blackhole", "promote"}
    assert kinds == expected | {"kafka_cut", "kafka_blackhole", "kafka_requests"}
    replicated = configuration.brokers > 1 and configuration.delivery == "exactly-once"
    assert {course.lanes for course in found} == ({4, 64} if replicated else {4, 64, 256})
    assert {course.last_relays for course in found} <= {1, 3}
    for course in found:
        assert len(course.faults) >= 8
        assert len(course.member_faults) >= 10
        assert all(0 < fault.at < configuration.seconds for fault in course.faults)
        assert all(fault.target < max(3, configuration.brokers) for fault in course.faults)
        assert 0 < course.topic_created_at < configuration.seconds / 2
        assert sum(fault.name == "promote" for fault in course.faults) == course.standby
    struck = {(fault.name, fault.target) for course in found for fault in course.member_faults}
    assert struck >= {(name, target) for name in ("member_kill", "member_pause") for target in range(MEMBERS)}


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_failpoints_are_those_of_the_configuration(configuration, monkeypatch):
    monkeypatch.setattr(failpoints, "_armed", {})
    armed = " ".join(text for course in courses(configuration) for text in course.failpoints if text)
    failpoints.arm(armed)
    assert ("txn." in armed) == (configuration.delivery == "exactly-once")
    assert ("stream." in armed) == (configuration.source == "wal")
    assert "reconcile." not in armed
    assert "heal." not in armed
    assert course_of(1, configuration).failpoint(10**6) == ""


ACTS = {"discard", "mend", "retry", "pause", "drain", "replay", "partitions", "switch", "delivery", "lanes"}
ACTS |= {"retention"}


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_five_seeds_have_every_act(configuration):
    found = courses(configuration)
    assert {act.name for course in found for act in course.acts} == ACTS
    for course in found:
        assert (
            course.acts == course_of(course.seed, configuration).acts != course_of(course.seed + 1, configuration).acts
        )
        assert len(course.acts) >= 15
        assert all(0 < act.at < configuration.seconds for act in course.acts)
        assert all(act.lane is None or act.lane < course.lanes for act in course.acts)
        # The slot of a source that was switched a moment ago would be lost with the primary.
        assert not (course.standby and any(act.name == "switch" for act in course.acts))


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_keys_are_freed_after_a_calm_in_which_nothing_was_struck_and_none_was_freed(configuration):
    for course in courses(configuration):
        frees = [act.at for act in course.acts if act.name in {"discard", "mend"} and act.kind == STRICT]
        moved = [fault.at for fault in course.faults] + [fault.at + fault.seconds for fault in course.faults]
        moved += [act.at for act in course.acts if act.name in {"switch", "delivery", "pause", "drain", "retry"}]
        calm = [at for at in frees if not any(at - 12 < other < at for other in moved)]
        assert any(not any(at - BLOCKED_SECONDS < other < at for other in frees) for at in calm)


def test_at_most_once_nothing_is_done_that_it_does_not_promise_to_bear():
    found = [course_of(seed, LOSSY) for seed in range(1, 21)]
    acts = {act.name for course in found for act in course.acts}
    assert acts == ACTS - {"replay", "switch", "delivery", "retention"}
    requests = {(fault.request, fault.action) for course in found for fault in course.faults if fault.request}
    assert {request for request, _ in requests} == {"produce", "metadata"}
    assert ("produce", "delay_request") in requests
    assert "duplicate_request" not in {action for _, action in requests}
    armed = " ".join(text for course in found for text in course.failpoints)
    assert "txn." not in armed
    assert "stream." not in armed
    # The four seeds of the matrix have both kinds of groups, each with both numbers of lanes, and a promotion.
    assert [course.gives_up for course in found[:4]] == [True, True, False, False]
    assert [course.standby for course in found[:4]] == [False, False, True, False]
    assert not any(course_of(seed, CONFIGURATIONS[0]).gives_up for seed in range(1, 5))
    assert [course.static for course in found[:4]] == [False, True, True, False]


def test_the_load_has_what_the_relay_must_bear():
    some = list(islice(transactions(1, CONFIGURATIONS[0], 0), 1500))
    writes = [write for each in some for write in each.writes]
    sizes = [write.size for write in writes]
    assert min(sizes) == -1
    assert {1, 2, 3} <= set(sizes)
    assert 500_000 < max(sizes) <= MAX_SIZE
    assert statistics.mean(sizes) < 5000
    assert 0.15 < sum(write.key == HOT_KEY for write in writes) / len(writes) < 0.25
    assert len({write.key for write in writes}) > 15_000
    counts = Counter(write.kind for write in writes)
    assert set(counts) == set(range(len(KIND_NAMES)))
    assert counts[ORDER] > len(writes) / 2
    poisoned = [write for write in writes if write.poisoned]
    assert {write.kind for write in poisoned} == {SMALL, STRICT}
    assert len(writes) / 1000 < len(poisoned) < len(writes) / 250
    assert all(write.size >= 2 * REFUSED_BYTES and not write.json for write in poisoned)
    assert all(write.size <= 2000 for write in writes if write.kind in {LATER, SMALL, STRICT} and not write.poisoned)
    held = Counter(write.key for write in writes if write.kind == STRICT and write.key.startswith("h"))
    assert len(held) == HELD_KEYS
    assert min(held.values()) > len(writes) / 150
    assert {write.key for write in poisoned} >= held.keys()
    assert max(len(each.writes) for each in some) > 250
    for which in (lambda each: each.hold, lambda each: each.rolled_back, lambda each: each.undone):
        assert 0 < sum(bool(which(each)) for each in some) < len(some) / 5
    assert 0.4 < sum(each.lossy for each in some) / len(some) < 0.6


def test_late_transactions_and_savepoints_hold_nobody_up():
    """They lock keys of their own writer: two writers can't wait for each other."""
    for writer in range(2):
        for each in islice(transactions(1, CONFIGURATIONS[0], writer), 500):
            own = each.undone + (each.writes if each.hold else ())
            assert all(write.key.startswith(f"w{writer}-") for write in own)
