"""Prometheus metrics of relays and of the outbox."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"outbox_{name}", text, value=value)


def gauges(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    """Return a gauge with labels, and a value for each combination of their values."""
    family = GaugeMetricFamily(f"outbox_{name}", text, labels=labels)
    for labelled, value in values:
        family.add_metric(labelled, value)
    return family
