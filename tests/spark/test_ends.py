"""How ``outbox consume`` ends, as a process: when it gives up, at signals, and when its JVM dies under it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
from bench import Bench, Consumer, expected
from proxy import TcpProxy
from support import wait_until

from outbox.consumer.errors import ConsumerUnavailable
from spark_jobs.driver.options import Options
from spark_jobs.driver.runner import Runner

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
DRIVER, TASK = "outbox driver order-totals", "outbox consumer order-totals"


def jvm_of(consumer: Consumer) -> psutil.Process:
    [found] = [child for child in psutil.Process(consumer.process.pid).children() if "java" in child.name()]
    return found


def names(orders: int) -> list[str]:
    return [f"o{number}" for number in range(orders)]


def waiting(bench: Bench, name: str) -> bool:
    """Return whether a session of this name waits for a lock."""
    return bool(
        bench.rows(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
            f"AND application_name = '{name}'"
        )
    )


def gone(bench: Bench) -> bool:
    """Return whether no session of a consumer is left, so that nothing more can be applied."""
    return not bench.rows(
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox %'"
    )


@contextmanager
def locked(bench: Bench) -> Iterator[None]:
    """Keep every round from its end."""
    with psycopg.connect(bench.database.url) as connection:
        connection.execute("LOCK TABLE order_totals IN SHARE MODE")
        yield


def test_once_gives_up_without_its_sink_and_the_next_run_goes_on(bench, consumer):
    """In the middle of its rounds. Without Kafka: below."""
    seqs, orders = 60, 50
    bench.orders(names(orders), range(1, seqs + 1))
    address = urlsplit(bench.database.url)
    program = (str(ROOT / "tests" / "support" / "impatient_consumer.py"),)

    def applied() -> int:
        return sum(bench.positions().values())

    with TcpProxy(address.hostname, address.port) as proxy:
        through = bench.database.url.replace(f"{address.hostname}:{address.port}", proxy.address)
        consumer.start("--once", "--max-records", "20", program=program, OUTBOX_DATABASE_URL=through)
        consumer.until(lambda: applied() >= 100, "some rounds")
        proxy.stop()
        consumer.ended(1, "outbox: gave up after 10 s; nothing is lost, run the job again. Last error: ", "127.0.0.1")
    assert 0 < applied() < seqs * orders
    bench.once()
    assert bench.totals() == expected(names(orders), seqs)
    assert bench.rows("SELECT sum(applied)::int, sum(duplicates)::int FROM consumer.offsets") == [(seqs * orders, 0)]


@pytest.mark.parametrize("silent", ["Kafka", "Postgres"])
def test_a_question_that_nobody_answers_is_a_part_of_the_patience(bench, silent):
    """A port that accepts and says nothing. By itself a request to Kafka waits for 20 s, and a connection for 10 s."""
    reports: list[str] = []
    with TcpProxy("127.0.0.1", 9) as nobody:
        nobody.blackhole()
        address = urlsplit(bench.database.url)
        kafka = nobody.address if silent == "Kafka" else bench.topics.bootstrap_servers
        url = bench.database.url
        if silent == "Postgres":
            url = url.replace(f"{address.hostname}:{address.port}", nobody.address)
        options = Options(url, {"bootstrap.servers": kafka}, patience=3.0)
        with (
            pytest.raises(ConsumerUnavailable, match="gave up after 3 s; nothing is lost"),
            Runner(bench.spark, bench.job, options, lambda text, _: reports.append(text)) as runner,
        ):
            runner.once(threading.Event())
    # The first question took all of it: there was no other one.
    assert "waiting for a server" not in reports


def test_signals_and_a_jvm_that_dies(bench, consumer):
    """One test: what each of these leaves, the next run finds. A single signal: test_process.py."""
    bench.run(bench.job.setup)
    bench.orders(names(10), range(1, 5))
    nothing = (0, {})

    def state() -> tuple[int, dict[str, tuple[object, ...]]]:
        return sum(bench.positions().values()), bench.totals()

    # The second signal ends it in the middle of its round.
    with locked(bench):
        consumer.start("--continuous")
        consumer.until(lambda: waiting(bench, DRIVER), "the driver's round to wait")
        jvm = jvm_of(consumer)
        consumer.signal(signal.SIGTERM)
        consumer.until(lambda: "stopping" in consumer.log(), "the first signal to be heard")
        assert waiting(bench, DRIVER)
        consumer.signal(signal.SIGINT)
        consumer.ended(1, "outbox: ended in the middle of a round, after two signals")
    wait_until(lambda: gone(bench) and not jvm.is_running(), 60, "its sessions and its JVM to be gone")
    assert state() == nothing

    # The JVM is killed under the tasks of a round.
    with locked(bench):
        consumer.start("--continuous", OUTBOX_CONSUMER__DRIVER_RECORDS="0")
        consumer.until(lambda: waiting(bench, TASK), "a task to wait")
        jvm_of(consumer).kill()
        consumer.ended(1, "outbox: Spark's JVM has ended; nothing is lost, run the job again")
    wait_until(lambda: gone(bench), 60, "its sessions to be gone")
    assert state() == nothing

    # The JVM is killed under a driver that needs it for nothing now.
    consumer.start("--continuous")
    consumer.until(lambda: state()[0] == 40, "everything to be applied")
    jvm_of(consumer).kill()
    consumer.ended(1, "outbox: Spark's JVM has ended; nothing is lost, run the job again")
    bench.orders(names(10), range(5, 7))
    bench.once()
    assert state() == (60, expected(names(10), 6))
