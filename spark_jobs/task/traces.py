"""A bounded sample of the traces of the messages that tasks read, for the links of a round's span.

A driver that records no span asks for none, and a task then looks at no header for it. Tasks need no OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from spark_jobs.task.incoming import Incoming, Messages

EventTrace = tuple[str, str | None]
"""``traceparent`` and ``tracestate``."""


class TraceSink(Protocol):
    """What brings the sample to the driver: an accumulator of Spark's."""

    def add(self, term: list[EventTrace]) -> None:
        """Add some traces. Those that are there already, and those beyond the bound, are dropped."""
        ...


@dataclass(frozen=True, slots=True)
class TraceSample:
    """Up to ``most`` distinct traces of a round."""

    sink: TraceSink
    most: int

    def take(self, messages: Messages, incoming: Incoming) -> None:
        """Add the traces of the messages that are selected by their types."""
        self.sink.add(incoming.chosen(messages).traces(self.most))


@dataclass(frozen=True, slots=True)
class Bounded:
    """How samples are merged: the accumulator's parameter. What a task reads twice is there once."""

    most: int

    def zero(self, _value: Sequence[EventTrace]) -> list[EventTrace]:
        """Return an empty sample."""
        return []

    def addInPlace(self, value1: list[EventTrace], value2: list[EventTrace]) -> list[EventTrace]:  # noqa: N802  Spark's
        """Return the first distinct traces of both."""
        return list(dict.fromkeys([*value1, *value2]))[: self.most]
