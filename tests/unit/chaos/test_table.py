"""The table of ``make chaos``: what it sums up."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from chaos import table
from chaos.course import Configuration, course_of
from chaos.faults import ServerHand
from chaos.history import EventIds, event_of
from chaos.recovery import Clock, EffectWatch, RecoveryWatch
from chaos.workload import Pace

ROW = {
    "source": "polling",
    "delivery": "at-least-once",
    "brokers": 1,
    "consumers": "inbox",
    "events": 10,
    "faults": {"relay_kill": 2},
    "repeats": 0,
    "lost": 2,
    "anomalies": {},
    "recovery_p50": 0.5,
    "recovery_max": 15.0,
    "catch_up_p50": 1,
    "catch_up_max": 2,
    "effect_p50": None,
    "effect_max": None,
}
SPARK = {**ROW, "consumers": "spark", "effect_p50": 3.0, "effect_max": 4.0}


def page(tmp_path, *rows):
    for row in rows:
        table.append(tmp_path / "rows", row)
    table.write(tmp_path / "rows", tmp_path / "page")
    assert [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()] == list(rows)
    return (tmp_path / "page").read_text()


def test_a_slow_recovery_is_counted_and_no_anomaly(tmp_path):
    slow = [{**SPARK, "recovery_p50": 2.1}, {**ROW, "recovery_max": 15.1}]
    text = page(tmp_path, ROW, SPARK, *slow, {**ROW, "brokers": 3, "recovery_p50": None, "recovery_max": None})
    assert "0 anomalies; recovery (median, longest): 0.5, 15.1 s, in time in 2 of 4 runs." in text
    one, three = (line for line in text.splitlines() if line.startswith("| polling"))
    assert one.startswith(
        "| polling | at-least-once | 1 | 4 | 40 | 8 | 0 | 8 | 0.5, 15.1 | 1.0, 2.0 | not measured | 3.0, 4.0 | 2 of 4 |"
    )
    assert three.startswith("| polling | at-least-once | 3 | 1 | 10 | 2 | 0 | 2 | not measured | 1.0, 2.0 |")


class Effects:
    """A connection to a database with these effects."""

    def __init__(self, rows):
        self.rows = rows

    def execute(self, _query, bound):
        self.found = [row for row in self.rows if row[0] > bound[0]]
        return self

    def fetchall(self):
        return self.found


def test_a_consumer_has_recovered_when_it_applies_what_was_written_after_the_healing():
    ids, attempted = EventIds("a run", 1.8e9), {0: 2}
    watch = EffectWatch("", ids, Pace(1, 1), lambda: attempted, Clock())
    rows = [(number, str(ids.id_of(event_of(0, number)))) for number in (0, 1)]
    watch.healed("relay_kill")
    watch._look(Effects([*rows, (8, "somebody else's")]))
    assert watch.first_reads() == []
    watch._look(Effects([*rows, (9, str(ids.id_of(event_of(0, 2))))]))
    assert len(watch.first_reads()) == 1


def test_each_recovery_is_measured_whatever_is_healed_meanwhile_by_a_clock_that_stands_while_it_is_held():
    attempted = {0: 2}
    watch = RecoveryWatch("", (), Pace(1, 1), lambda: attempted, clock := Clock())
    watch.healed("relay_kill")
    clock.stop()
    # Held twice, it goes on after both.
    clock.stop()
    clock.start()
    attempted[0] = 4
    watch.healed("relay_kill")
    first, second = watch.recoveries
    assert clock.seconds() == clock.seconds() == second.begun
    watch.read(event_of(0, 2))
    assert watch.first_reads() == [first.first_read] == [second.begun - first.begun]
    clock.start()
    watch.read(event_of(0, 4))
    assert watch.first_reads() == sorted([first.first_read, second.first_read])
    assert watch.by_fault() == {"relay_kill": [round(each.first_read, 2) for each in (first, second)]}
    assert 0 < second.first_read <= clock.seconds() - second.begun


def test_the_clock_may_stand_until_events_flow_again():
    watch = RecoveryWatch("", (), Pace(1, 1), lambda: {0: 2}, clock := Clock())
    for _ in range(2):
        watch.stop_clock()
    watch.read(event_of(0, 1))
    assert clock.seconds() == clock.seconds()
    watch.read(event_of(0, 2))
    before = clock.seconds()
    assert clock.seconds() > before


@pytest.mark.parametrize("brokers", [1, 3])
def test_the_clock_stands_for_what_nothing_can_be_published_beside(brokers):
    found = set()
    for seed in range(20):
        course = course_of(seed, Configuration("polling", "at-least-once", brokers))
        hand = ServerHand(course, SimpleNamespace(kafka_proxies=range(brokers)), Clock(), lambda _: None)
        found |= {
            fault.name for fault in course.faults if not fault.name.startswith("relay") and hand._stops_all(fault)
        }
    of_brokers = {"broker_kill", "broker_pause", "kafka_cut", "kafka_blackhole"} if brokers == 1 else set()
    assert found == {"postgres_kill", "postgres_cut", "postgres_blackhole", "promote"} | of_brokers
