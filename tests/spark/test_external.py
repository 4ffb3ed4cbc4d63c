"""Events from Kafka through Spark to a provider over HTTP: each event is one charge, whatever fails between."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest
from external_support import ORDERS, Sink, payments
from provider import Provider

pytestmark = pytest.mark.spark


def test_each_event_is_one_call_whatever_is_repeated_and_dropped(bench, tmp_path):
    with Provider(tmp_path / "book.sqlite") as provider:
        external = payments(
            provider.url,
            group="charges",
            request="jsonb_build_object('order', order_id || '-' || seq, 'cents', amount_cents)",
            where="NOT message_tombstone AND amount_cents > 0",
            on_confirmed="""
                INSERT INTO orders (id, state) VALUES (split_part(%(request)s ->> 'order', '-', 1), 'paid')
                ON CONFLICT (id) DO UPDATE SET times = orders.times + 1""",
            cancel=True,
        )
        job = replace(bench.job, group="charges", effect=external.reserve(), setup=ORDERS)
        first = bench.send("a", 1)
        for order, seq in (("a", 2), ("b", 1), ("a", 3), ("b", 2), ("c", 1)):
            bench.send(order, seq)
        bench.send("free", 1, amount_cents=0)
        bench.send("a", 1, event_id=first)
        bench.send_raw(None, [("ce_id", b"0191b2c4-0000-7000-8000-000000000001")], key="a")
        provider.tell("a-1", "done-drop", "503")
        provider.tell("b-2", "done-drop", "refuse")
        provider.tell("c-1", "refuse")

        sink = Sink(bench.database.url)
        runner = bench.runner(job)
        runner.once(threading.Event())
        bench.send("a", 1, event_id=first)
        bench.send("c", 2)
        runner.once(threading.Event())
        assert Counter(sink.states().values()) == Counter(reserved=7)

        counts = sink.drain(external)
        assert (counts["confirmed"], counts["cancelled"]) == (5, 2)
        assert provider.standing() == Counter(["a-1", "a-2", "a-3", "b-1", "c-2"])
        assert [name for name in provider.effects() if name[0] == "a"] == ["a-1", "a-2", "a-3"]
        assert {name: times for name, (state, times) in sink.orders().items() if state == "paid"} == {
            "a": 3,
            "b": 1,
            "c": 1,
        }
        keys = {name: key for _, path, key, name in provider.requests() if path == "/charges"}
        assert keys["a-1"] == str(first)
        assert sum(bench.positions().values()) == 11
