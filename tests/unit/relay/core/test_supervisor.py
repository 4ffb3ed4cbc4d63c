"""What the control loop does with what it has counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

import relay.supervisor
from outbox._clients.clock import uptime
from relay.config import load
from relay.core import reports
from relay.core.lane import Backoff, Lane
from relay.core.lease import Lease
from relay.core.ports import NOTHING, DatabaseUnavailable, StatementCutShort, Unavailable, UnsettledBatch
from relay.lanes import LaneDistribution, Renewal
from relay.supervisor import Supervisor
from relay.wiring import build

LANES = 256


class Table:
    """Counts what a test says, and notes in ``did`` what it is asked to do."""

    pauses = None
    next_due_seconds = None

    def __init__(self, held: dict[str, int], *, lanes: int = LANES, free: int = 0, lost: Sequence[Lease] = ()) -> None:
        self._distribution = LaneDistribution(held, lanes=lanes, free=free, total=LANES)
        self._lost = list(lost)
        self.did: list[str] = []
        self.released: list[Lease] = []
        self.locked: set[int] = set()
        self.fail_release: list[Unavailable] = []

    def distribution(self, _next_due: object) -> LaneDistribution:
        return self._distribution

    def acquire(self, count: int) -> list[Lease]:
        self.did.append(f"take {count}")
        return [Lease(lane, 1, 60.0, uptime()) for lane in range(count)]

    def renew(self, _leases: object) -> Renewal:
        self.did.append("renew")
        return Renewal(self._lost)

    def beat(self, *_obeyed: object) -> None:
        self.did.append("beat")

    def leave(self) -> None:
        self.did.append("leave")

    def forget_dead(self) -> None:
        """None is dead."""

    def release(self, leases: list[Lease], **_: object) -> list[int]:
        if self.fail_release:
            raise self.fail_release.pop()
        self.released += [lease for lease in leases if lease.lane not in self.locked]
        return [lease.lane for lease in leases if lease.lane in self.locked]

    def close(self) -> None:
        self.did.append("close")


@pytest.fixture
def supervisor() -> Supervisor:
    settings: dict[str, Any] = {"relay": {"instance": "me"}, "kafka": {"bootstrap.servers": "127.0.0.1:1"}}
    made = build(load(database_url="postgresql://127.0.0.1:1/x", **settings))
    made._held.give([Lease(lane, 1, 60.0, uptime()) for lane in range(LANES)])
    return made


@pytest.mark.parametrize(
    ("lease", "more", "warned"),
    [(15.0, {}, []), (60.0, {}, [40.0]), (60.0, {"delivery.timeout.ms": "20000"}, [])],
)
def test_a_relay_says_that_a_turn_may_take_longer_than_a_stop_waits(lease, more, warned) -> None:
    kafka = {"bootstrap.servers": "127.0.0.1:1"} | more
    with capture_logs() as said:
        build(load(database_url="postgresql://127.0.0.1:1/x", relay={"lease_seconds": lease}, kafka=kafka))
    assert [one["turn_seconds"] for one in said if "SHUTDOWN_SECONDS" in one["event"]] == warned


def test_lanes_above_the_share_are_recalled(supervisor: Supervisor) -> None:
    supervisor._balance(Table({"me": LANES, "other": 0}))  # type: ignore[arg-type]
    assert len(supervisor._held.recalled) == LANES // 2
    # They are counted until they are released.
    supervisor._balance(Table({"me": LANES, "other": 0}))  # type: ignore[arg-type]
    assert len(supervisor._held.recalled) == LANES // 2


def test_more_recalled_lanes_than_have_to_go_are_no_reason_to_recall_the_others(supervisor: Supervisor) -> None:
    """Two relays joined, and one has left before the worker let go of any lane."""
    supervisor._balance(Table({"me": LANES, "one": 0, "two": 0}))  # type: ignore[arg-type]
    recalled = supervisor._held.recalled
    assert len(recalled) == LANES - 86
    supervisor._balance(Table({"me": LANES, "one": 0}))  # type: ignore[arg-type]
    assert supervisor._held.recalled == recalled


def test_lanes_of_the_other_source_are_named_with_the_way_out_and_again_each_minute(supervisor, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(relay.supervisor.log, "warning", lambda _event, problem, **_: said.append(problem))
    clock = [0.0]
    monkeypatch.setattr(reports, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def tick(lanes: int) -> list[str]:
        supervisor._balance(Table({"me": 0}, lanes=lanes))
        return [check.text for check in supervisor.health().checks if check.name == "source"]

    way_out = "run relays with OUTBOX_SOURCE=wal, or `outbox relay switch polling`"
    (text,) = tick(0)
    assert text.endswith(way_out)
    assert tick(0) == [text]
    assert said == [text]
    clock[0] += 61.0
    tick(0)
    assert said == [text, text]
    assert tick(LANES) == []


def test_a_relay_that_left_its_lanes_takes_them_again_when_no_other_one_is_alive(supervisor, monkeypatch) -> None:
    """Waiting for the rest of the minute, nothing would be published: the relay that has the lanes is gone."""

    def tick(held: dict[str, int], free: int) -> list[str]:
        table = Table(held, free=free)
        supervisor._balance(table)
        return table.did

    supervisor._worker.loop.failing_since = time.monotonic() - 1000.0
    assert tick({"me": LANES, "other": 0}, 0) == ["leave"]
    for lease in supervisor._held.leases:
        supervisor._held.let_go(lease, clean=True)
    # The other one is alive: the lanes are its own, even those that are free.
    assert tick({"other": 0}, LANES) == []
    # It is gone, or halted. The next tick counts both relays if it wakes meanwhile.
    assert tick({}, 0) == ["beat", "renew"]
    assert tick({"me": 0}, LANES) == [f"take {LANES}"]


def test_a_relay_that_came_back_alone_and_publishes_nothing_leaves_its_lanes_at_once_to_another_one(
    supervisor, monkeypatch
) -> None:
    """Otherwise the lanes that it took while another one restarted stand still as long again as it tried at first."""
    clock = [1000.0]
    monkeypatch.setattr(relay.supervisor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    loop = supervisor._worker.loop

    def tick(held: dict[str, int], free: int, after_seconds: float = 1.0) -> int:
        """Return how many lanes it keeps."""
        clock[0] += after_seconds
        supervisor._balance(Table(held, free=free))
        for lease in supervisor._held.leases:
            if lease.lane in supervisor._held.recalled:
                supervisor._held.let_go(lease, clean=True)
        return len(supervisor._held.leases)

    loop.failing_since = clock[0] - 1000.0
    assert tick({"me": LANES, "other": 0}, 0) == 0
    # The other one restarts.
    tick({}, LANES)
    assert tick({"me": 0}, LANES) == LANES
    # It has not tried yet.
    assert tick({"me": LANES, "other": 0}, 0) == LANES // 2
    loop.failing_since = clock[0]
    assert tick({"me": LANES // 2, "other": LANES // 2}, 0) == 0
    # After the minute it tries as long as at first.
    assert tick({"me": 0, "other": LANES // 2}, LANES // 2, 61.0) == LANES // 2
    loop.failing_since = clock[0]
    assert tick({"me": LANES // 2, "other": LANES // 2}, 0) == LANES // 2
    assert tick({"me": LANES // 2, "other": LANES // 2}, 0, 1000.0) == 0
    # Back alone, and it publishes again.
    tick({}, LANES)
    assert tick({"me": 0}, LANES) == LANES
    loop.failing_since = None
    assert tick({"me": LANES, "other": 0}, 0) == LANES // 2


def test_lanes_of_the_stream_are_left_together_when_all_they_published_is_settled(supervisor) -> None:
    """One that is kept to be settled would keep all the others from the next relay."""
    supervisor._components = replace(supervisor._components, begin_stream=lambda _leases: None)
    loop = supervisor._worker.loop
    loop.failing_since = time.monotonic() - 1000.0
    lane = loop.lanes[0] = Lane(supervisor._held.leases[0], Backoff(0.1, 1.0), unsettled=UnsettledBatch(number=1))
    for unsettled in (True, False):
        lane.unsettled = lane.unsettled if unsettled else NOTHING
        table = Table({"me": LANES, "other": 0})
        supervisor._balance(table)
        assert ("leave" in table.did) is not unsettled
        assert len(supervisor._held.recalled) == (0 if unsettled else LANES)


def test_lanes_of_the_stream_are_left_when_no_session_can_be_had_to_settle_them(supervisor) -> None:
    supervisor._components = replace(supervisor._components, begin_stream=lambda _leases: None)
    loop = supervisor._worker.loop
    loop.failing_since = loop.without_session_since = time.monotonic() - 1000.0
    loop.lanes[0] = Lane(supervisor._held.leases[0], Backoff(0.1, 1.0), unsettled=UnsettledBatch(number=1))
    supervisor._balance(Table({"me": LANES, "other": 0}))
    assert len(supervisor._held.recalled) == LANES


def test_leases_that_could_not_be_renewed_in_time_are_tried_with_each_tick(supervisor) -> None:
    """The worker locks their rows when it settles, for as long as that has to wait."""
    table = Table({"me": LANES})
    supervisor._keep(table)
    assert table.did == ["beat", "renew"]
    supervisor._keep(table)
    assert table.did == ["beat", "renew"]
    supervisor._held.leases[0]._until = time.monotonic() + 15.0
    supervisor._keep(table)
    supervisor._keep(table)
    assert table.did == ["beat", "renew", "renew", "renew"]


def test_a_lane_that_is_lost_counts_once_whether_a_turn_or_the_renewal_finds_it(supervisor) -> None:
    first, second, third = supervisor._held.leases[:3]

    def count() -> float:
        return supervisor._components.meter.lanes_lost._value.get()

    table = Table({"me": LANES}, lost=[first, second])
    # As often as it is renewed before the loop lets go of it; and a turn finds one of them too.
    for _ in range(2):
        supervisor._renew(table)
    assert count() == 0
    supervisor._held.let_go(first, clean=True)
    supervisor._held.let_go(second, clean=False, lost=True)
    supervisor._held.let_go(third, clean=True)
    supervisor._keep(table)
    assert (count(), table.released) == (2, [third])
    # One that is taken again is not lost any more.
    supervisor._held.give([first])
    supervisor._held.let_go(first, clean=True)
    supervisor._keep(table)
    assert (count(), table.released) == (2, [third, first])


def test_what_can_not_be_released_is_tried_again_until_it_is(supervisor) -> None:
    """It is neither renewed nor published: no relay would publish it until its lease ends."""
    ended: list[int] = []
    supervisor._components = replace(
        supervisor._components, begin_stream=lambda _leases: None, end_stream=lambda: ended.append(1)
    )
    leases = supervisor._held.leases
    for lease in leases:
        supervisor._held.let_go(lease, clean=True)
    table = Table({"me": LANES})
    table.fail_release = [DatabaseUnavailable("away")]
    table.locked = {1, 2}
    with pytest.raises(DatabaseUnavailable):
        supervisor._keep(table)
    # The stream's end does not depend on it.
    assert (table.released, ended) == ([], [1])
    supervisor._keep(table)
    assert [lease.lane for lease in table.released] == [0, *range(3, LANES)]
    table.locked = {2}
    supervisor._keep(table)
    supervisor._keep(table)
    assert [lease.lane for lease in table.released][-1:] == [1]
    # To the others, a relay that stops with a locked lane was killed: they take it when its session has ended.
    supervisor._table = table
    supervisor._sign_off(abandoned=False)
    assert ("leave" in table.did, table.did[-1]) == (False, "close")
    table.locked = set()
    supervisor._table = table
    supervisor._sign_off(abandoned=False)
    assert table.released[-1] is leases[2]
    assert table.did[-2:] == ["leave", "close"]


def test_a_beat_that_waits_in_vain_for_its_own_row_keeps_no_pause_from_being_read(supervisor, monkeypatch) -> None:
    table = Table({"me": LANES})
    monkeypatch.setattr(table, "beat", lambda *_: (_ for _ in ()).throw(StatementCutShort("locked")))
    supervisor._begun, supervisor._table = True, table
    looked: list[object] = []
    monkeypatch.setattr(supervisor, "_balance", looked.append)
    assert not supervisor._try_tick()
    assert (table.did, looked) == (["renew"], [table])
    assert supervisor._table is table
