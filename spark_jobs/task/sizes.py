"""How many bytes tasks have read of each partition: of all messages, also of those that become no rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from outbox.consumer.model import Partition


class ReadSizes(Protocol):
    """What brings the sizes to the driver: an accumulator of Spark's."""

    def add(self, term: dict[Partition, int]) -> None:
        """Add the size of a range that was read."""
        ...


class Largest:
    """How sizes are merged: the accumulator's parameter. A range that is read twice counts once."""

    def zero(self, _value: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return no sizes."""
        return {}

    def addInPlace(self, value1: dict[Partition, int], value2: dict[Partition, int]) -> dict[Partition, int]:  # noqa: N802  Spark's
        """Return the larger size of each partition."""
        return value1 | {partition: max(size, value1.get(partition, 0)) for partition, size in value2.items()}
