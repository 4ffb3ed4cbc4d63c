"""``outbox demo``: the whole pipeline on real services, with two kills.

A shop commits orders and events to Postgres, a relay process publishes them to Kafka, a Spark process applies them to a
table. Midway the Spark driver and the relay are each killed (kill -9) and started again. At the end the shop's rows are
compared with the sink's.

The shop begins when the consumer is ready, so that both sides move together from the first event on. On a terminal it
goes on at a gentle rate when its events are through, until Ctrl-C.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from outbox._app.console import failing_clearly, print_json
from outbox.sandbox._process import patience
from outbox.urls import sqlalchemy_url
from relay.cli.browser import open_in_browser
from relay.cli.demo.controls import Controls
from relay.cli.demo.keys import listening
from relay.cli.demo.ledger import Ledger, Reconciliation, Sight
from relay.cli.demo.page import PageControls, open_page, page_settings
from relay.cli.demo.panel import Panel, open_panel
from relay.cli.demo.processes import Child, DemoFailed
from relay.cli.demo.services import Services, find_services, own_database, own_topic

LEASE_SECONDS: Final = 3.0
# Spark takes the longest to come back, and has time to catch up before the relay is killed.
KILL_SPARK_AT: Final = 0.2
KILL_RELAY_AT: Final = 0.75
GENTLE_RATE: Final = 50.0
STALL_SECONDS: Final = 90.0
LOOK_SECONDS: Final = 0.2
KEYS: Final = "r kill the relay · c the consumer · b stop or start the broker · d repeat a delivery"
CTRL_C: Final = "Ctrl-C end"


@failing_clearly
def demo(
    events: Annotated[int, typer.Option(min=100, help="About how many events the shop commits.")] = 20_000,
    seconds: Annotated[float | None, typer.Option(min=1, help="Close the shop after this time.")] = None,
    rate: Annotated[float, typer.Option(min=0, help="Events a second; 0: as fast as it goes.")] = 500.0,
    leave: Annotated[
        bool, typer.Option("--exit", help="End after these events, as without a terminal, instead of at Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live panel.")] = False,
    kill: Annotated[bool, typer.Option("--kill/--no-kill", help="Kill the relay and the Spark job midway.")] = True,
    page: Annotated[
        bool | None,
        typer.Option("--page/--no-page", help="Serve the operations page; without either, on a terminal only."),
    ] = None,
) -> None:
    """Show the whole pipeline on real services, with a crash of the relay and of the Spark job.

    On a terminal it goes on at 50 events a second until Ctrl-C. Shop and sink are compared at the end.
    """
    started = time.monotonic()
    # The stack below ends the processes and drops what the demo created.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    live = sys.stdout.isatty() and not plain and not as_json
    endless = live and not leave and seconds is None
    course = Course(events, seconds, rate or None, GENTLE_RATE if endless else None, kill=kill)
    with ExitStack() as stack:
        panel = stack.enter_context(open_panel(live=live))
        panel.say("starting Postgres and Kafka")
        services = find_services()
        panel.say("creating the tables")
        running = stack.enter_context(prepare(services, course, panel))
        if endless if page is None else page:
            controls = PageControls(running.controls, lambda: running.sight)
            link = stack.enter_context(open_page(page_settings(running.environment, "127.0.0.1:0"), controls))
            opened = endless and open_in_browser(link)
            panel.say(f"your browser shows {link}" if opened else f"the page is at {link}")
        running.open()
        if endless:
            keys = stack.enter_context(listening(_keys(running.controls), panel.say))
            panel.hint(f"{KEYS} · {CTRL_C}" if keys else CTRL_C)
            stack.enter_context(_closing_at_ctrl_c(running.close_shop))
        result = running.run()
        panel.result(result.line(), clean=result.clean, seconds=time.monotonic() - started)
    if as_json:
        print_json({**result.as_dict(), "seconds": round(time.monotonic() - started, 1)})
    else:
        typer.echo(result.line())
    if not result.clean:
        raise typer.Exit(1)


def _keys(controls: Controls) -> dict[str, Callable[[], str]]:
    return {
        "r": controls.kill_relay,
        "c": controls.kill_consumer,
        "b": lambda: controls.stop_broker() if controls.broker_runs else controls.start_broker(),
        "d": controls.repeat_delivery,
    }


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
class Course:
    """What the demo does.

    events      about how many the shop commits.
    seconds     closes the shop earlier; None: no limit.
    rate        events a second; None: as fast as it goes.
    afterwards  the rate at which the shop goes on after these events, until it is closed; None: it closes by itself.
    kill        kill the relay and the consumer midway.
    """

    events: int
    seconds: float | None = None
    rate: float | None = None
    afterwards: float | None = None
    kill: bool = True


@dataclass(frozen=True, slots=True)
class _Kill:
    """A kill that comes once a figure has reached its share of all events."""

    share: float
    figure: Callable[[Sight], int]
    act: Callable[[], str]


@contextmanager
def prepare(services: Services, course: Course, panel: Panel) -> Iterator[Demo]:
    """Create a database and a topic for one run, dropped at the end. Its processes end before that."""
    name = f"demo-{secrets.token_hex(4)}"
    topic = f"{name}.order-events"
    kafka = {"bootstrap.servers": services.bootstrap}
    with ExitStack() as stack:
        database = stack.enter_context(own_database(services.url, name.replace("-", "_")))
        stack.enter_context(own_topic(kafka, topic))
        ledger = Ledger(database, kafka, topic, ("public", "order_totals"))
        stack.callback(ledger.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-demo-")))
        env = {
            "OUTBOX_DATABASE_URL": database,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": services.bootstrap,
            "OUTBOX_TOPIC_TEMPLATE": f"{name}.{{aggregate_type}}-events",
            "OUTBOX_CONSUMER_SCHEMA": "consumer",
            "OUTBOX_RELAY__LEASE_SECONDS": str(LEASE_SECONDS),
            # Their logs say when they are ready.
            "OUTBOX_LOG_FORMAT": "json",
            "OUTBOX_LOG_LEVEL": "info",
        }
        outbox = [sys.executable, "-m", "relay.cli"]
        # Small rounds, so that the kill happens between two of many.
        rounds = ["--max-records", str(max(200, course.events // 20))]
        consume = [*outbox, "consume", "spark_jobs.order_totals:job", "--continuous", "--topic", topic, *rounds]
        shop = Child("shop", _shop(course, database), env, folder)
        relay = Child("relay", [*outbox, "relay", "run"], env, folder, ready="lanes acquired")
        # Without the JVM's second compiler, which takes half of the processor time of a short life.
        java = {"JDK_JAVA_OPTIONS": f"-XX:TieredStopAtLevel=1 {os.environ.get('JDK_JAVA_OPTIONS', '')}"}
        spark = Child("spark", consume, env | java, folder, ready="group taken over")
        controls = Controls(shop, relay, spark, services.broker, kafka, topic, panel.say)
        for child in (shop, relay, spark):
            stack.callback(child.finish, 30.0)
        # Before these, which end sooner while there is a Kafka.
        stack.callback(controls.close)
        yield Demo(course, panel, ledger, shop, relay, spark, controls, env)


class Demo:
    """One run. ``close_shop`` and ``controls`` are for any thread."""

    def __init__(
        self,
        course: Course,
        panel: Panel,
        ledger: Ledger,
        shop: Child,
        relay: Child,
        spark: Child,
        controls: Controls,
        environment: Mapping[str, str],
    ) -> None:
        self._events = course.events
        self._panel = panel
        self._ledger = ledger
        self._shop = shop
        self._relay = relay
        self._spark = spark
        self.controls = controls
        self.environment = environment
        self.sight: Sight | None = None
        self._closing = threading.Event()
        self._to_kill = (
            [
                _Kill(KILL_SPARK_AT, attrgetter("applied"), controls.kill_consumer),
                _Kill(KILL_RELAY_AT, attrgetter("published"), controls.kill_relay),
            ]
            if course.kill
            else []
        )

    def open(self) -> None:
        """Start the processes. Returns when the shop has committed its first order."""
        # Spark first: it takes the longest to start.
        for child in (self._spark, self._relay):
            child.start()
        self._panel.say("starting Spark and the relay; the shop opens when both are ready")
        self._watch(lambda _: self.controls.at_rest)
        self._shop.start()
        self._watch(lambda sight: sight.committed > 0)
        self._panel.say("the shop is open")

    def run(self) -> Reconciliation:
        """Run until the shop is closed and all events are applied. Returns the comparison."""
        self._watch(self._is_over)
        self.controls.close()
        self._panel.say("everything is through; ending the processes")
        for child in (self._relay, self._spark):
            child.finish(30.0)
        self._panel.update(self._ledger.look(), self.controls.states())
        return self._ledger.reconcile()

    def close_shop(self) -> None:
        """Let the shop commit no more events, so that ``run`` returns. May be called by a signal's handler."""
        self._closing.set()

    def _watch(self, done: Callable[[Sight], bool]) -> None:
        """Look at the figures, and keep the processes going, until ``done``.

        Raises DemoFailed when a process fails by itself, or when nothing moves.
        """
        moved_at, last = time.monotonic(), None
        while True:
            sight = self.sight = self._ledger.look(ask_kafka=self.controls.broker_runs)
            self._panel.update(sight, self.controls.states())
            self.controls.tend()
            if done(sight):
                return
            figures = (sight.committed, sight.published, sight.applied, sight.unread)
            if figures != last or not self.controls.broker_runs:
                moved_at, last = time.monotonic(), figures
            if time.monotonic() - moved_at > STALL_SECONDS * patience():
                raise DemoFailed(
                    f"nothing has moved for {time.monotonic() - moved_at:.0f} s: {sight}\n"
                    + "\n".join(
                        f"--- {child.name}\n{child.tail(12)}" for child in (self._shop, self._relay, self._spark)
                    )
                )
            time.sleep(LOOK_SECONDS)

    def _is_over(self, sight: Sight) -> bool:
        """Close the shop if it is to be closed, and kill what is to be killed by now.

        Returns whether the shop is closed, everything that went down is back, and every event is applied.
        """
        if self._closing.is_set():
            self._closing.clear()
            self._panel.say("closing the shop")
            self._to_kill = []
            self._shop.stop()
        # The shop may close early: no more events will follow then.
        expected = self._events if self._shop.running else sight.committed
        due = [kill for kill in self._to_kill if kill.figure(sight) >= kill.share * expected]
        self._to_kill = [kill for kill in self._to_kill if kill not in due]
        for kill in due:
            kill.act()
        if self._shop.running or self._to_kill or not self.controls.at_rest:
            return False
        # It may have committed since the figures were read.
        sight = self._ledger.look()
        return sight.backlog == 0 and sight.unread == 0 and sight.applied >= sight.committed


def _shop(course: Course, database: str) -> list[str]:
    """Return the example shop's command. It is beside the packages in a checkout, and inside the library in a wheel."""
    import outbox

    package = Path(outbox.__file__).parent
    folders = [folder / "examples" / "shop" for folder in (package, package.parent)]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise DemoFailed("the example shop is not installed; run the demo from a checkout of the repository")
    command = [sys.executable, str(folder), "--database-url", sqlalchemy_url(database), "--events", str(course.events)]
    given = {"--seconds": course.seconds, "--rate": course.rate, "--afterwards": course.afterwards}
    for name, value in given.items():
        if value is not None:
            command += [name, str(value)]
    return command
