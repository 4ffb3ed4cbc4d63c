"""When a worker is ready, and what its lanes wait for: by a clock that the test turns."""

from __future__ import annotations

import pytest

from outbox._app.prometheus import Check
from outbox._clients.clock import uptime
from outbox.errors import SchemaError
from relay.core.health import Reason, Wait, WorkerHealth, reason_of
from relay.core.lease import Lease
from relay.core.marker import StateLost
from relay.core.ports import (
    BatchRefused,
    BrokerUnavailable,
    DatabaseUnavailable,
    DeliveryTimeout,
    LaneLocked,
    StandingError,
    StreamLost,
    Unavailable,
    UndecidedTransaction,
)

STANDING = 30.0


class Worker:
    """Two lanes, held and renewed; the loop turns and the control loop ticks with the clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.leases = [Lease(lane, 1, 1000.0, uptime()) for lane in (0, 1)]
        self.health = WorkerHealth(STANDING, lambda: self.now)
        self.turned_at = self.now
        self.health.ticked(started=True)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.turned_at = self.now
        self.health.ticked(started=True)

    def ready(self, *, away: bool = False) -> bool:
        return self.health.look(self.leases, self.turned_at, away=away).ready

    def waits(self) -> list[Wait]:
        return list(self.health.look(self.leases, self.turned_at).waits)

    def failed(self, **more: object) -> list[str]:
        """Return the lines of the checks that fail; those that count are why the worker is not ready."""
        health = self.health.look(self.leases, self.turned_at, **more)
        assert health.ready is all(check.passed for check in health.checks if check.counts)
        return [check.line() for check in health.checks if not check.passed]


@pytest.fixture
def worker():
    return Worker()


def test_a_line_for_each_check(worker):
    worker.health.waits([1], BrokerUnavailable("away"))
    worker.now += 2.0
    health = worker.health.look(worker.leases, worker.turned_at)
    assert [check.line() for check in health.checks] == [
        "[+]started ok",
        "[+]control-loop ok",
        "[+]turns ok",
        "[+]takes-part ok",
        "[+]lane-0 ok",
        "[+]lane-1 ok: kafka_unavailable for 2 s",
        "[+]transactions ok",
        "[+]upkeep ok",
        "[+]topic ok",
    ]
    worker.leases.clear()
    assert Check("lanes", passed=True, text="a standby holds none") in worker.health.look([], worker.turned_at).checks


def test_the_check_that_fails_names_what_stands_still(worker):
    assert worker.failed() == []
    worker.health.waits([1], LaneLocked(1))
    worker.later(STANDING)
    assert worker.failed() == ["[-]lane-1 failed: lane_locked for 30 s"]
    worker.health.goes_on([1])
    assert worker.failed(away=True) == ["[-]takes-part failed: its lanes are left to a relay that reaches Kafka"]
    assert worker.failed(hanging=[60.0, 90.0]) == ["[-]transactions failed: hanging_transaction for 90 s"]
    worker.health.control_waits(DatabaseUnavailable("away"))
    assert worker.failed() == []
    worker.now += STANDING
    assert worker.failed() == [
        "[-]control-loop failed: postgres_unavailable for 30 s",
        "[-]turns failed: none has ended for 30 s",
        "[-]lane-0 failed: turn_unfinished for 30 s",
        "[-]lane-1 failed: turn_unfinished for 30 s",
    ]
    worker.later(0.0)
    worker.now = worker.turned_at = worker.now + STANDING
    assert worker.failed() == ["[-]control-loop failed: has not reached Postgres for 30 s"]


def test_what_is_shown_and_does_not_count(worker):
    assert worker.health.upkeep_waits("slot") == 0.0
    worker.later(61.0)
    assert worker.failed(topics={"orders": "topic 'orders'\n does not exist"}) == [
        "[-]upkeep-slot failed: for 61 s (leaves it ready)",
        "[-]topic-orders failed: topic 'orders' does not exist (leaves it ready)",
    ]
    health = worker.health.look(worker.leases, worker.turned_at)
    assert (health.ready, health.waits, health.upkeep) == (True, [], {"slot": 61.0})
    worker.health.upkeep_goes_on("slot")
    assert worker.failed() == []


def test_a_relay_that_has_not_started_says_so(worker):
    worker.health = WorkerHealth(STANDING, lambda: worker.now)
    assert worker.failed() == [
        "[-]started failed: no turn has ended without a failure yet",
        "[-]control-loop failed: has not reached Postgres yet",
    ]
    worker.health.control_waits(SchemaError("no table"))
    assert worker.failed()[1] == "[-]control-loop failed: postgres_refuses for 0 s"


def test_the_control_loop_waits_with_its_reason_without_any_lane(worker):
    worker.leases = []
    assert worker.health.control_waits(DatabaseUnavailable("away")) == 0.0
    worker.now += STANDING
    worker.turned_at = worker.now
    assert worker.health.control_waits(SchemaError("no table")) == STANDING
    assert worker.waits() == [Wait(Reason.POSTGRES_REFUSES, [], STANDING)]
    assert not worker.ready()
    worker.health.ticked(started=True)
    assert (worker.ready(), worker.waits()) == (True, [])


def test_the_control_loop_and_lanes_that_wait_for_the_same_are_one_wait(worker):
    worker.health.waits([1], DatabaseUnavailable("away"))
    worker.now += 1.0
    worker.health.control_waits(DatabaseUnavailable("away"))
    worker.now += 1.0
    assert worker.waits() == [Wait(Reason.POSTGRES, [1], 2.0)]


def test_a_lane_stands_still_from_its_first_failure_on_whatever_the_reason_is_now(worker):
    assert worker.health.waits([1], BrokerUnavailable("away")) == 0.0
    worker.later(STANDING / 2)
    assert worker.waits() == [Wait(Reason.KAFKA, [1], STANDING / 2)]
    assert worker.health.waits([1], LaneLocked(1)) == STANDING / 2
    assert worker.ready()
    worker.later(STANDING / 2)
    assert worker.waits() == [Wait(Reason.LANE_LOCKED, [1], STANDING)]
    assert not worker.ready()
    worker.health.goes_on([1])
    assert (worker.waits(), worker.ready()) == ([], True)
    assert worker.health.waits([1], LaneLocked(1)) == 0.0


def test_lanes_that_are_not_held_any_more_do_not_count(worker):
    worker.health.waits([0, 1, 2], StateLost("gone"))
    worker.later(STANDING)
    assert worker.waits() == [Wait(Reason.STATE_LOST, [0, 1], STANDING)]
    worker.leases.clear()
    assert (worker.waits(), worker.ready()) == ([], True)


def test_a_lease_that_has_run_out_is_a_wait_since_then(worker):
    # A lease goes by the real clock.
    began = uptime()
    worker.leases[1] = Lease(1, 1, 10.0, began - 25.0)
    (wait,) = worker.waits()
    assert (wait.reason, wait.lanes) == (Reason.LEASE_EXPIRED, [1])
    assert 15 <= wait.seconds <= 15 + uptime() - began
    assert worker.ready()
    worker.leases[1] = Lease(1, 1, 10.0, uptime() - 10.0 - STANDING)
    assert not worker.ready()
    # What the loop knows of it says more.
    worker.health.waits([1], LaneLocked(1))
    assert [wait.reason for wait in worker.waits()] == [Reason.LANE_LOCKED]


def test_it_is_ready_once_it_has_started_and_for_as_long_as_it_reaches_postgres(worker):
    health = worker.health = WorkerHealth(STANDING, lambda: worker.now)
    assert not worker.ready()
    health.ticked(started=False)
    assert not worker.ready()
    health.ticked(started=True)
    assert worker.ready()
    # A standby that takes lanes over has not lost its readiness.
    health.ticked(started=False)
    assert worker.ready()
    assert not worker.ready(away=True)
    worker.now = worker.turned_at = worker.now + STANDING
    assert not worker.ready()
    health.ticked(started=False)
    assert worker.ready()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StreamLost("x"), "stream_lost"),
        (StateLost("x"), "state_lost"),
        (UndecidedTransaction("not decided"), "undecided_transaction"),
        (LaneLocked(1), "lane_locked"),
        (DeliveryTimeout("x"), "kafka_unavailable"),
        (BatchRefused("x"), "kafka_unavailable"),
        (DatabaseUnavailable("x"), "postgres_unavailable"),
        (StandingError("x"), "postgres_refuses"),
        (SchemaError("x"), "postgres_refuses"),
        (Unavailable("x"), "other"),
    ],
)
def test_each_error_has_a_reason(error, reason):
    assert reason_of(error) == reason
