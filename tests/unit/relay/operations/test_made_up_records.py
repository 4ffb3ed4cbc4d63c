"""Records and topics of any program, on which no command may end with a traceback."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace

import pytest

from outbox._clients.checks import Level
from relay.kafka.offsets import Partition, Undecided
from relay.kafka.open_transactions import OpenTransaction, Whose
from relay.operations.doctor.kafka import _open_transaction, _topic
from relay.operations.recover import _written
from relay.operations.topic_scan import TopicRecord


@pytest.mark.parametrize("since", [1.7e12, -1.0, 1e300])
def test_the_doctor_says_nothing_of_a_time_that_no_calendar_has(since):
    found = _open_transaction(OpenTransaction(Undecided(Partition("orders", 0), 1, 2), Whose.ANOTHER, since), 900.0)
    assert (found.level, "since" in found.found) == (Level.WARNING, False)
    assert "check again in 900 s" in found.do


def test_the_doctor_waits_for_a_topic_that_is_just_being_created():
    (found,) = _topic("orders", SimpleNamespace(partitions={}), lambda _: "2")
    assert (found.level, found.about) == (Level.WARNING, "topic orders")


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2024-01-01T00:00:00+16:00", dt.datetime(2023, 12, 31, 8, tzinfo=dt.UTC)),
        ("2024-01-01T00:00:00", dt.datetime(2024, 1, 1, tzinfo=dt.UTC)),
        ("0001-01-01T00:00:00+23:00", dt.datetime.min.replace(tzinfo=dt.UTC)),
        ("9999-12-31T23:59:59-23:00", dt.datetime.min.replace(tzinfo=dt.UTC)),
        ("yesterday", dt.datetime.min.replace(tzinfo=dt.UTC)),
    ],
)
def test_recover_gives_postgres_times_in_utc(text, time):
    record = TopicRecord(Partition("orders", 0), 0, 0, None, "", False, None, None, "", text)
    assert (_written(record), _written(record).tzinfo) == (time, dt.UTC)
