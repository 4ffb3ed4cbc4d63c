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
from bench import Bench
from proxy import TcpProxy
from support import wait_until

from outbox.consumer.errors import ConsumerUnavailable
from spark_jobs.driver.options import Options
from spark_jobs.driver.runner import Runner

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
DRIVER, TASK = "outbox driver order-totals", "outbox consumer order-totals"


class Consumer:
    """``outbox consume`` in a process of its own, in a folder of its own."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench = bench
        self.folder = folder
        self._started = 0

    def start(self, *arguments: str, program: tuple[str, ...] = ("-m", "relay.cli"), **settings: str) -> None:
        self._started += 1
        folder = self.folder / str(self._started)
        folder.mkdir()
        self._log = folder / "consume.log"
        self.process = self.bench.consume(folder, *arguments, program=program, **settings)

    def log(self) -> str:
        return self._log.read_text()

    def until(self, condition, what: str) -> None:
        wait_until(lambda: self.process.poll() is not None or condition(), 120, what)
        assert self.process.poll() is None, f"{what}: ended with {self.process.poll()}\n{self.log()[-3000:]}"

    def ended(self, status: int, *said: str) -> None:
        assert self.process.wait(240) == status, self.log()[-3000:]
        assert "Traceback" not in self.log()
        for text in said:
            assert text in self.log()

    def jvm(self) -> psutil.Process:
        [found] = [child for child in psutil.Process(self.process.pid).children() if "java" in child.name()]
        return found


@pytest.fixture
def consumer(bench, tmp_path) -> Iterator[Consumer]:
    with ending(Consumer(bench, tmp_path)) as made:
        yield made


@contextmanager
def ending(consumer: Consumer) -> Iterator[Consumer]:
    try:
        yield consumer
    finally:
        if consumer._started:
            consumer.process.kill()
            consumer.process.wait()


def names(orders: int) -> list[str]:
    return [f"o{number}" for number in range(orders)]


def expected(seqs: int, orders: int) -> dict[str, tuple[int, int, int, int, str]]:
    return dict.fromkeys(names(orders), (10 * seqs, seqs, seqs, 0, f"s{seqs}"))


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


def test_once_gives_up_without_its_servers_and_the_next_run_goes_on(
    spark, outbox_postgres, private_kafka, tmp_path, monkeypatch
):
    """In the middle of its rounds: first Postgres goes away, then Kafka."""
    cluster = private_kafka()
    bench = Bench(spark, outbox_postgres, private_kafka.topics(cluster))
    seqs, orders = 120, 50
    bench.orders(names(orders), range(1, seqs + 1))
    address = urlsplit(outbox_postgres.url)
    program = (str(ROOT / "tests" / "support" / "impatient_consumer.py"),)

    def applied() -> int:
        return sum(bench.positions().values())

    with TcpProxy(address.hostname, address.port) as proxy, ending(Consumer(bench, tmp_path)) as consumer:
        through = outbox_postgres.url.replace(f"{address.hostname}:{address.port}", proxy.address)
        for server, stop, start in (
            ("127.0.0.1", proxy.stop, proxy.start),
            ("Kafka", lambda: cluster.kill_broker(0), lambda: cluster.start_broker(0)),
        ):
            at = applied()
            consumer.start("--once", "--max-records", "20", program=program, OUTBOX_DATABASE_URL=through)
            consumer.until(lambda at=at: applied() >= at + 100, "some rounds")
            stop()
            consumer.ended(1, "outbox: gave up after 10 s; nothing is lost, run the job again. Last error: ", server)
            assert at < applied() < seqs * orders
            start()
    # That a process goes on where another gave up was seen above: this applies the rest.
    bench.once()
    assert bench.totals() == expected(seqs, orders)
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
    """One test: what each of these leaves, the next run finds."""
    bench.run(bench.job.setup)
    bench.orders(names(10), range(1, 5))
    nothing = (0, {})

    def state() -> tuple[int, dict[str, tuple[object, ...]]]:
        return sum(bench.positions().values()), bench.totals()

    # The second signal ends it in the middle of its round.
    with locked(bench):
        consumer.start("--continuous")
        consumer.until(lambda: waiting(bench, DRIVER), "the driver's round to wait")
        jvm = consumer.jvm()
        consumer.process.send_signal(signal.SIGTERM)
        consumer.until(lambda: "stopping" in consumer.log(), "the first signal to be heard")
        assert waiting(bench, DRIVER)
        consumer.process.send_signal(signal.SIGINT)
        consumer.ended(1, "outbox: ended in the middle of a round, after two signals")
    wait_until(lambda: gone(bench) and not jvm.is_running(), 60, "its sessions and its JVM to be gone")
    assert state() == nothing

    # The JVM is killed under the tasks of a round.
    with locked(bench):
        consumer.start("--continuous", OUTBOX_CONSUMER__DRIVER_RECORDS="0")
        consumer.until(lambda: waiting(bench, TASK), "a task to wait")
        consumer.jvm().kill()
        consumer.ended(1, "outbox: Spark's JVM has ended; nothing is lost, run the job again")
    wait_until(lambda: gone(bench), 60, "its sessions to be gone")
    assert state() == nothing

    # One signal lets the round end, and no other one begins. Of 40 messages it takes ten.
    with locked(bench):
        consumer.start("--continuous", "--max-records", "10", OUTBOX_CONSUMER__DRIVER_RECORDS="0")
        consumer.until(lambda: waiting(bench, TASK), "a task to wait")
        consumer.process.send_signal(signal.SIGINT)
        consumer.until(lambda: "stopping" in consumer.log(), "the signal to be heard")
    consumer.ended(0)
    assert state()[0] == 10

    # The JVM is killed under a driver that needs it for nothing now.
    consumer.start("--continuous")
    consumer.until(lambda: state()[0] == 40, "everything to be applied")
    consumer.jvm().kill()
    consumer.ended(1, "outbox: Spark's JVM has ended; nothing is lost, run the job again")
    bench.orders(names(10), range(5, 7))
    bench.once()
    assert state() == (60, expected(6, 10))
