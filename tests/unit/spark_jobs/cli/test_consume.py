"""What ``outbox consume`` prints of a run that has ended, a signal while Spark starts, and the end of Spark's JVM."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from types import SimpleNamespace

import pytest
from support import wait_until
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


@pytest.mark.parametrize("early", [False, True])
def test_only_a_jvm_that_ends_before_spark_is_stopped_ends_the_process(monkeypatch, early):
    """Whose status is then 1. A run that has ended stops Spark, and its JVM may be gone before this process."""
    ends: list[str] = []
    monkeypatch.setattr(consume, "die", ends.append)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as jvm:

        def stop() -> None:
            jvm.stdin.close()
            jvm.wait(60)

        spark = SimpleNamespace(sparkContext=SimpleNamespace(_gateway=SimpleNamespace(proc=jvm)), stop=stop)
        with consume._ending_with_its_jvm(spark):
            [watching] = [one for one in threading.enumerate() if one.name == "end-with-its-jvm"]
            if early:
                jvm.kill()
                wait_until(lambda: ends, 60, "the end of the process")
        watching.join(60)
    assert not watching.is_alive()
    assert ends == ["Spark's JVM has ended; nothing is lost, run the job again"] * early
