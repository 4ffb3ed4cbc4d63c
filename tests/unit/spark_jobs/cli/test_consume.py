"""What ``outbox consume`` prints of a run that has ended, and a signal while Spark starts."""

from __future__ import annotations

import json
import signal

import pytest
from typer.testing import CliRunner

from relay.cli.app import app
from spark_jobs.cli import consume
from spark_jobs.driver.options import Totals
from spark_jobs.spark import session

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


def test_a_signal_while_spark_starts_is_heard(monkeypatch, capfd):
    """Linux drops a signal without a handler for a container's first process, which would then work until SIGKILL."""

    class Started(Exception):
        pass

    def start(*_: object, **__: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)
        raise Started

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(session, "start", start)
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", "127.0.0.1:1")
    try:
        done = CliRunner().invoke(app, ["consume", "spark_jobs.order_totals:job", "--continuous"])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert isinstance(done.exception, Started), done.output
    assert "stopping after this round" in capfd.readouterr().err
