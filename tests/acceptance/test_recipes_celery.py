"""examples/recipes/celery_tasks.py with a real worker, which is killed between a task's event and its commit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from recipes_support import RECIPES, ROOT
from support import look_up, wait_until

from outbox.testing.fixtures import Database, Topics
from outbox.urls import sqlalchemy_url

# Orders are placed by another process than this, as in a shop. It reads them line by line.
CLERK = """
import sys
from celery_tasks import Session, engine, place_order
with Session(engine) as session:
    for line in sys.stdin:
        place_order(session, "withdrawn", 1)
        session.rollback()
        place_order(session, line.strip(), 4200)
        session.commit()
"""
# Kombu's filesystem transport: what was sent, what a worker has taken. It keeps what was taken, so that it can be
# delivered again, as a broker does with what was not acknowledged.
CELERY = """
broker_url = "filesystem://"
broker_transport_options = {
    "data_folder_in": "queue",
    "data_folder_out": "queue",
    "processed_folder": "taken",
    "store_processed": True,
    "polling_interval": 0.05,
}
worker_lost_wait = 0.1
"""
GATE = 4711
# A payment's transaction waits behind its event, before its commit, for as long as a test holds the lock.
WAIT = f"""
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock({GATE}); RETURN NULL; END $$;
CREATE TRIGGER wait AFTER INSERT ON outbox.events FOR EACH ROW WHEN (NEW.event_type = 'PaymentTaken')
EXECUTE FUNCTION wait()"""


class Shop:
    """The example's processes, with a queue, and with topics of this test."""

    def __init__(self, database: Database, kafka: Topics, folder: Path) -> None:
        self.url, self.folder, self.kafka = database.url, folder, kafka
        self.topics = {kind: f"{kind}-events-{kafka.token}" for kind in ("order", "payment")}
        (folder / "celeryconfig.py").write_text(CELERY)
        for name in ("queue", "taken"):
            (folder / name).mkdir()
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(RECIPES)]),
            "PYTHONUNBUFFERED": "1",
            "DATABASE_URL": sqlalchemy_url(database.url),
            "KAFKA_SERVERS": kafka.bootstrap_servers,
            "ORDER_TOPIC": self.topics["order"],
            "CELERY_CONFIG_MODULE": "celeryconfig",
        }

    @contextmanager
    def running(self, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a program with its log in a file; it is killed at the end, with its children."""
        log = self.folder / f"{name}.log"
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [sys.executable, *words],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process
            finally:
                kill(process)
                print(log.read_text(errors="replace"))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let orders be placed."""
        with self.running("clerk", "-c", CLERK) as clerk:
            assert clerk.stdin is not None
            self._orders = clerk.stdin
            yield

    def place(self, order: str) -> None:
        self._orders.write(f"{order}\n".encode())
        self._orders.flush()

    def succeeded(self, name: str) -> int:
        """Return how many tasks a worker has finished, by its log."""
        return (self.folder / f"{name}.log").read_text(errors="replace").count("succeeded in")

    def payments(self) -> set[str]:
        return {order for (order,) in look_up(self.url, "SELECT order_id FROM payments")}

    def published(self, kind: str, count: int) -> list[tuple[str, dict[str, Any]]]:
        """Wait for events of a kind, and until the outbox is empty; return all of the kind that there are by then."""
        self.kafka.consume(self.topics[kind], count=count)
        wait_until(lambda: look_up(self.url, "SELECT FROM outbox.events") == [], what="an empty outbox")
        messages = self.kafka.consume(self.topics[kind])
        return sorted((message.key().decode(), json.loads(message.value())) for message in messages)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children by SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def shop(outbox_postgres, outbox_kafka, outbox_relay, tmp_path) -> Iterator[Shop]:
    folder = tmp_path / "shop"
    folder.mkdir()
    shop = Shop(outbox_postgres, outbox_kafka, folder)
    outbox_relay(topic_template=f"{{aggregate_type}}-events-{outbox_kafka.token}")
    with shop.running("start", str(RECIPES / "celery_tasks.py")), shop.open():
        wait_until(lambda: look_up(shop.url, "SELECT to_regclass('payments')") != [(None,)], what="the tables")
        with psycopg.connect(shop.url) as connection:
            connection.execute(WAIT)
        yield shop


WORKER = ("-m", "celery", "--app", "celery_tasks", "worker", "--concurrency", "1", "--loglevel", "INFO")


@contextmanager
def task_within_its_transaction(shop: Shop, order: str) -> Iterator[None]:
    """Place an order, and wait until its task has written the payment and the event; the task goes on at the end."""
    with psycopg.connect(shop.url, autocommit=True) as gate:
        gate.execute("SELECT pg_advisory_lock(%s)", (GATE,))
        shop.place(order)
        waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"
        waiting += " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        wait_until(lambda: look_up(shop.url, waiting, GATE), what="a task within its transaction")
        assert order not in shop.payments()
        yield


def test_a_task_that_is_killed_leaves_one_row_and_one_event(shop):
    with ExitStack() as first:
        worker = first.enter_context(shop.running("first", *WORKER))
        with task_within_its_transaction(shop, "a"):
            # As the kernel does when memory is short: Celery's process lives on, and gives the task to another child.
            (child,) = psutil.Process(worker.pid).children()
            child.kill()
        wait_until(lambda: shop.succeeded("first") == 1, what="the task, run again")
        assert shop.payments() == {"a"}
        with task_within_its_transaction(shop, "b"):
            kill(worker)
    assert shop.payments() == {"a"}
    taken = list((shop.folder / "taken").iterdir())
    # That of "a" and what Celery made of it when the child died, and that of "b".
    assert len(taken) == 3
    for message in taken:
        shutil.move(message, shop.folder / "queue")
    with shop.running("second", *WORKER):
        wait_until(lambda: shop.succeeded("second") == 3, what="all tasks, delivered again")
    assert shop.payments() == {"a", "b"}
    assert shop.published("payment", 2) == [("a", {"cents": 4200}), ("b", {"cents": 4200})]
    assert shop.published("order", 2) == [("a", {"cents": 4200}), ("b", {"cents": 4200})]
    assert look_up(shop.url, "SELECT id FROM orders ORDER BY id") == [("a",), ("b",)]
