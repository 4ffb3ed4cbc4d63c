"""What a scenario is: the ways that it runs in every round, the figures, and the targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from benchmarks.harness.choice import Named
from benchmarks.harness.publishers import Way
from benchmarks.harness.relays import Ours, ours
from benchmarks.harness.results import Metric, Results, Run, Target
from benchmarks.harness.servers import Servers

AT_MOST_ONCE: Final = ours("polling", "at-most-once")
POLLING: Final = ours("polling", "at-least-once")
POLLING_ONCE: Final = ours("polling", "exactly-once")
WAL: Final = ours("wal", "at-least-once")
WAL_ONCE: Final = ours("wal", "exactly-once")
OURS: Final = (POLLING, POLLING_ONCE, WAL, WAL_ONCE)


@dataclass(frozen=True)
class Sizes:
    """How much is written and how long is measured. The targets are for the defaults."""

    name: str = "normal"
    drain: int = 200_000
    warm: int = 50_000
    warm_ours: int = 5_000
    steady_seconds: float = 20
    empty_seconds: float = 20
    lanes: int = 256
    hot: int = 100_000
    held_seconds: float = 60
    held_backlog: int = 100_000
    writer_transactions: int = 8_000
    rest_seconds: float = 60
    slow_seconds: float = 60
    killed_seconds: float = 45


QUICK: Final = Sizes(
    name="quick",
    drain=10_000,
    warm=3_000,
    warm_ours=1_000,
    steady_seconds=3,
    empty_seconds=3,
    lanes=32,
    hot=5_000,
    held_seconds=3,
    held_backlog=5_000,
    writer_transactions=400,
    rest_seconds=1,
    slow_seconds=3,
    killed_seconds=30,
)


@dataclass(frozen=True)
class Variant:
    """Our relay under one of several conditions: ``value`` says which, ``label`` names it in reports."""

    way: Ours
    value: int
    label: str

    @property
    def name(self) -> str:
        return f"{self.way.name}, {self.label}"


class Scenario(ABC):
    """One question. ``name`` is what --only takes; ``title`` and ``about`` are for readers."""

    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    warmed_by: ClassVar[Sequence[Way]] = ()
    """What runs before the first round, unmeasured: a broker's first requests and events take many times as much CPU,
    as its compiler works beside what is measured.
    """
    once: ClassVar[bool] = False
    """Whether one round is enough: it takes long, and compares within itself."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @property
    @abstractmethod
    def ways(self) -> Sequence[Named]:
        """What is run in each round; the order changes from round to round."""

    @abstractmethod
    def run(self, servers: Servers, way: Any, run: Run) -> None:
        """Measure one way, and put the figures into ``run``. Raises BenchError when events are lost."""

    @abstractmethod
    def targets(self, results: Results) -> list[Target]:
        """Return what is asked for, with what was found."""

    @property
    def quick(self) -> bool:
        """Return whether the run only shows that the benchmark works: then fewer ways are enough."""
        return self.sizes.name == QUICK.name

    def warm(self, way: Way) -> int:
        """Return how many events warm a publisher up: a JVM takes more than the others."""
        return self.sizes.warm if way.name.startswith("Debezium") else self.sizes.warm_ours
