"""Alert rules and the dashboards name metrics that exist. Their runbooks: tests/acceptance/runbooks/test_page.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MONITORING = ROOT / "docs" / "operations" / "monitoring"
sys.path.insert(0, str(ROOT / "docs" / "reference"))

import generate  # noqa: E402

from outbox.consumer.delays import BUCKETS  # noqa: E402

ALERTS = (MONITORING / "alerts.yaml").read_text()
RULES = re.findall(r"^      - alert: (\w+)\n(.*?)(?=^      - alert|\Z|^  - name)", ALERTS, re.MULTILINE | re.DOTALL)


def series() -> set[str]:
    """Return every name that a query may have: of a histogram also its parts."""
    names = generate.metric_names()
    parts = {
        f"{name}{end}" for name, kind in names.items() if kind == "histogram" for end in ("_bucket", "_sum", "_count")
    }
    return {name for name, kind in names.items() if kind != "histogram"} | parts


def unknown(text: str) -> set[str]:
    return set(re.findall(r"\boutbox_\w+", text)) - series()


def test_rules_name_metrics_that_exist_and_have_a_severity_and_a_summary():
    assert len(RULES) == ALERTS.count("- alert:") > 15
    for name, rule in RULES:
        (expression,) = re.findall(r"^        expr: (.*?)^        (?:for|labels):", rule, re.MULTILINE | re.DOTALL)
        assert "outbox_" in expression, name
        assert not unknown(expression), name
        assert re.search(r"severity: (page|ticket)\}", rule), name
        assert "summary: " in rule, name
        # Two outboxes on one Prometheus: neither hides the other.
        assert not re.search(r"\babsent\(", expression), name
        for aggregated in re.findall(r"\b(?:sum|max|min|count|on)\b[^(]*\(([^)]*)\)", expression):
            assert "outbox" in aggregated.split(", "), (name, expression)
    assert unknown("sum(outbox_backlog) + outbox_relay_turn_seconds") == {"outbox_backlog", "outbox_relay_turn_seconds"}


def test_objectives_name_metrics_that_exist_and_limits_that_are_buckets():
    rules = (MONITORING / "slo.yaml").read_text()
    assert not unknown(re.sub(r"^#.*$", "", rules, flags=re.MULTILINE))
    limits = set(re.findall(r'le="([^"]+)"', rules))
    assert limits
    assert limits <= {str(float(limit)) for limit in BUCKETS}
    assert set(re.findall(r"outbox:\w+:\w+", rules)) == set(re.findall(r"- record: (outbox:\w+:\w+)", rules))
    assert len(re.findall(r"runbook: runbooks\.md#[\w-]+", rules)) == 3


@pytest.mark.parametrize("file", sorted(MONITORING.glob("*.json")), ids=lambda path: path.name)
def test_dashboards_name_metrics_that_exist(file):
    dashboard = json.loads(file.read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert targets
    for target in targets:
        assert "outbox_" in target["expr"]
        assert not unknown(target["expr"]), target["expr"]
        selected = target["expr"].count('outbox=~"$outbox')
        assert len(re.findall(r"outbox_\w+", target["expr"])) == selected, target["expr"]
        assert target["legendFormat"].startswith("{{outbox}} "), target["expr"]
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"], panel["title"]
