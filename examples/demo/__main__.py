"""``make demo``: the whole pipeline on real servers, with two kills.

A shop commits orders and events to Postgres, a relay publishes them to Kafka, a Spark job applies them to a table. Each
is a process of its own. Midway the Spark driver and the relay are killed (kill -9) and started again. At the end the
shop's rows are compared with the sink's.

The shop opens when the relay and the Spark job are ready. On a terminal it continues at a gentle rate after its events,
with the operations page open, until Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, Literal, Self

import typer
from rich.console import Console

from examples.demo.ledger import PARTITIONS, Figures, Ledger, Reconciliation
from examples.demo.processes import Child, DemoFailed
from outbox._app.console import failing_clearly
from outbox.sandbox._process import patience
from outbox.sandbox.errors import tail
from outbox.testing.fixtures import Topics
from outbox.urls import libpq_url, sqlalchemy_url, with_database
from relay.cli.web import open_in_browser

LEASE_SECONDS: Final = 3.0
# Spark takes the longest to come back, and has time to catch up before the relay is killed.
KILL_SPARK_AT: Final = 0.2
KILL_RELAY_AT: Final = 0.75
RATE, GENTLE_RATE = 500.0, 50.0
"""Events per second that the shop commits, and at which it goes on afterwards."""
STALL_SECONDS: Final = 90.0
LOOK_SECONDS: Final = 0.2
_PAGE_SECONDS: Final = 30.0
_SHOW_SECONDS: Final = 2.0


@failing_clearly()
def demo(
    events: Annotated[int, typer.Option(min=100, help="About how many events the shop commits.")] = 20_000,
    leave: Annotated[
        bool, typer.Option("--exit", help="Exit after these events, as without a terminal, instead of at Ctrl-C.")
    ] = False,
) -> None:
    """Show the whole pipeline on real servers, with a crash of the relay and of the Spark job.

    On a terminal it continues at 50 events per second until Ctrl-C. Shop and sink are compared at the end.
    """
    # The stack below ends the processes and drops what the demo created.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    endless = sys.stdout.isatty() and not leave
    with ExitStack() as stack:
        lines = stack.enter_context(Lines())
        lines.say("starting Postgres and Kafka")
        servers = find_servers()
        lines.say("creating the tables")
        run = stack.enter_context(prepare(servers, lines, events, endless=endless))
        if endless:
            link = stack.enter_context(_page(run.environment))
            opened = "your browser shows the operations page" if open_in_browser(link) else "the operations page is at"
            lines.say(f"{opened} {link}")
            stack.enter_context(_closing_at_ctrl_c(run.close_shop))
            lines.say("Ctrl-C closes the shop and ends the demo")
        result = run.run()
        lines.say("the sink equals the shop" if result.clean else "the sink DIFFERS from the shop")
        if servers.sandbox:
            outbox = Path(sys.executable).with_name("outbox")
            lines.say(f"the servers still run; to stop them: {outbox} sandbox down")
    typer.echo(result.line())
    if not result.clean:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Servers:
    """The addresses of Postgres and Kafka. ``sandbox``: whether the sandbox runs one of them."""

    url: str
    bootstrap: str
    sandbox: bool


def find_servers() -> Servers:
    """Return the servers that the environment names, otherwise the sandbox's, which are started."""
    from outbox._app.settings import check_environment

    check_environment()
    url = os.environ.get("OUTBOX_DATABASE_URL")
    bootstrap = os.environ.get("OUTBOX_KAFKA__BOOTSTRAP_SERVERS")
    if url and bootstrap:
        return Servers(libpq_url(url), bootstrap, sandbox=False)
    from outbox.sandbox.sandbox import Sandbox

    state = Sandbox().up()
    return Servers(libpq_url(url) if url else state.database_url, bootstrap or state.bootstrap_servers, sandbox=True)


@contextmanager
def own_database(url: str, name: str) -> Iterator[str]:
    """Create a database for this run, with the outbox's and the consumers' tables. It is dropped at the end."""
    from outbox._app import migrate
    from outbox.sandbox.postgres import create_database, drop_database

    create_database(url, name)
    try:
        own = with_database(url, name)
        migrate.upgrade(own)
        migrate.upgrade_consumer(own)
        yield own
    finally:
        drop_database(url, name)


