"""What is promised for each combination, and what a slot costs; and that the page says the same."""

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

MOST, LEAST, EXACTLY = "at-most-once", "at-least-once", "exactly-once"

WORDS = {
    Strategy.DEDUP: (MOST, EXACTLY, EXACTLY),
    Strategy.DEDUP_BY_KEY: (MOST, EXACTLY, EXACTLY),
    Strategy.DEDUP_BY_OFFSET: (MOST, EXACTLY, EXACTLY),
    Strategy.FINGERPRINT: (MOST, EXACTLY, EXACTLY),
    Strategy.VERSION: (MOST, EXACTLY, EXACTLY),
    Strategy.NATURAL: (MOST, LEAST, EXACTLY),
    Strategy.OFFSETS_ONLY: (MOST, LEAST, EXACTLY),
    Strategy.STREAM: (MOST, LEAST, EXACTLY),
    Strategy.AT_MOST_ONCE: (MOST, MOST, MOST),
}
"""With a relay that delivers at most, at least and exactly once."""

MIB = 1 << 20


@pytest.mark.parametrize("strategy", Strategy)
def test_in_the_sinks_tables(strategy):
    for delivery, word in zip(Delivery, WORDS[strategy], strict=True):
        found, other = (guarantee(delivery, source, strategy) for source in SourceKind)
        assert (found, found.word) == (other, word)
        # An effect in tables has no need of at-most-once.
        assert found.text.startswith("of any effect" if strategy is Strategy.AT_MOST_ONCE else "in the sink's tables")
        # What is not exactly-once names what would change it.
        assert found.do or found.word == EXACTLY
        assert (found.do == "OUTBOX_DELIVERY=at-least-once") is (delivery is Delivery.AT_MOST_ONCE)
        assert found.do.startswith("OUTBOX_DELIVERY=exactly-once, or ") is (found.word == LEAST)


def test_repeats_of_the_relay_are_mended_at_the_relay():
    """A consumer at-most-once wants none: that it would repeat by itself is no advice."""
    repeated, replayed = (
        guarantee(delivery, SourceKind.POLLING, Strategy.AT_MOST_ONCE)
        for delivery in (Delivery.AT_LEAST_ONCE, Delivery.EXACTLY_ONCE)
    )
    assert ("what a relay repeats" in repeated.text, "what a relay repeats" in replayed.text) == (True, False)
    assert repeated.do == "OUTBOX_DELIVERY=exactly-once"
    assert replayed.do == "delivery='exactly-once' of the consumer"


@pytest.mark.parametrize("delivery", Delivery)
def test_on_kafka(delivery):
    polling, wal = (guarantee(delivery, source) for source in SourceKind)
    assert polling.word == wal.word == delivery
    assert ("if its writers exclude each other" in polling.text, "in that of ids while" in wal.text) == (True, True)
    assert ("read_committed" in polling.text) is (delivery is Delivery.EXACTLY_ONCE)


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
    # What is repeated without an id is not promised.
    promised = guarantee(Delivery.EXACTLY_ONCE, SourceKind.POLLING, Strategy(shown))
    assert ("without an id is applied again" in promised.text) is (shown == DEDUP_BY_OFFSET)


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
        for found in [guarantee(delivery, SourceKind.POLLING, strategy)]
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
