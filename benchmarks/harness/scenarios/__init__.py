"""What is measured, in the order in which it is run and reported."""

from __future__ import annotations

from typing import Final

from benchmarks.harness.scenarios.base import Scenario, Sizes
from benchmarks.harness.scenarios.costs import Costs, Turns
from benchmarks.harness.scenarios.drains import DrainSmall, DrainUsual, HotKey
from benchmarks.harness.scenarios.guarantees import Guarantees
from benchmarks.harness.scenarios.held import Held
from benchmarks.harness.scenarios.idle import Empty
from benchmarks.harness.scenarios.killed import Killed
from benchmarks.harness.scenarios.lanes import Lanes
from benchmarks.harness.scenarios.latencies import AfterRest, Steady600
from benchmarks.harness.scenarios.writer import Writers

ALL: Final[tuple[type[Scenario], ...]] = (
    Steady600,
    DrainUsual,
    DrainSmall,
    AfterRest,
    Killed,
    Lanes,
    Empty,
    HotKey,
    Held,
    Writers,
    Guarantees,
    Costs,
    Turns,
)

__all__ = ["ALL", "Scenario", "Sizes"]
