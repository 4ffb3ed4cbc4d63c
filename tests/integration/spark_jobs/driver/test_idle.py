"""A driver between its rounds, on real Kafka and Postgres. It runs without Spark."""

from __future__ import annotations

from functools import partial

import pytest
from offsets_driver import GROUP, driver
from support import wait_until
from threads import in_background

from outbox.consumer.errors import ConsumerUnavailable, NotAuthorized
from spark_jobs.task import reader
from spark_jobs.task.reader import RangeReader, ReaderSettings, kept

__all__ = ["driver"]


@pytest.mark.parametrize("every", [0.0, 3600.0])
def test_what_a_kept_client_reports_does_not_pile_up(driver, monkeypatch, every):
    """Each report of its statistics waits in librdkafka, without limit, until the client is polled."""
    reports: list[str] = []
    monkeypatch.setattr(RangeReader, "_progress", lambda _, statistics: reports.append(statistics))
    monkeypatch.setattr(reader, "_SETTINGS", {**reader._SETTINGS, "statistics.interval.ms": 50})
    with kept(ReaderSettings({"bootstrap.servers": driver.topics.bootstrap_servers}, GROUP)):
        pass
    with in_background(partial(driver.runner.continuous, every=every)):
        for _ in range(2):
            # Twenty a second come; a poll takes all that wait.
            seen = len(reports)
            wait_until(lambda: len(reports) >= seen + 10, what="the reports of a second")  # noqa: B023


@pytest.mark.parametrize("error", [ConsumerUnavailable, NotAuthorized])
def test_an_error_of_an_idle_look_is_left_to_the_next_round(driver, monkeypatch, error):
    """It retries for some minutes, or as long as it takes."""
    looks: list[object] = []

    def ends(partitions: object) -> dict[tuple[str, int], int]:
        looks.append(partitions)
        raise error("refused")

    monkeypatch.setattr(driver.runner._kafka, "ends", ends)
    with in_background(driver.runner.continuous):
        wait_until(lambda: len(looks) >= 2, what="the look after the next round")
