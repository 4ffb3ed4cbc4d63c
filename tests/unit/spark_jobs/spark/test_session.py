"""What a Spark session of ours begins with, without starting one."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from pyspark.sql import Row

from outbox.consumer.errors import EffectFailed
from spark_jobs.driver.partition_attempts import reported
from spark_jobs.outcomes import RangeOutcome
from spark_jobs.spark import session
from spark_jobs.task.partition import REPORT, TaskResult

GIVEN = (*session._JAVA_OPTIONS, "SPARK_CONF_DIR", "SPARK_HOME")


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, True),
        ({"JDK_JAVA_OPTIONS": "-Xmx2g -XX:TieredStopAtLevel=1"}, True),
        ({"JDK_JAVA_OPTIONS": "-XX:+UseG1GC"}, False),
        ({"JAVA_TOOL_OPTIONS": "-Xmx1g -XX:+UseZGC -Da=b"}, False),
        ({"SPARK_SUBMIT_OPTS": "-XX:+UseSerialGC"}, False),
        ({"_JAVA_OPTIONS": "-XX:+UseSerialGC"}, False),
        ({"PYSPARK_SUBMIT_ARGS": "--driver-java-options -XX:+UseG1GC pyspark-shell"}, False),
    ],
)
def test_a_collector_is_chosen_where_nobody_else_has(monkeypatch, given, chosen):
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert bool(session._collector({})) is chosen
    assert not session._collector({"spark.driver.extraJavaOptions": "-XX:+UseG1GC"})


def test_spark_s_own_configuration_is_not_contradicted(monkeypatch, tmp_path):
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert session._collector({})
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.driver.extraJavaOptions -XX:+UseG1GC")
    assert not session._collector({})
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))
    monkeypatch.delenv("SPARK_HOME")
    assert not session._collector({})


def test_one_partition_is_told_of_by_one_task():
    result = TaskResult(RangeOutcome.APPLIED, read=2, fresh=1, detail="x", behind=3, size=9, committed=1.5)
    row = Row(*[column.partition(" ")[0] for column in REPORT.split(", ")])
    rows = [row("t", part, *asdict(result).values()) for part in (0, 1)]
    assert reported(rows) == {("t", 0): result, ("t", 1): result}
    with pytest.raises(EffectFailed, match="t-1: two tasks had rows of it"):
        reported([*rows, row("t", 1, *asdict(replace(result, outcome=RangeOutcome.ALREADY)).values())])
