"""``outbox relay release``, run as a command."""

from __future__ import annotations

import psycopg
import pytest
from reconcile_support import outbox

__all__ = ["outbox"]


def test_a_lane_is_freed_whose_lease_lies_in_the_future(outbox):
    """As after a clock that jumped back by a day. A relay takes it then: tests/acceptance/runbooks/test_kafka.py."""
    outbox.run(
        "UPDATE outbox.lanes SET owner = 'killed', epoch = 7, transactional_id = 'x',"
        " lease_until = clock_timestamp() + interval '1 day' WHERE lane = 3"
    )
    assert outbox.command("relay", "release", "3").returncode == 2
    assert outbox.command("relay", "release", "9", "--reason", "clock").returncode == 1
    done = outbox.command("relay", "release", "3", "--reason", "the clock jumped")
    assert done.returncode == 0, done.stderr
    assert "Lane 3 is free: killed held it until" in done.stdout
    row = outbox.lane(3)
    assert (row["owner"], row["epoch"], row["lease_until"], row["transactional_id"]) == (None, 8, "-infinity", "x")
    assert "is already free" in outbox.command("relay", "release", "3", "--reason", "again").stdout
    [(why, details)] = outbox.run("SELECT why, details FROM outbox.audit WHERE what = 'release'")
    assert why == "the clock jumped"
    assert details["owner"] == "killed"
    assert 86_000 < details["lease_seconds_left"] <= 86_400


@pytest.mark.parametrize("session", ["4711", "NULL"])
def test_a_lane_is_taken_from_a_relay_that_is_alive_by_force_alone(outbox, session):
    """It holds the lock of its session, or has none behind a pooler."""
    words = ("relay", "release", "3", "--reason", "a guess")
    outbox.run(
        "INSERT INTO outbox.relays (instance, version, session, alive_until) "
        f"VALUES ('living', '1', {session}, clock_timestamp() + interval '1 hour')"
    )
    held = (
        "UPDATE outbox.lanes SET owner = 'living', epoch = 7, lease_until = clock_timestamp() + interval '1 hour' "
        "WHERE lane = 3"
    )
    outbox.run(held)
    with psycopg.connect(outbox.url, autocommit=True) as relay:
        relay.execute(f"SELECT pg_advisory_lock({session})")
        refused = outbox.command(*words)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "the relay living is alive and holds lane 3" in refused.stderr
        assert (outbox.lane(3)["owner"], outbox.lane(3)["epoch"]) == ("living", 7)
        assert outbox.run("SELECT FROM outbox.audit WHERE what = 'release'") == []
        forced = outbox.command(*words, "--force")
        assert (forced.returncode, outbox.lane(3)["owner"]) == (0, None), forced.stderr
    outbox.run(held)
    # It was killed: its row has not run out, but the lock of its session is gone.
    done = outbox.command(*words)
    assert done.returncode == (1 if session == "NULL" else 0), done.stderr
    [forced, *others] = outbox.run("SELECT details ? 'forced' FROM outbox.audit WHERE what = 'release' ORDER BY id")
    assert (forced, others) == ((True,), [] if session == "NULL" else [(False,)])
