"""``outbox demo``: the whole pipeline on real services, with two kills.

A shop commits orders and events to Postgres, a relay process publishes them to Kafka, a Spark process applies them to a
table. Midway the relay and the Spark driver are each killed (kill -9) and started again. At the end the shop's rows are
compared with the sink's.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outbox._app.console import failing_clearly, print_json
from outbox.errors import OutboxError
from outbox.urls import libpq_url, sqlalchemy_url, with_database
from relay.cli.demo.ledger import Ledger, Reconciliation, Sight
from relay.cli.demo.panel import Panel, open_panel

if TYPE_CHECKING:
    from outbox.sandbox._process import Supervised

PARTITIONS: Final = 4
LEASE_SECONDS: Final = 3.0
KILL_RELAY_AT: Final = 0.35
KILL_SPARK_AT: Final = 0.45
STALL_SECONDS: Final = 90.0


class DemoFailed(OutboxError):
    """A process of the demo failed, or the demo made no progress."""


@dataclass(eq=False)
class Child:
    """One process of the demo, which logs to a file. It ends when the demo does, even by kill -9."""

    name: str
    command: list[str]
    env: Mapping[str, str]
    folder: Path
    process: Supervised | None = None
    started: int = 0
    killed: bool = field(default=False)

    @property
    def log(self) -> Path:
        """Return the file that its output goes to."""
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start it, or start it again."""
        from outbox.sandbox._process import Supervised

        self.started += 1
        self.killed = False
        self.process = Supervised(self.command, log=self.log, env={**os.environ, **self.env})

    def kill(self) -> None:
        """Kill it by SIGKILL, like a crash."""
        if self.process is not None:
            self.process.signal(signal.SIGKILL)
            self.process.wait(30)
            self.killed = True

    def finish(self, seconds: float) -> None:
        """Send it SIGTERM, and kill it after ``seconds``."""
        if self.process is None or not self.process.running:
            return
        self.process.signal(signal.SIGTERM)
        if not self.process.wait(seconds):
            self.kill()

    def check(self) -> None:
        """Raise DemoFailed with the end of its log if it has ended with an error."""
        if self.process is None or self.killed or self.process.running:
            return
        self.process.wait(5)
        status = self.process.exit_code
        if status:
            raise DemoFailed(f"{self.name} ended with status {status}:\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """Return the end of its log."""
        return "\n".join(line[:300] for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def running(self) -> bool:
        """Return whether it runs now."""
        return self.process is not None and self.process.running


@failing_clearly
def demo(
    events: Annotated[int, typer.Option(min=100, help="About how many events the shop commits.")] = 20_000,
    seconds: Annotated[float | None, typer.Option(min=1, help="Close the shop after this time.")] = None,
    rate: Annotated[float | None, typer.Option(min=1, help="Events a second; as fast as it goes if not given.")] = None,
    leave: Annotated[bool, typer.Option("--exit", help="Do not wait for Enter at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live panel.")] = False,
    kill: Annotated[bool, typer.Option("--kill/--no-kill", help="Kill the relay and the Spark job midway.")] = True,
) -> None:
    """Show the whole pipeline on real services, with a crash of the relay and of the Spark job."""
    started = time.monotonic()
    # Like Ctrl-C: the stack below ends the processes and drops what the demo created.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    live = sys.stdout.isatty() and not plain and not as_json
    with ExitStack() as stack:
        panel = stack.enter_context(open_panel(live=live))
        result = _Demo(panel, stack, events, seconds, rate, kill).run()
        panel.result(result.line(), clean=result.clean, seconds=time.monotonic() - started)
    if live and not leave:
        typer.prompt("Enter ends the demo; the sandbox keeps running", default="", show_default=False)
    if as_json:
        print_json({**result.as_dict(), "seconds": round(time.monotonic() - started, 1)})
    else:
        typer.echo(result.line())
    if not result.clean:
        raise typer.Exit(1)


class _Demo:
    """Starts, kills and ends the processes."""

    def __init__(
        self, panel: Panel, stack: ExitStack, events: int, seconds: float | None, rate: float | None, kill: bool
    ) -> None:
        self._panel = panel
        self._stack = stack
        self._events = events
        self._seconds = seconds
        self._rate = rate
        self._kill = kill
        self._name = f"demo-{secrets.token_hex(4)}"
        self._topic = f"{self._name}.order-events"

    def run(self) -> Reconciliation:
        self._panel.say("starting Postgres and Kafka")
        url, bootstrap = _services()
        database = self._stack.enter_context(_own_database(url, self._name.replace("-", "_")))
        self._panel.say("creating the tables")
        _migrate(database)
        kafka = {"bootstrap.servers": bootstrap}
        self._stack.enter_context(_own_topic(kafka, self._topic))
        ledger = Ledger(database, kafka, self._topic, ("public", "order_totals"))
        self._stack.callback(ledger.close)
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-demo-")))
        shop, relay, spark = self._children(folder, database, bootstrap)
        for child in (spark, relay, shop):
            child.start()
            self._stack.callback(child.finish, 30.0)
            self._panel.say(f"{child.name} started")
        sight = self._drive(ledger, shop, relay, spark)
        self._panel.say("everything is through; ending the processes")
        for child in (relay, spark):
            child.finish(30.0)
        self._panel.update(sight, self._states(shop, relay, spark))
        return ledger.reconcile()

    def _children(self, folder: Path, database: str, bootstrap: str) -> tuple[Child, Child, Child]:
        env = {
            "OUTBOX_DATABASE_URL": database,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
            "OUTBOX_TOPIC_TEMPLATE": f"{self._name}.{{aggregate_type}}-events",
            "OUTBOX_RELAY__LEASE_SECONDS": str(LEASE_SECONDS),
            "OUTBOX_LOG_FORMAT": "json",
        }
        outbox = [sys.executable, "-m", "relay.cli"]
        shop = [sys.executable, str(_shop()), "--database-url", sqlalchemy_url(database), "--events", str(self._events)]
        if self._seconds is not None:
            shop += ["--seconds", str(self._seconds)]
        if self._rate is not None:
            shop += ["--rate", str(self._rate)]
        # Small rounds, so that the kill happens between two of many.
        rounds = ["--max-records", str(max(200, self._events // 20))]
        consume = ["consume", "spark_jobs.order_totals:job", "--continuous", "--topic", self._topic, *rounds]
        return (
            Child("shop", shop, env, folder),
            Child("relay", [*outbox, "relay", "run"], env, folder),
            Child("spark", [*outbox, *consume], env, folder),
        )

    def _drive(self, ledger: Ledger, shop: Child, relay: Child, spark: Child) -> Sight:
        """Watch until all events are applied, and kill relay and Spark driver once each meanwhile."""
        moved_at, last = time.monotonic(), None
        to_kill = {relay: KILL_RELAY_AT, spark: KILL_SPARK_AT} if self._kill else {}
        while True:
            sight = ledger.look()
            self._panel.update(sight, self._states(shop, relay, spark))
            for child in (shop, relay, spark):
                child.check()
            # The shop may close early (--seconds): no more events will follow then.
            expected = self._events if shop.running else sight.committed
            for child, share in list(to_kill.items()):
                moved = sight.published if child is relay else sight.applied
                if moved >= share * expected > 0:
                    del to_kill[child]
                    child.kill()
                    self._panel.say(f"kill -9 {child.name}, on purpose; starting it again")
                    child.start()
            done = not shop.running and sight.backlog == 0 and sight.applied >= sight.committed
            if done and not to_kill:
                return ledger.look()
            if sight != last:
                moved_at, last = time.monotonic(), sight
            if time.monotonic() - moved_at > STALL_SECONDS:
                raise DemoFailed(
                    f"nothing has moved for {STALL_SECONDS:.0f} s: {sight}\n"
                    + "\n".join(f"--- {child.name}\n{child.tail(12)}" for child in (shop, relay, spark))
                )
            time.sleep(0.1)

    @staticmethod
    def _states(*children: Child) -> dict[str, str]:
        return {
            child.name: ("running" if child.running else "ended")
            + (f", killed {child.started - 1}×" if child.started > 1 else "")
            for child in children
        }


def _services() -> tuple[str, str]:
    """Return the database URL and bootstrap servers: those in the environment, or the sandbox's."""
    from relay.config import check_environment

    check_environment()
    url = os.environ.get("OUTBOX_DATABASE_URL")
    bootstrap = os.environ.get("OUTBOX_KAFKA__BOOTSTRAP_SERVERS")
    if url and bootstrap:
        return libpq_url(url), bootstrap
    from outbox.sandbox.sandbox import Sandbox

    state = Sandbox().up()
    return url or state.database_url, bootstrap or state.bootstrap_servers


@contextmanager
def _own_database(url: str, name: str) -> Iterator[str]:
    """Create a database for this run, dropped at its end."""
    import psycopg
    from psycopg import sql

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        yield with_database(url, name)
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def _own_topic(kafka: dict[str, str], topic: str) -> Iterator[None]:
    """Create a topic for this run, deleted at its end."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient(dict(kafka))
    admin.create_topics([NewTopic(topic, num_partitions=PARTITIONS)])[topic].result(30)
    try:
        yield
    finally:
        admin.delete_topics([topic])[topic].result(30)


def _migrate(url: str) -> None:
    from outbox._app import migrate as db

    db.upgrade(url)
    db.upgrade_consumer(url)


def _shop() -> Path:
    """Return the example shop's folder: beside the packages in a checkout, inside the library in an installed wheel."""
    import outbox

    package = Path(outbox.__file__).parent
    for folder in (package / "examples" / "shop", package.parent / "examples" / "shop"):
        if folder.is_dir():
            return folder
    raise DemoFailed("the example shop is not installed; run the demo from a checkout of the repository")
