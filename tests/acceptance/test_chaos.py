"""A short course of ``make chaos``, so that what runs for an hour elsewhere is known to work.

Its broker is that of other tests, with their settings; the brokers of the long runs have Kafka's defaults.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from chaos import table
from chaos.course import Configuration, course_of
from chaos.run import run
from chaos.stage import KafkaSite
from nursery import NURSERY


@pytest.mark.chaos
def test_a_short_course(mortal_network, tmp_path):
    course = course_of(5671, Configuration("polling", "exactly-once", 1, seconds=13))
    assert {fault.name for fault in course.faults} >= {"relay_kill", "postgres_kill"}
    assert {act.name for act in course.acts} == {"replay", "partitions", "lanes"}
    # On a slow machine the topic that gets partitions is late, and these are: operators come later, and have more time.
    acts = tuple(replace(act, at=act.at + 4.0) for act in course.acts)
    course = replace(course, acts=acts, configuration=replace(course.configuration, seconds=20, rate=150))
    result = run(course, KafkaSite.on(*mortal_network), tmp_path / "run", nursery=NURSERY)
    print(result.as_json())
    assert result.sound, f"{result.verdict}\n{result.standing}"
    assert result.verdict.committed > 500
    assert result.verdict.repeats == 0
    assert result.faults.keys() >= {"relay_kill", "postgres_kill"}
    # On a slow machine the last act comes too late, and the one before it is given up.
    assert "partitions" in result.operators
    assert result.operators.keys() & {"lanes", "lanes in vain"}
    assert result.verdict.applied.keys() == {"effects", "results", "payments"}
    assert all(result.verdict.applied.values())
    assert result.verdict.strangers > 10
    assert all(result.verdict.refused[group] for group in ("effects", "results"))
    assert result.first_reads
    assert result.catch_ups
    assert result.rolled_back
    # What the command keeps of it.
    rows, page = tmp_path / "chaos.jsonl", tmp_path / "chaos.md"
    table.append(rows, {"date": "2026-01-01T00:00:00+00:00", "commit": "abc", **result.as_json()})
    table.write(rows, page)
    assert json.loads(rows.read_text())["events"] == result.verdict.committed
    assert "1 runs" in page.read_text()
    assert page.read_text().splitlines()[-1].startswith("| polling | exactly-once | 1 |")
