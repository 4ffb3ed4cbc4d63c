"""The backlog and a relay's work in its metrics: over real HTTP, from two relays at a time."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import psycopg
from alerting import scraped
from support import IMPATIENT, drained, logged, order, wait_until

from outbox import Event, Outbox, __version__
from outbox.sandbox._ports import free_ports

__all__ = ["order"]

EVENTS = 6_000


class Scraped:
    """What both relays show, added up as Prometheus' ``sum`` does. One that shows no such metric adds nothing."""

    def __init__(self, ports: list[int]) -> None:
        self._addresses = [f"127.0.0.1:{port}" for port in ports]

    def each(self, name: str) -> list[float]:
        metric, _, labels = name.rstrip("}").partition("{")
        start = f'{metric}{{outbox="orders"{labels and f",{labels}"},instance='
        return [value for series, value in scraped(*self._addresses).items() if series.startswith(start)]

    def sum(self, name: str) -> float:
        return sum(self.each(name))


def add(url: str, kind: str, count: int, **payload: str) -> None:
    with psycopg.connect(url) as connection:
        Outbox().add_many(connection, [Event(kind, f"k{n}", "T", payload or {"n": n}) for n in range(count)])


def test_figures_of_two_relays_add_up(outbox_relay, outbox_postgres, order):
    ports = free_ports(2)
    relays = [
        outbox_relay(
            program=IMPATIENT,
            name="orders",
            relay__metrics_address=f"127.0.0.1:{port}",
            relay__lease_seconds=2,
            routes=json.dumps({order[0]: {"topic": order[1]}}),
            failures__max_attempts=1_000,
        )
        for port in ports
    ]
    found = Scraped(ports)
    wait_until(lambda: found.each("outbox_relay_lanes") == [2.0, 2.0], what="the lanes to be shared out")
    wait_until(lambda: found.each("outbox_lanes") == [4.0], what="the first look at the outbox")
    url = outbox_postgres.url
    add(url, order[0], EVENTS)
    drained(url)
    published = 'outbox_relay_events_total{result="published"}'
    wait_until(lambda: found.sum(published) == EVENTS, what="the counters")
    assert all(one > 0 for one in found.each(published))
    assert found.sum("outbox_relay_turn_events_sum") == EVENTS
    turns = found.sum("outbox_relay_turn_events_count")
    for stage in ("read", "publish", "settle"):
        assert found.sum(f'outbox_relay_turn_seconds_count{{stage="{stage}"}}') == turns > 0
    assert found.sum('outbox_relay_turn_seconds_sum{stage="publish"}') > 0
    assert not found.each("outbox_relay_events_created")
    # An event without a route stays, and is tried again: one relay shows it, whoever holds its lane.
    add(url, "Nobody", 3)
    wait_until(lambda: found.each("outbox_backlog_events") == [3.0], what="the backlog")
    wait_until(lambda: found.sum("outbox_backlog_oldest_age_seconds") > 0, what="its age")
    wait_until(lambda: found.sum("outbox_relays_alive") == 2, what="both relays to be seen")
    # The other one shows the outbox when the first is gone, and the lanes that it has taken from it.
    relays[0].kill()
    shown = ("outbox_relays_alive", "outbox_backlog_events", "outbox_lanes_unheld")
    wait_until(lambda: [found.each(name) for name in shown] == [[1.0], [3.0], [0.0]], what="the other relay to show it")


def test_a_relay_says_what_it_is_and_that_it_lives(outbox_postgres, outbox_kafka, outbox_relay):
    """Whatever it waits for, it is alive: a restart would mend nothing. No credentials in the log."""
    (port,) = free_ports(1)
    relay = outbox_relay(
        relay__metrics_address=f"127.0.0.1:{port}",
        relay__lease_seconds=1,
        delivery="exactly-once",
        name=outbox_kafka.name("outbox"),
        routes=json.dumps({"B": {"topic": "b"}, "A": {"topic": "a"}}),
    )
    (line,) = wait_until(lambda: logged(relay, "relay started"), what="the first line")
    assert (line["delivery"], line["source"], line["topics"]) == ("exactly-once", "polling", ["a", "b"])
    assert line["brokers"] == outbox_kafka.bootstrap_servers
    assert line["outbox"] == line["name"]
    assert line["database"].startswith("postgresql://127.0.0.1:")
    assert "@" not in line["database"]

    def answers(path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    wait_until(lambda: answers("/readyz")[0] == 200, what="the relay to be ready")
    assert answers("/livez") == (200, b"alive\n")
    name = line["name"]
    labels = f'delivery="exactly-once",outbox="{name}",source="polling",version="{__version__}"'
    assert f"outbox_relay_build_info{{{labels}}} 1.0" in answers("/metrics")[1].decode().splitlines()
    with psycopg.connect(outbox_postgres.url) as other:
        other.execute("LOCK TABLE outbox.lanes")
        wait_until(lambda: answers("/readyz")[0] == 503, what="the relay to stand still", seconds=120)
        assert answers("/livez") == (200, b"alive\n")
