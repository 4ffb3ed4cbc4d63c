"""The handover of lanes between the control loop and the worker's loop."""

from __future__ import annotations

from outbox._clients.clock import uptime
from relay.core.lease import HeldLanes, Lease, LetGo


def test_letting_go_of_a_former_lease_leaves_the_lane_that_was_taken_again():
    held, former, again = HeldLanes(), *(Lease(0, epoch, 60.0, uptime()) for epoch in (1, 2))
    held.give([former])
    held.give([again])
    held.let_go(former, clean=False, lost=True)
    assert (held.leases, held.take_let_go()) == ([again], [])
    held.let_go(again, clean=True)
    assert (held.leases, held.take_let_go()) == ([], [LetGo(again, clean=True)])


def test_a_lane_that_was_lost_and_taken_again_is_neither_lost_nor_recalled():
    held, former, again = HeldLanes(), *(Lease(0, epoch, 60.0, uptime()) for epoch in (1, 2))
    held.give([former])
    held.recall([0], lost=True)
    held.give([again])
    assert held.recalled == set()
    held.let_go(again, clean=True)
    assert held.take_let_go() == [LetGo(again, clean=True)]


def test_a_lane_that_others_wait_for_is_overdue_when_its_time_is_over():
    held = HeldLanes()
    held.give([Lease(lane, 1, 15.0, uptime()) for lane in range(3)])
    held.recall([0])
    held.recall([1], settle_seconds=60.0)
    held.recall([2], lost=True)
    assert (held.recalled, held.overdue, [lease.lane for lease in held.ours]) == ({0, 1, 2}, set(), [0, 1])
    held.recall_all(settle_seconds=0.0)
    held.recall([0], settle_seconds=60.0)
    assert held.overdue == {0, 1, 2}
    held.give([Lease(0, 2, 15.0, uptime())])
    assert (held.recalled, held.overdue) == ({1, 2}, {1, 2})
