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
