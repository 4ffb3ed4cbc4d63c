"""`outbox consume` as operators see it: its last lines, its metrics, and a dead letter from end to end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from alerting import scraped
from support import wait_until

from outbox.sandbox._ports import free_ports

pytestmark = pytest.mark.spark

JOB = """
from spark_jobs.job import ConsumerJob

job = ConsumerJob(
    group="desk",
    topics=["set-by-the-test"],
    schema="order_id string, seq int, amount_cents long",
    setup='''CREATE TABLE IF NOT EXISTS seen (
        at bigint GENERATED ALWAYS AS IDENTITY, order_id text, seq int, amount_cents bigint)''',
    effect='''INSERT INTO seen (order_id, seq, amount_cents)
        SELECT order_id, seq, amount_cents FROM batch ORDER BY message_topic, message_part, message_offset''',
    keep_order=True,
)
"""
SANE = "ALTER TABLE seen ADD CONSTRAINT sane CHECK (amount_cents < 100) NOT VALID"
INSANE = "ALTER TABLE seen DROP CONSTRAINT sane"


class Desk:
    """The job in a folder of its own, the commands, and what is in the sink."""

    def __init__(self, bench: Any, folder: Path) -> None:
        self.bench = bench
        self.folder = folder
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        (folder / "desk_job.py").write_text(JOB)

    def start(self, *arguments: str, stdout: Any) -> subprocess.Popen[bytes]:
        more = {"OUTBOX_CONSUMER__METRICS_ADDRESS": self.address}
        return self.bench.consume(self.folder, *arguments, job="desk_job:job", stdout=stdout, **more)

    def log(self) -> str:
        return (self.folder / "consume.log").read_text()

    def command(self, *arguments: str) -> Any:
        return json.loads(self.bench.command("dead-letters", *arguments, "--side", "consumer", "--json"))

    def dead(self) -> list[tuple[int, str, str]]:
        return self.bench.rows("SELECT id, reason, state FROM consumer.dead_letters ORDER BY message_offset")

    def seen(self, order: str) -> list[int]:
        return [seq for name, seq in self.bench.rows("SELECT order_id, seq FROM seen ORDER BY at") if name == order]

    def metric(self, name: str) -> float | None:
        """The sum of a metric over all partitions; None while nobody answers, or without it."""
        series = f"outbox_consumer_{name}{{"
        found = [value for one, value in scraped(self.address).items() if one.startswith(series)]
        return sum(found) if found else None

    def figure(self, name: str) -> float:
        """The same as soon as it is there: a server that is asked too late for one answer is in a later one."""
        return wait_until(lambda: [found for found in [self.metric(name)] if found is not None], 60, name)[0]


@pytest.mark.timeout(600)
def test_from_a_bad_message_to_its_effect(bench, tmp_path):
    desk = Desk(bench, tmp_path)
    bench.run(JOB.split("'''")[1])
    bench.run(SANE)
    bench.send("a", 1)
    bench.send("a", 2, amount_cents=1000)
    bench.send("a", 3)
    bench.send("b", 1)

    process = desk.start("--once", stdout=subprocess.PIPE)
    shown = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, desk.log() + shown
    assert "desk: read 4, applied 2, duplicates 0, dead letters 2 in " in shown
    assert "outbox dead-letters list --side consumer --group desk" in shown
    assert (desk.seen("a"), desk.seen("b")) == ([1], [1])

    bad, behind = desk.command("list")["dead_letters"]
    assert [(row["reason"], row["state"], row["key"]) for row in (bad, behind)] == [
        ("failed", "dead", "a"),
        ("behind", "dead", "a"),
    ]
    shown = desk.command("show", str(bad["id"]))
    assert (shown["value"]["amount_cents"], shown["sqlstate"], shown["behind_it"]) == (1000, "23514", 1)
    assert "sane" in shown["error"]
    assert [header["key"] for header in shown["headers"]] == ["ce_id"]
    assert shown["headers"][0]["value"] == shown["message_id"]

    process = desk.start("--continuous", stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: desk.metric("generation") == 2, 120, "the second consumer")
        assert desk.figure("dead_letters_waiting") == 2
        # As it was: it fails again, and nothing overtakes it.
        desk.command("retry", str(bad["id"]))
        attempts = "SELECT attempts, state FROM consumer.dead_letters ORDER BY message_offset"
        wait_until(lambda: bench.rows(attempts)[0] == (2, "dead"), 60, "a second attempt")
        wait_until(lambda: [state for *_, state in desk.dead()] == ["dead", "dead"], 60, "both to be dead again")
        assert desk.seen("a") == [1]
        # The one behind is asked for; both are tried, in their order.
        bench.run(INSANE)
        assert desk.command("retry", str(behind["id"])) == {"retried": [bad["id"], behind["id"]]}
        wait_until(lambda: desk.dead() == [], 60, "the dead letters to be applied")
        assert desk.seen("a") == [1, 2, 3]
        wait_until(lambda: desk.metric("dead_letters_waiting") == 0, 60, "the metrics to tell")
        assert (desk.figure("messages_applied_total"), desk.figure("messages_dead_total")) == (4, 2)
        assert (desk.figure("lag_messages"), desk.figure("uncommitted_messages")) == (0, 0)
        assert desk.figure("next_offset") == desk.figure("log_end_offset") == 4
        wait_until(lambda: desk.metric("kafka_up") == 1, 60, "Kafka to answer in time")
        wait_until(lambda: (desk.metric("round_seconds_count") or 0) > 0, 60, "the round to be counted")

        process.terminate()
        assert process.wait(60) == 0, desk.log()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in desk.log()
    assert desk.seen("b") == [1]
