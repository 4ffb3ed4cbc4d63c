"""What an audit has read of the tables, of Kafka and of the groups, to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relay.audit.groups import Group
from relay.audit.sums import Sum, Window
from relay.audit.tables import Committed, Misplaced
from relay.audit.topics import Cell
from relay.kafka.offsets import Partition


@dataclass(frozen=True, slots=True)
class Readings:
    """What was read, by window.

    unpublished  in the order of UNPUBLISHED.
    cells        by partition and minute; ``applied`` by group and minute.
    """

    unpublished: Sequence[Mapping[Window, Sum]]
    scheduled: Mapping[Window, Sum]
    written: Mapping[Window, Sum]
    committed: Mapping[Window, Committed]
    misplaced: Sequence[Misplaced]
    cells: Mapping[tuple[Partition, int], Cell]
    groups: Sequence[Group]
    applied: Mapping[tuple[str, int], Sum]
