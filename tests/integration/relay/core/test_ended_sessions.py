"""A relay's session in Postgres ends with it: whose lanes may be taken before their leases end, and whose may not.

The other side is one process with several sessions; real relays: tests/acceptance/test_killed_relays.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import psycopg
import pytest
from polling_support import clock_back, table, taken
from rows_and_roles import login_role
from support import look_up, wait_until

from relay.database import Connector, begin_session
from relay.lanes import LaneTable, lock_session
from relay.operations.roles import RoleKind, grants

LEASE = 600.0


class Relay(LaneTable):
    """The control loop's statements of a relay, in a session of their own."""

    def __init__(self, url: str, name: str, source: str = "polling", *, first: bool = False) -> None:
        self.url = url
        self.connection = Connector(url, name)()
        begin_session(self.connection)
        super().__init__(self.connection, "outbox", name, "0", LEASE, source, session=lock_session(self.connection))
        self.freed = self.free_former() if first else []
        self.beat()

    def ends(self) -> None:
        """End the session, and wait until Postgres has noticed."""
        pid = self.connection.info.backend_pid
        self.close()
        gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
        wait_until(lambda: look_up(self.url, gone, pid) == [(True,)], what="the session to end")


@pytest.fixture
def open_relay() -> Iterator[Callable[..., Relay]]:
    """Opens a relay's session, which ends after the test if not before."""
    with ExitStack() as stack:
        yield lambda *arguments, **named: stack.enter_context(closing(Relay(*arguments, **named)))


def looks(relay: Relay, times: int = 3) -> list[int]:
    """Return how many lanes were free at each look."""
    return [relay.distribution().free for _ in range(times)]


def test_the_lanes_of_a_relay_whose_session_has_ended_are_free_at_the_second_look(outbox_postgres, open_relay):
    killed, other = (open_relay(outbox_postgres.url, name) for name in ("killed", "other"))
    before = {lease.lane: lease.epoch for lease in killed.acquire(2)}
    assert dict(other.distribution().held) == {"killed": 2, "other": 0}
    killed.ends()
    # It may be alive, and open another one.
    assert looks(other, 1) == [2]
    assert not before.keys() & {lease.lane for lease in other.acquire(4)}
    distribution = other.distribution()
    # The others share all lanes: it counts no more.
    assert (distribution.held, distribution.free) == ({"other": 2}, 2)
    assert {lease.lane: lease.epoch for lease in other.acquire(4)} == {
        lane: epoch + 1 for lane, epoch in before.items()
    }
    assert looks(other) == [0, 0, 0]


@pytest.mark.parametrize("beats_again", [False, True])
def test_the_database_s_clock_goes_back_before_the_session_ends(outbox_postgres, open_relay, beats_again):
    killed, other = (open_relay(outbox_postgres.url, name) for name in ("killed", "other"))
    killed.acquire(4)
    looks(other)
    clock_back(outbox_postgres)
    # Its last beat is in the future.
    assert looks(other, 1) == [0]
    if beats_again:
        killed.beat()
    killed.ends()
    assert looks(other, 2) == [0, 4]
    assert len(other.acquire(4)) == 4


def test_a_source_of_all_lanes_takes_those_of_an_ended_session(outbox_postgres, open_relay):
    look_up(outbox_postgres.url, "UPDATE outbox.lanes SET source = 'wal' RETURNING 1")
    killed, other = (open_relay(outbox_postgres.url, name, "wal") for name in ("killed", "other"))
    assert len(killed.acquire_all()) == 4
    looks(other)
    killed.ends()
    other.distribution()
    assert other.acquire_all() == []
    other.distribution()
    assert [lease.epoch for lease in other.acquire_all()] == [2] * 4


def test_a_relay_that_is_halted_keeps_its_session_and_its_lanes(outbox_postgres, open_relay):
    halted, other = (open_relay(outbox_postgres.url, name) for name in ("halted", "other"))
    halted.acquire(4)
    assert looks(other) == [0, 0, 0]
    assert other.acquire(4) == []


@pytest.mark.parametrize("moment", ["before the second look", "before the lanes are taken"])
def test_a_relay_that_opens_another_session_keeps_its_lanes(outbox_postgres, open_relay, moment):
    relay, other = (open_relay(outbox_postgres.url, name) for name in ("relay", "other"))
    leases = relay.acquire(4)
    looks(other)
    relay.ends()
    other.distribution()
    if moment == "before the lanes are taken":
        assert looks(other, 1) == [4]
    again = open_relay(outbox_postgres.url, "relay")
    if moment == "before the second look":
        assert looks(other) == [0, 0, 0]
    assert other.acquire(4) == []
    assert again.renew(leases).lost == []


