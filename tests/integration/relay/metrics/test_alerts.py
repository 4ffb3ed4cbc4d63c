"""The alert rules: tried by promtool, and by a real Prometheus that scrapes a real relay."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import psycopg
import pytest
from prometheus import Prometheus, require
from support import IMPATIENT, drained, wait_until

from outbox import Event, Outbox
from outbox.sandbox._ports import free_ports

MONITORING = Path(__file__).parents[4] / "docs" / "operations" / "monitoring"


EXPRESSION = re.compile(r'"expr": ("(?:[^"\\]|\\.)*")')


@pytest.mark.parametrize(
    "command", [["check", "slo.yaml"], *(["test", file.name] for file in sorted(MONITORING.glob("*.test.yaml")))]
)
def test_promtool_has_nothing_to_say(command):
    command = [require("promtool"), command[0], "rules", command[1]]
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_runbooks_become_links_by_the_command_of_the_page(tmp_path):
    (command,) = re.findall(r"^sed .*alerts\.yaml$", (MONITORING.parent / "relay.md").read_text(), re.MULTILINE)
    rules = subprocess.run(
        command, shell=True, cwd=MONITORING.parent, capture_output=True, text=True, check=True
    ).stdout
    links = re.findall(
        r"runbook_url: https://docs\.example\.com/operations/runbooks\.html#[\w-]+$", rules, re.MULTILINE
    )
    assert len(links) == rules.count("- alert: ") > 20
    (tmp_path / "alerts.yaml").write_text(rules)
    done = subprocess.run([require("promtool"), "check", "rules", tmp_path / "alerts.yaml"], check=False)
    assert done.returncode == 0


def test_panels_and_alerts_of_a_relay_that_prometheus_scrapes(outbox_postgres, outbox_kafka, outbox_relay, tmp_path):
    """No alert while all is well; then for events that are too large, and for a relay that is killed."""
    url = outbox_postgres.url
    small = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, {"max.message.bytes": "20000"})
    (port,) = free_ports(1)
    relay = outbox_relay(
        program=IMPATIENT,
        relay__metrics_address=f"127.0.0.1:{port}",
        relay__lease_seconds=20,
        routes=json.dumps({"Small": {"topic": small}}),
        failures__max_attempts=1,
    )
    with Prometheus(tmp_path, [port], MONITORING / "alerts.yaml") as prometheus:
        wait_until(lambda: prometheus.query("outbox_backlog_events"), what="the first scrape with a backlog")
        wait_until(lambda: prometheus.firing() == set(), what="the alerts of the start to be over")
        with psycopg.connect(url) as connection:
            Outbox().add_many(connection, [Event("Small", f"k{n}", "T", {"n": n}) for n in range(1_000)])
        drained(url)
        published = 'outbox_relay_events_total{result="published"}'
        wait_until(
            lambda: [one["value"][1] for one in prometheus.query(published)] == ["1000"],
            what="the events that were published",
        )
        wait_until(lambda: prometheus.firing() == set(), what="no alert")
        asked = [
            json.loads(each) for file in MONITORING.glob("*.json") for each in EXPRESSION.findall(file.read_text())
        ]
        assert len(asked) > 10
        for expression in asked:
            prometheus.query(expression.replace("$__rate_interval", "1m").replace("$outbox", "outbox"))
        with psycopg.connect(url) as connection:
            Outbox().add(connection, Event("Small", "k", "T", os.urandom(30_000)))
        wait_until(
            lambda: prometheus.firing() == {"OutboxKeyBlocked", "OutboxDeadLetters"}, what="the alerts of a dead letter"
        )
        relay.kill()
        wait_until(lambda: "OutboxNotPublishing" in prometheus.firing(), what="the alert that nobody publishes")
