"""What is promised for each combination is what the page says; and what a slot costs."""

from __future__ import annotations

import re

import pytest
from docs_support import DOCS

from outbox.consumer.model import AT_MOST_ONCE, DEDUP, DEDUP_BY_KEY, DEDUP_BY_OFFSET
from relay.config import Delivery, SourceKind
from relay.operations.guarantee import Strategy, guarantee, slot_cost
from spark_jobs.dedup import strategies
from spark_jobs.driver.stream_group import STREAM
from spark_jobs.job import ConsumerJob

MIB = 1 << 20


def test_the_strategies_are_those_of_the_consumers():
    classes = {
        name
        for name, kind in vars(strategies).items()
        if isinstance(kind, type) and hasattr(kind, "remembers") and not name.startswith("_") and name != "Strategy"
    }
    assert {str(each) for each in Strategy} == classes | {STREAM, DEDUP_BY_KEY, DEDUP_BY_OFFSET, AT_MOST_ONCE}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, DEDUP),
        ({"key": "k"}, DEDUP_BY_KEY),
        ({"allow_producer_repeats": True}, DEDUP_BY_OFFSET),
        ({"key": "k", "allow_producer_repeats": True}, DEDUP_BY_KEY),
    ],
)
def test_what_a_groups_row_says_of_its_dedup(given, shown):
    job = ConsumerJob("g", effect="SELECT 1", topics=("t",), strategy=strategies.Dedup(**given))
    assert job.shown_strategy == shown


def rows(heading: str) -> list[tuple[str, ...]]:
    """Return the cells of the page's table with this heading."""
    text = (DOCS / "explanation" / "guarantees.md").read_text()
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()]


def names(cell: str) -> list[str]:
    """Return the names in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def test_the_page_has_the_same_tables():
    assert rows("delivery \\| source") == [
        (f"`{delivery}`", f"`{source}`", guarantee(delivery, source).found, guarantee(delivery, source).do)
        for delivery in Delivery
        for source in SourceKind
        # A relay refuses these settings.
        if (delivery, source) != (Delivery.AT_MOST_ONCE, SourceKind.WAL)
    ]
    promised = [
        ((delivery, strategy), (found, do))
        for deliveries, chosen, found, do in rows("delivery \\| strategy")
        for delivery in names(deliveries)
        # A row may speak of several combinations.
        for strategy in (Strategy if chosen == "each" else names(chosen))
    ]
    assert len(promised) == len(Delivery) * len(Strategy)
    assert dict(promised) == {
        (delivery, strategy): (found.found, found.do)
        for delivery in Delivery
        for strategy in Strategy
        # The source makes no difference.
        for [found] in [{guarantee(delivery, source, strategy) for source in SourceKind}]
    }


ALL_OF_IT = "The server retains all of it (max_slot_wal_keep_size = -1), until its disk is full"
UNREAD = " are written: unread, the limit is reached"
DROPPED, SETTING = "The server drops the slot after", "(max_slot_wal_keep_size)"


@pytest.mark.parametrize(
    ("retained", "safe", "rate", "kept", "rest"),
    [
        (3 * MIB, None, MIB, "3.0 MiB", f"; 1.0 MiB/s{UNREAD} in 17 min. {ALL_OF_IT}"),
        (0, None, 100.0, "0 bytes", f"; 100 bytes/s{UNREAD} in 124 d. {ALL_OF_IT}"),
        (1000 * MIB, None, MIB, "1000.0 MiB", f"; 1.0 MiB/s{UNREAD} in 24 s. {ALL_OF_IT}"),
        (
            512,
            2 * MIB,
            10240.0,
            "512 bytes",
            f"; 10.0 KiB/s{UNREAD} in 29 h. {DROPPED} 2.0 MiB more, in 3 min {SETTING}",
        ),
        (2048 * MIB, -5, MIB, "2.0 GiB", f"; 1.0 MiB/s{UNREAD} now. {DROPPED} 0 bytes more, now {SETTING}"),
        (0, 100 * MIB, 0.0, "0 bytes", f". {DROPPED} 100.0 MiB more {SETTING}"),
    ],
)
def test_what_a_slot_costs(retained, safe, rate, kept, rest):
    expected = f"{kept} of WAL are retained, of 1.0 GiB (wal.retained_limit_bytes){rest}"
    assert slot_cost(retained, 1 << 30, safe, rate) == expected