class Lines:
    """A line on stderr for each event, and the figures: below the lines on a terminal, else every two seconds if they
    change. stdout has only the result.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("")
        self._started = time.monotonic()
        self._next = 0.0
        self._figures: Figures | None = None

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        self._console.print(f"[{self.seconds:6.1f} s] {text}", markup=False)

    def update(self, figures: Figures) -> None:
        oldest = "-" if figures.oldest_seconds is None else f"{figures.oldest_seconds:.1f} s"
        text = (
            f"committed {figures.committed:>7,}  published {figures.published:>7,}  applied {figures.applied:>7,}  "
            f"unpublished {figures.backlog:>6,}, oldest {oldest}"
        )
        if self._console.is_terminal:
            self._status.update(text)
        elif self.seconds >= self._next and figures != self._figures:
            self._next, self._figures = self.seconds + _SHOW_SECONDS, figures
            self.say(text)


@contextmanager
def _page(environment: Mapping[str, str]) -> Iterator[str]:
    """Serve the operations page in a thread, and yield its link. Raises ConfigurationError when it can't listen."""
    from relay.config import load
    from relay.page.server import PageServer

    settings = load(
        database_url=environment["OUTBOX_DATABASE_URL"],
        kafka={"bootstrap.servers": environment["OUTBOX_KAFKA__BOOTSTRAP_SERVERS"]},
        topic_template=environment["OUTBOX_TOPIC_TEMPLATE"],
        consumer_schema=environment["OUTBOX_CONSUMER_SCHEMA"],
        web={"address": "127.0.0.1:0", "payloads": "shown", "refresh_seconds": 1.0},
    )
    server = PageServer(settings)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), name="demo page", daemon=True)
    thread.start()
    try:
        ready.wait(_PAGE_SECONDS)
        yield server.link
    finally:
        server.stop()
        thread.join()


