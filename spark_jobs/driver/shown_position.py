"""The group's position in Kafka, for Kafka's own tools: nothing reads it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import Partition, StoredOffset
from spark_jobs.driver.options import Report


@dataclass
class ShownPosition:
    """Shows a group's position to Kafka without waiting for the answers. Failures are reported with a later call."""

    kafka: KafkaAdmin
    group: str
    report: Report
    _shown: dict[Partition, int] = field(default_factory=dict)

    def show(self, ends: Mapping[Partition, int]) -> None:
        """Show the ends of a round."""
        self._shown |= ends
        self._report_problem(self.kafka.show_lag(self.group, ends, seconds=0))

    def show_stored(self, stored: Mapping[Partition, StoredOffset]) -> None:
        """Show offsets that are beyond the shown ends: up to the next message, or the log's end."""
        further = {
            partition: here.next_offset
            for partition, here in stored.items()
            if self._shown.get(partition, here.next_offset) < here.next_offset
        }
        if further:
            self.show(further)

    def wait(self) -> None:
        self._report_problem(self.kafka.lag_shown(self.group))

    def _report_problem(self, problem: str | None) -> None:
        if problem is not None:
            self.report("the group's position could not be shown to Kafka", {"error": problem})
