"""The figures of runs, and the targets for them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final


@dataclass
class Run:
    """One run of one way in one round.

    figures    by the names of the scenario's metrics.
    repeated   copies of events on Kafka beyond the first.
    error      why there are no figures: an event was lost or out of order, a process failed. None when all is well.
    """

    scenario: str
    way: str
    round: int
    figures: dict[str, float] = field(default_factory=dict)
    repeated: int = 0
    lost: int = 0
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Metric:
    """A column of the report, with so many ``digits`` after the point."""

    name: str
    unit: str
    digits: int = 0

    def text(self, value: float) -> str:
        return f"{value:,.{self.digits}f}"


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of a metric over the rounds."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of values; None without any."""
        return cls(statistics.median(values), min(values), max(values)) if values else None

    def text(self, metric: Metric) -> str:
        """Return the median, and the least and the greatest value where they differ."""
        shown = [metric.text(value) for value in (self.median, self.least, self.greatest)]
        return shown[0] if self.least == self.greatest else f"{shown[0]} ({shown[1]}–{shown[2]})"


@dataclass(frozen=True)
class Target:
    """A target and the figure that was measured; ``spread`` and ``reached`` are None without a figure."""

    what: str
    asked: str
    spread: Spread | None
    reached: bool | None
    digits: int = 2

    @property
    def found(self) -> str:
        return "no figure" if self.spread is None else self.spread.text(Metric(self.what, "", self.digits))


class Results:
    """The runs of one scenario."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = list(runs)

    @property
    def ways(self) -> list[str]:
        """The ways in the order in which they first ran."""
        return list(dict.fromkeys(run.way for run in self.runs))

    def by_round(self, way: str, metric: str) -> dict[int, float]:
        """Return a way's figures by round; rounds in which it failed are missing."""
        return {
            run.round: run.figures[metric]
            for run in self.runs
            if run.way == way and run.error is None and metric in run.figures
        }

    def spread(self, way: str, metric: str) -> Spread | None:
        """Return the spread of a way's figures over the rounds; None without any."""
        return Spread.of(list(self.by_round(way, metric).values()))

    def best_debezium(self, metric: str, *, least: bool = False, but: str = "") -> dict[int, str]:
        """Return, for each round, Debezium's way with the greatest (or least) figure; ``but`` leaves one out."""
        rounds: dict[int, dict[str, float]] = {}
        for way in self.ways:
            if way.startswith("Debezium") and way != but:
                for number, value in self.by_round(way, metric).items():
                    rounds.setdefault(number, {})[way] = value
        choose = min if least else max
        return {number: choose(found, key=found.__getitem__) for number, found in rounds.items()}

    def ratio(self, way: str, other: str | Mapping[int, str], metric: str) -> list[float]:
        """Return a way's figures divided by another way's of the same round."""
        found = []
        for number, value in self.by_round(way, metric).items():
            of = other if isinstance(other, str) else other.get(number, "")
            base = self.by_round(of, metric).get(number)
            if base:
                found.append(value / base)
        return found


def at_least(what: str, values: Sequence[float], goal: float) -> Target:
    """Return the target that the median is ``goal`` or more."""
    spread = Spread.of(values)
    return Target(what, f"≥ {goal:g}", spread, None if spread is None else spread.median >= goal)


def at_most(what: str, values: Sequence[float], goal: float, digits: int = 2, unit: str = "") -> Target:
    """Return the target that the median is ``goal`` or less."""
    spread = Spread.of(values)
    return Target(what, f"≤ {goal:g}{unit}", spread, None if spread is None else spread.median <= goal, digits)


def beside(what: str, values: Sequence[float]) -> Target:
    """Return a figure that is shown without a target."""
    return Target(what, "–", Spread.of(values), None)


RATE: Final = Metric("rate", "events/s")
PER_CORE: Final = Metric("per_core", "events/s per core")
P50: Final = Metric("p50", "ms", 1)
P99: Final = Metric("p99", "ms", 1)
PUBLISHER_CPU: Final = Metric("publisher_cpu", "% of a core", 1)
POSTGRES_CPU: Final = Metric("postgres_cpu", "% of a core", 1)
BROKER_CPU: Final = Metric("broker_cpu", "% of a core", 1)
CPU: Final = (PUBLISHER_CPU, POSTGRES_CPU, BROKER_CPU)
