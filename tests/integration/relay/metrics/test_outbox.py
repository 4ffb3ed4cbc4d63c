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

EVENTS = 1_000


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


def answers(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_figures_of_two_relays_add_up(outbox_relay, outbox_kafka, outbox_postgres, order):
    """And each says what it is, and that it lives, whatever it waits for: a restart would mend nothing."""
    ports, routes = free_ports(2), {order[0]: {"topic": order[1]}, "A": {"topic": "a"}}
    relays = [
        outbox_relay(
            program=IMPATIENT,
            name="orders",
            relay__metrics_address=f"127.0.0.1:{port}",
            relay__lease_seconds=2,
            routes=json.dumps(routes),
            failures__max_attempts=1_000,
        )
        for port in ports
    ]
    for relay in relays:
        (line,) = wait_until(lambda relay=relay: logged(relay, "relay started"), what="the first line")
        said = (line["delivery"], line["source"], line["topics"])
        assert said == ("at-least-once", "polling", sorted(["a", order[1]]))
        assert (line["brokers"], line["outbox"], line["name"]) == (outbox_kafka.bootstrap_servers, "orders", "orders")
        # No credentials in the log.
        assert line["database"].startswith("postgresql://127.0.0.1:")
        assert "@" not in line["database"]
    found = Scraped(ports)
    wait_until(lambda: found.each("outbox_relay_lanes") == [2.0, 2.0], what="the lanes to be shared out")
    wait_until(lambda: found.each("outbox_lanes") == [4.0], what="the first look at the outbox")
    labels = f'delivery="at-least-once",outbox="orders",source="polling",version="{__version__}"'
    for port in ports:
        wait_until(lambda port=port: answers(port, "/readyz")[0] == 200, what="the relay to be ready")
        assert answers(port, "/livez") == (200, b"alive\n")
        assert f"outbox_relay_build_info{{{labels}}} 1.0" in answers(port, "/metrics")[1].decode().splitlines()
    url = outbox_postgres.url
    add(url, order[0], EVENTS)
    drained(url)
    published = 'outbox_relay_events_total{result="published"}'

    def lost() -> bool:
        """Return whether a lease was too short for this machine: the next holder repeats events."""
        return any("lane lost" in relay.log() for relay in relays)

    wait_until(lambda: found.sum(published) == EVENTS or lost(), what="the counters")
    assert all(one > 0 for one in found.each(published)) or lost()
    assert found.sum("outbox_relay_turn_events_sum") == EVENTS or lost()
    turns = found.sum("outbox_relay_turn_events_count")
    for stage in ("read", "publish", "settle"):
        assert found.sum(f'outbox_relay_turn_seconds_count{{stage="{stage}"}}') == turns > 0
    assert found.sum('outbox_relay_turn_seconds_sum{stage="publish"}') > 0
    assert not found.each("outbox_relay_events_created")
    wait_until(lambda: found.each("outbox_relay_turn_limit_events") == [2000.0] * 2, what="the sizes of turns")
    wait_until(lambda: found.each("outbox_relay_turn_limit_lanes") == [2.0] * 2, what="the lanes in a turn")
    # An event without a route stays, and is tried again: one relay shows it, whoever holds its lane.
    add(url, "Nobody", 3)
    wait_until(lambda: found.each("outbox_backlog_events") == [3.0], what="the backlog")
    wait_until(lambda: found.sum("outbox_backlog_oldest_age_seconds") > 0, what="its age")
    wait_until(lambda: found.sum("outbox_relays_alive") == 2, what="both relays to be seen")
    # The other one shows the outbox when the first is gone, and the lanes that it has taken from it.
    relays[0].kill()
    shown = ("outbox_relays_alive", "outbox_backlog_events", "outbox_lanes_unheld")
    wait_until(lambda: [found.each(name) for name in shown] == [[1.0], [3.0], [0.0]], what="the other relay to show it")
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE outbox.lanes")
        wait_until(lambda: answers(ports[1], "/readyz")[0] == 503, what="the relay to stand still", seconds=120)
        assert answers(ports[1], "/livez") == (200, b"alive\n")