def test_a_process_frees_the_lanes_of_a_former_one_of_its_name(outbox_postgres, open_relay):
    """Its first beat replaces the session that others have to miss twice."""
    killed, other = (open_relay(outbox_postgres.url, name) for name in ("killed", "other"))
    lanes = [lease.lane for lease in killed.acquire(3)]
    others = other.acquire(1)
    looks(other)
    killed.ends()
    with outbox_postgres.connect() as locking:
        locking.execute("SELECT FROM outbox.lanes WHERE lane = %s FOR UPDATE", (lanes[0],))
        again = open_relay(outbox_postgres.url, "killed", first=True)
    assert again.freed == lanes[1:]
    assert looks(other) == [2, 2, 2]
    assert [(lease.lane, lease.epoch) for lease in again.acquire(4)] == [(lane, 2) for lane in lanes[1:]]
    assert other.renew(others).lost == []


def test_a_process_frees_no_lanes_of_a_living_one_of_its_name(outbox_postgres, open_relay):
    leases = open_relay(outbox_postgres.url, "relay").acquire(4)
    again = open_relay(outbox_postgres.url, "relay", first=True)
    assert (again.freed, looks(again)) == ([], [0, 0, 0])
    assert again.renew(leases).lost == []


@pytest.mark.parametrize("without", ["killed", "again"])
def test_without_a_session_the_leases_decide_when_a_process_comes_back(outbox_postgres, open_relay, without):
    """Behind a pooler, and with at-most-once."""
    url = outbox_postgres.url
    killed = table(outbox_postgres, "relay", LEASE) if without == "killed" else open_relay(url, "relay")
    killed.beat()
    taken(killed)
    killed.close() if without == "killed" else killed.ends()
    again = table(outbox_postgres, "relay", LEASE) if without == "again" else open_relay(url, "relay", first=True)
    assert again.free_former() == [] if without == "again" else again.freed == []
    assert looks(again) == [3, 3, 3]


def test_a_session_that_was_never_seen_alive_has_not_ended(outbox_postgres, open_relay):
    killed = open_relay(outbox_postgres.url, "killed")
    killed.acquire(4)
    killed.ends()
    other = open_relay(outbox_postgres.url, "other")
    assert looks(other) == [0, 0, 0]
    assert other.acquire(4) == []


def test_no_lane_changes_hands_when_the_server_crashes(private_postgres, open_relay):
    """All sessions end. Each relay opens another one, and the first to do so must not take the lanes of the others."""
    server = private_postgres()
    url = private_postgres.database(server).url
    relay, other = (open_relay(url, name) for name in ("relay", "other"))
    leases = relay.acquire(4)
    looks(other)
    server.kill()
    server.start()
    with pytest.raises(psycopg.OperationalError):
        other.connection.execute("SELECT 1")
    other = open_relay(url, "other")
    assert looks(other) == [0, 0, 0]
    assert other.acquire(4) == []
    assert open_relay(url, "relay").renew(leases).lost == []


@pytest.mark.parametrize("without", ["killed", "other"])
def test_no_lane_is_taken_before_its_lease_ends_where_a_relay_has_no_session(outbox_postgres, open_relay, without):
    """Behind a pooler, where its connection can outlive a crash of the server, and with at-most-once."""
    url = outbox_postgres.url
    killed, other = (
        table(outbox_postgres, name, LEASE) if name == without else open_relay(url, name)
        for name in ("killed", "other")
    )
    killed.beat()
    other.beat()
    taken(killed)
    looks(other)
    killed.close() if without == "killed" else killed.ends()
    assert looks(other) == [3, 3, 3]
    assert len(other.acquire(4)) == 3


def test_relays_of_several_roles_see_the_ends_of_each_others_sessions(outbox_postgres, open_relay):
    """With the grants of relays, and no more: pg_stat_activity would hide most of another role's sessions."""
    admin = outbox_postgres.connect(autocommit=True)
    with ExitStack() as stack:
        roles = [stack.enter_context(login_role(admin, "relay")) for _ in range(2)]
        for grant in grants([(RoleKind.RELAY, role) for role in roles], "outbox", "consumer", wal=False):
            admin.execute(grant.encode())
        urls = [outbox_postgres.url.replace("postgres@", f"{role}@") for role in roles]
        killed, other = open_relay(urls[0], "killed"), open_relay(urls[1], "other")
        killed.url = outbox_postgres.url
        killed.acquire(4)
        looks(other)
        killed.ends()
        assert looks(other, 2) == [0, 4]
        assert len(other.acquire(4)) == 4
        other.ends()
