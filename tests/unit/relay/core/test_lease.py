"""The handover of lanes between the control loop and the worker's loop."""

from __future__ import annotations

import time

from relay.core.lease import HeldLanes, Lease, LetGo


def test_letting_go_of_a_former_lease_leaves_the_lane_that_was_taken_again():
    held, former, again = HeldLanes(), *(Lease(0, epoch, 60.0, time.monotonic()) for epoch in (1, 2))
    held.give([former])
    held.give([again])
    held.let_go(former, clean=False, lost=True)
    assert (held.leases, held.take_let_go()) == ([again], [])
    held.let_go(again, clean=True)
    assert (held.leases, held.take_let_go()) == ([], [LetGo(again, clean=True)])
