"""What ``outbox consume`` prints of a run that has ended."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from relay.cli.app import app
from spark_jobs.cli import consume
from spark_jobs.driver.options import Totals

COMMAND = ["consume", "spark_jobs.order_totals:job", "--once"]
HINT = "see outbox dead-letters list --side consumer --group order-totals"


@pytest.mark.parametrize(
    ("dead", "lines"),
    [
        (0, ["order-totals: read 1,002, applied 999, duplicates 2 in 1.5 s"]),
        (1, ["order-totals: read 1,002, applied 999, duplicates 2, dead letters 1 in 1.5 s", HINT]),
    ],
)
def test_what_was_read_and_applied_and_where_to_look(monkeypatch, dead, lines):
    totals = Totals("order-totals", 1002, 999, 2, dead, 1, 1.5)
    monkeypatch.setattr(consume, "_run", lambda *_: totals)
    done = CliRunner().invoke(app, COMMAND)
    assert (done.exit_code, done.stdout.splitlines()) == (0, lines), done.output
    assert json.loads(CliRunner().invoke(app, [*COMMAND, "--json"]).stdout) == totals.as_dict()
