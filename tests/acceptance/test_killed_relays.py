"""A relay that is killed: others take its lanes when its session in Postgres has ended, long before its leases do.

What keeps a session, and who has none: tests/integration/relay/core/test_ended_sessions.py and test_kept_sessions.py.
"""

from __future__ import annotations

from support import Load, check, look_up, owners, wait_until

from outbox._app import migrate as db

LEASE = 300.0
"""Longer than any test waits: lanes that change hands do so because a session has ended."""
BATCH = 20


def test_the_lanes_of_a_killed_relay_are_published_before_its_leases_end(
    outbox_postgres, outbox_kafka, outbox_relay, order
):
    lanes = 256
    url, (kind, topic) = outbox_postgres.url, order
    db.change_lanes(url, lanes)
    settings = {"delivery": "exactly-once", "name": outbox_kafka.name("outbox")}
    settings |= {"relay__lease_seconds": LEASE, "relay__batch_size": BATCH}
    with Load(url, kind) as load:
        killed = outbox_relay(relay__instance="killed", **settings)
        wait_until(lambda: owners(url) == {"killed": lanes}, what="one relay with all lanes")
        # It has seen the other one alive when it gets lanes of it.
        other = outbox_relay(relay__instance="other", **settings)
        wait_until(lambda: owners(url) == {"killed": lanes // 2, "other": lanes // 2}, what="two relays with lanes")
        load.more(100)
        killed.kill()
        wait_until(lambda: owners(url) == {"other": lanes}, what="the lanes of the killed relay to be taken")
        load.more(100)
        load.drain()
    assert "lane lost" not in other.log()
    assert check(url, outbox_kafka.consume(topic)) == 0


def test_a_relay_whose_lanes_were_taken_while_it_lives_lets_go_of_them(
    outbox_postgres, outbox_kafka, outbox_relay, order
):
    """It is halted, and its sessions end, as when a firewall forgets them. Kafka refuses what it sends on waking.

    Then the other one is killed and comes back under its name, as a container that restarts in its pod: its first beat
    replaces the session that others have to miss. At-least-once, what both send are repeats: test_relays.py.
    """
    url, (kind, topic) = outbox_postgres.url, order
    settings = {"delivery": "exactly-once", "name": outbox_kafka.name("outbox")}
    settings |= {"relay__lease_seconds": LEASE, "relay__batch_size": BATCH}
    sessions = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
    with Load(url, kind) as load:
        halted = outbox_relay(relay__instance="halted", **settings)
        wait_until(lambda: owners(url) == {"halted": 4}, what="one relay with all lanes")
        other = outbox_relay(relay__instance="other", **settings)
        wait_until(lambda: owners(url) == {"halted": 2, "other": 2}, what="two relays with lanes")
        load.more(100)
        halted.pause()
        look_up(url, f"SELECT pg_terminate_backend(pid) FROM ({sessions}) AS its", "outbox relay halted")
        wait_until(lambda: owners(url) == {"other": 4}, what="the lanes of the halted relay to be taken")
        load.more(100)
        halted.resume()
        halted.wait_for_log("lane lost")
        wait_until(lambda: owners(url) == {"halted": 2, "other": 2}, what="both with two lanes")
        load.more(100)
        assert halted.running
        # It would take the other one's lanes.
        halted.pause()
        other.kill()
        wait_until(lambda: not look_up(url, sessions, "outbox relay other"), what="its sessions to end")
        again = outbox_relay(relay__instance="other", **settings)
        again.wait_for_log("lanes of a former process of this name are free")
        halted.resume()
        load.drain()
    assert check(url, outbox_kafka.consume(topic)) == 0
