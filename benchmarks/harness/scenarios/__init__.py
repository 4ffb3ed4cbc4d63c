"""What is measured, in the order in which it is run and reported."""

from __future__ import annotations

from typing import Final

from benchmarks.harness.scenarios.base import Scenario, Sizes
from benchmarks.harness.scenarios.big import Big
from benchmarks.harness.scenarios.drains import Backlog5M, DrainSmall, DrainUsual, HotKey
from benchmarks.harness.scenarios.guarantees import Guarantees
from benchmarks.harness.scenarios.held import Held
from benchmarks.harness.scenarios.idle import Empty, Memory
from benchmarks.harness.scenarios.lanes import Lanes
from benchmarks.harness.scenarios.latencies import Steady600, TwoASecond
from benchmarks.harness.scenarios.writer import Writers

ALL: Final[tuple[type[Scenario], ...]] = (
    Steady600,
    DrainUsual,
    DrainSmall,
    Lanes,
    Empty,
    TwoASecond,
    HotKey,
    Backlog5M,
    Held,
    Big,
    Writers,
    Guarantees,
    Memory,
)

__all__ = ["ALL", "Scenario", "Sizes"]
