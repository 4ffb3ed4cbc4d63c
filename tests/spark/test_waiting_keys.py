"""Rounds with ``keep_order`` while 100,000 dead letters of other keys wait: the driver reads their keys once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from bench import Bench, ided
from counting import Counting

from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark

LETTERS = 100_000
SETUP = "CREATE TABLE IF NOT EXISTS seen (n int, key text)"
SQL = "INSERT INTO seen SELECT n, message_key FROM batch"
FILL = """
INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_key, message_value,
                                   message_headers, message_time, reason, error)
SELECT 'waiting', topic, 'earlier', 7, g, convert_to('k' || g, 'UTF8'), '{"n":0}', '[]', now(), 'failed', 'e'
  FROM consumer.offsets CROSS JOIN generate_series(1, %d) AS g WHERE part = 0"""


def sent(bench: Bench, n: int, key: str) -> None:
    bench.send_raw(b'{"n":%d}' % n, ided(), key)


def behind(bench: Bench) -> list[tuple[Any, ...]]:
    return bench.rows(
        "SELECT convert_from(message_key, 'UTF8'), convert_from(message_value, 'UTF8') FROM consumer.dead_letters "
        "WHERE reason = 'behind' ORDER BY id"
    )


def test_keys_are_read_once_and_never_too_few_are_known(bench):
    """In the driver; by executors and with a transform: test_driver_rounds.py, with few letters."""
    job = ConsumerJob("waiting", (bench.topic,), SQL, schema="n int", setup=SETUP, keep_order=True)
    with Counting(bench.database.url) as counting:
        own, bench.database = bench.database, SimpleNamespace(url=counting.url)

        def reads_of_keys() -> int:
            return sum(text.strip().startswith(b"SELECT DISTINCT topic, message_key") for text in counting.statements)

        sent(bench, 1, "first")
        with bench.runner(job) as runner:
            assert runner._round(None) is True
            bench.database = own
            bench.run(FILL.encode() % LETTERS)
            # As a round that fails: what it may have stored is not known.
            runner._rounds._dead_keys.forget()
            before = reads_of_keys()
            for n, key in enumerate(["free", "k7", "free", "bad", "k99999", "bad", "k7"], 2):
                if key == "bad" and n == 5:
                    bench.send_raw(b"no json", ided(), key)
                else:
                    sent(bench, n, key)
                assert runner._round(None) is True
            assert reads_of_keys() == before + 1
            expected = [("k7", '{"n":3}'), ("k99999", '{"n":6}'), ("bad", '{"n":7}'), ("k7", '{"n":8}')]
            assert behind(bench) == expected
            assert bench.rows("SELECT n, key FROM seen ORDER BY n") == [(1, "first"), (2, "free"), (4, "free")]
            # Deleted by hand, and with nothing behind it: the next of its key makes a detour and is applied.
            bench.run("DELETE FROM consumer.dead_letters WHERE message_key = 'k500'")
            sent(bench, 9, "k500")
            assert runner._round(None) is True
            assert behind(bench)[-1] == ("k500", '{"n":9}')
            runner._round(None)
            assert behind(bench) == expected
            sent(bench, 10, "k500")
            assert runner._round(None) is True
            assert behind(bench) == expected
            assert bench.rows("SELECT n FROM seen WHERE key = 'k500' ORDER BY n") == [(9,), (10,)]
