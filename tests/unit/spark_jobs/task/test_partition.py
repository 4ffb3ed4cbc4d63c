"""One transaction for all ranges, without a sink."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from outbox.consumer.model import Range
from spark_jobs.task.input import in_memory
from spark_jobs.task.partition import TaskPlan, apply_all_in_one


class Sink:
    """Its clock shows 1, and after the COMMIT 2."""

    clock = 1.0

    @contextmanager
    def transaction(self, *_: Any, **__: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            fence_all=lambda _: True,
            remember=lambda batches, _: sum(batch.num_rows for batch in batches),
            at_once=nullcontext,
            move=lambda *_, **__: None,
            apply=lambda: None,
            now=lambda: self.clock,
        )
        self.clock = 2.0


def test_the_time_of_ranges_that_are_applied_together_is_that_after_the_commit():
    """A COMMIT may take long, as with synchronous replicas: the metric of delays is to the end of it."""
    places = [("t", 0), ("t", 1)]
    decoder: Any = SimpleNamespace(copyable=lambda parts: parts, note_size=lambda *_: None)
    sink: Any = Sink()
    plan = TaskPlan(sink, dict.fromkeys(places, Range("id", 0, 1)), {}, (), 0, decoder=decoder)
    read: Any = {place: in_memory([pa.record_batch({"n": [1]})]) for place in places}
    results = apply_all_in_one(plan, read)
    assert results is not None
    assert [results[place].committed for place in places] == [2.0, 2.0]


def test_why_ranges_are_not_applied_together_is_logged(caplog):
    sink: Any = SimpleNamespace(transaction=lambda *_, **__: 1 / 0)
    plan = TaskPlan(
        sink, {("t", 0): Range("id", 0, 1)}, {}, (), 0, decoder=SimpleNamespace(copyable=lambda parts: parts)
    )
    with caplog.at_level(logging.INFO):
        assert apply_all_in_one(plan, {("t", 0): in_memory([])}) is None
    (line,) = caplog.messages
    assert (
        line
        == "1 ranges at once could not be applied, so each is applied by itself: ZeroDivisionError: division by zero"
    )
