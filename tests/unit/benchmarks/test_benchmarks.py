"""What the benchmark counts and reports, without servers: a wrong count there would be a wrong claim."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.append(str(Path(__file__).parents[3]))

from benchmarks.consuming import stage
from benchmarks.harness import report
from benchmarks.harness.results import Results, Run, at_least, at_most
from benchmarks.harness.scenarios.base import Sizes
from benchmarks.harness.scenarios.drains import DrainUsual
from benchmarks.harness.scenarios.writer import ONE_CLIENT, Writers, figures
from benchmarks.harness.servers import BenchError
from benchmarks.harness.topic import Appended, Tally


def tally(*numbers: int, first: int = 0, count: int = 4) -> Tally:
    counted = Tally(first, count)
    for number in numbers:
        counted.add(f"order-{number % 2}".encode(), b'{"n": %d, "pad": "1"}' % number)
    return counted


def test_one_is_missing():
    tally(1, 0, 3, 2).check()
    counted = tally(0, 1, 3)
    assert counted.lost == 1
    with pytest.raises(BenchError, match="1 of 4 events are missing"):
        counted.check()


def test_one_is_repeated():
    counted = tally(0, 1, 0, 2, 3)
    counted.check()
    assert counted.repeated == 1


def test_one_is_out_of_order():
    counted = tally(2, 1, 0, 3)
    assert (counted.lost, counted.reordered) == (0, 1)
    with pytest.raises(BenchError, match="1 are out of order"):
        counted.check()


@pytest.mark.parametrize("value", [None, b"", b"marker"])
def test_a_message_of_somebody_else(value):
    with pytest.raises(BenchError, match="no writer here wrote"):
        Tally(0, 1).add(b"order-0", value)


def test_the_rate_leaves_out_what_came_with_the_first_batch():
    counted = tally(*range(4))
    assert Appended(counted, 1_000, 3_000, with_first=2).rate == 1.0
    with pytest.raises(BenchError, match="same millisecond"):
        _ = Appended(counted, 1_000, 1_000, with_first=4).rate


def run(way: str, number: int, rate: float, error: str | None = None) -> Run:
    return Run("drain", way, number, {} if error else {"rate": rate}, error=error)


def test_ratios_are_within_a_round():
    results = Results([run("ours", 1, 10), run("Debezium a", 1, 5), run("ours", 2, 30), run("Debezium a", 2, 10)])
    assert results.ratio("ours", "Debezium a", "rate") == [2, 3]
    assert results.ratio("ours", results.best_debezium("rate"), "rate") == [2, 3]


def test_the_best_is_chosen_in_each_round():
    runs = [run("Debezium a", 1, 5), run("Debezium b", 1, 6), run("Debezium a", 2, 9), run("Debezium b", 2, 0, "lost")]
    results = Results(runs)
    assert results.best_debezium("rate") == {1: "Debezium b", 2: "Debezium a"}
    assert results.best_debezium("rate", least=True) == {1: "Debezium a", 2: "Debezium a"}
    assert results.best_debezium("rate", but="Debezium b") == {1: "Debezium a", 2: "Debezium a"}


def test_targets_go_by_the_median():
    assert at_least("", [1, 5, 6], 5).reached is True
    assert at_least("", [1, 4, 6], 5).reached is False
    assert at_most("", [1, 4, 9], 4).reached is True
    assert at_most("", [1, 4.1, 9], 4).reached is False
    assert at_most("", [], 4).reached is None
    assert at_least("", [1, 4, 6], 5).found == "4.00 (1.00–6.00)"


@pytest.mark.parametrize(("seconds", "us", "reached"), [(0.113, 130.0, True), (0.116, 160.0, False)])
def test_what_an_event_costs_the_connection_that_writes_it(seconds, us, reached):
    """In µs: its part of the time of a transaction depends on how fast the disk commits."""
    measured = Run("writer", ONE_CLIENT.name, 1)
    took = {"without": 0.1, "event": seconds, "bare": 0.105}
    measured.figures |= figures(100, took, dict.fromkeys(took, 0.01))
    assert measured.figures == pytest.approx(
        {"without": 1000, "event": 100 / seconds, "bare": 100 / 0.105, "event_us": us}
        | {f"{name}_cpu": 100 for name in took}
    )
    writers = Writers(Sizes())
    assert set(measured.figures) == {metric.name for metric in writers.metrics}
    (target,) = [each for each in writers.targets(Results([measured])) if "µs" in each.asked]
    assert (target.asked, target.found, target.reached) == ("≤ 140 µs", f"{us:.0f}", reached)


def test_the_report():
    scenario = DrainUsual(Sizes())
    runs = [run(way.name, number, 1000 * number) for number in (1, 2) for way in scenario.ways]
    runs.append(run(scenario.ways[0].name, 3, 0, "3 of 4 events are missing <b>"))
    chapter = report.Chapter(scenario, Results(runs))
    found = json.loads(report.as_json([chapter], {"commit": "abc"}))["scenarios"][0]
    assert found["summary"]["ours, polling, at-least-once"]["rate"] == {"median": 1500, "least": 1000, "greatest": 2000}
    assert [target["reached"] for target in found["targets"] if "best Debezium" in target["what"]] == [False] * 4
    console = Console(width=200, record=True)
    report.show(console, chapter)
    text = console.export_text()
    assert "3 of 4 events are missing <b>" in text
    for shown in ("ours, polling, at-least-once", "(1,000–2,000)", "NOT reached"):
        assert shown in text


@pytest.mark.parametrize("events", [1, 4_999, 5_000, 12_345, 30_000])
def test_what_stands_in_a_consumers_table_is_worked_out(events):
    numbers = [stage.flat(number)[1] for number in range(events)]
    latest = {event["order_id"]: event["seq"] for event in numbers}
    assert stage.ORDERS.expected(events) == (len(latest), sum(latest.values()))
    assert stage.TOTALS.expected(events) == (events, sum(event["amount_cents"] for event in numbers))
    lines = [stage.nested(number)[1]["lines"] for number in range(events)]
    assert stage.DOCUMENTS.expected(events) == (events, sum(map(len, lines)))