@contextmanager
def _closing_at_ctrl_c(close_shop: Callable[[], None]) -> Iterator[None]:
    """Close the shop at the first Ctrl-C, and interrupt at the second."""

    def first(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        close_shop()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class _Kill:
    """Kill a process once a figure has reached its share of all events."""

    child: Child
    share: float
    figure: Literal["applied", "published"]


@contextmanager
def prepare(servers: Servers, lines: Lines, events: int, *, endless: bool) -> Iterator[Demo]:
    """Create a database and a topic for one run, dropped at the end. Its processes end before that.

    events   about how many the shop commits; then it goes on until it is closed if ``endless``, or closes by itself.
    """
    with ExitStack() as stack:
        topics = stack.enter_context(Topics(servers.bootstrap))
        name = f"demo-{topics.token}"
        topic = topics.create_topic(f"{name}.order-events", PARTITIONS)
        database = stack.enter_context(own_database(servers.url, name.replace("-", "_")))
        ledger = Ledger(database, servers.bootstrap, topic, ("public", "order_totals"))
        stack.callback(ledger.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-demo-")))
        environment = {
            "OUTBOX_DATABASE_URL": database,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": servers.bootstrap,
            "OUTBOX_TOPIC_TEMPLATE": f"{name}.{{aggregate_type}}-events",
            "OUTBOX_CONSUMER_SCHEMA": "consumer",
            "OUTBOX_RELAY__LEASE_SECONDS": str(LEASE_SECONDS),
            # The logs record when the processes are ready.
            "OUTBOX_LOG_FORMAT": "json",
            "OUTBOX_LOG_LEVEL": "info",
        }
        outbox = [sys.executable, "-m", "relay.cli"]
        # Small rounds, so that the kill happens between two of many.
        rounds = ["--max-records", str(max(200, events // 20))]
        consume = [*outbox, "consume", "spark_jobs.order_totals:job", "--continuous", "--topic", topic, *rounds]
        till = [sys.executable, str(Path(__file__).parents[1] / "shop"), "--database-url", sqlalchemy_url(database)]
        till += ["--events", str(events), "--rate", str(RATE), *(["--afterwards", str(GENTLE_RATE)] if endless else [])]
        shop = Child("shop", till, environment, folder)
        relay = Child("relay", [*outbox, "relay", "run"], environment, folder, ready="lanes acquired")
        # Without the JVM's second compiler, which takes half of the processor time of a short life.
        java = {"JDK_JAVA_OPTIONS": f"-XX:TieredStopAtLevel=1 {os.environ.get('JDK_JAVA_OPTIONS', '')}"}
        spark = Child("spark", consume, environment | java, folder, ready="group taken over")
        for child in (shop, relay, spark):
            stack.callback(child.finish, 30.0)
        yield Demo(events, lines, ledger, shop, relay, spark, environment)


@dataclass
class Demo:
    """One run of the shop, the relay and the Spark job. ``close_shop`` may be called from any thread."""

    events: int
    lines: Lines
    ledger: Ledger
    shop: Child
    relay: Child
    spark: Child
    environment: Mapping[str, str]

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        spark, relay = _Kill(self.spark, KILL_SPARK_AT, "applied"), _Kill(self.relay, KILL_RELAY_AT, "published")
        self._kills: Sequence[_Kill] = (spark, relay)

    def run(self) -> Reconciliation:
        """Run until the shop is closed and all events are applied. Return the comparison."""
        # Spark first: it takes the longest to start.
        for child in (self.spark, self.relay):
            child.start()
        self.lines.say("starting Spark and the relay; the shop opens when both are ready")
        self._watch(lambda _: self._all_ready)
        self.shop.start()
        self._watch(lambda figures: figures.committed > 0)
        self.lines.say("the shop is open")
        self._watch(self._is_over)
        self.lines.say("every event is applied; ending the processes")
        for child in (self.relay, self.spark):
            child.finish(30.0)
        return self.ledger.reconcile()

    def close_shop(self) -> None:
        """Let the shop commit no more events, so that ``run`` returns. A signal handler may call it."""
        self._closing.set()

    @property
    def _all_ready(self) -> bool:
        return self.relay.ready and self.spark.ready

    def _watch(self, done: Callable[[Figures], bool]) -> None:
        """Read the figures, and restart killed processes, until ``done``.

        Raises DemoFailed when a process fails by itself, or when nothing moves.
        """
        children = (self.shop, self.relay, self.spark)
        moved_at, last = time.monotonic(), None
        while True:
            figures = self.ledger.look()
            self.lines.update(figures)
            for child in children:
                if line := child.restart_if_due():
                    self.lines.say(line)
            if done(figures):
                return
            moving = (figures.committed, figures.published, figures.applied, figures.unread)
            if moving != last:
                moved_at, last = time.monotonic(), moving
            if time.monotonic() - moved_at > STALL_SECONDS * patience():
                logs = "\n".join(tail(child.log, 12) for child in children)
                raise DemoFailed(f"nothing has moved for {time.monotonic() - moved_at:.0f} s: {figures}\n{logs}")
            time.sleep(LOOK_SECONDS)

    def _is_over(self, figures: Figures) -> bool:
        """Close the shop and kill processes when it is time to.

        Returns whether the shop is closed, every killed process is back, and every event is applied.
        """
        if self._closing.is_set():
            self._closing.clear()
            self.lines.say("closing the shop")
            self._kills = ()
            self.shop.stop()
        # The shop may close early: no more events will follow then.
        expected = self.events if self.shop.running else figures.committed
        due = [kill for kill in self._kills if getattr(figures, kill.figure) >= kill.share * expected]
        self._kills = [kill for kill in self._kills if kill not in due]
        for kill in due:
            kill.child.crash()
            self.lines.say(f"kill -9 {kill.child.name}")
        if self.shop.running or self._kills or not self._all_ready:
            return False
        # It may have committed since the figures were read.
        figures = self.ledger.look()
        return figures.backlog == 0 and figures.unread == 0 and figures.applied >= figures.committed


if __name__ == "__main__":
    typer.run(demo)
