"""``outbox demo`` itself, as a newcomer runs it, on a small shop."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from page_support import browser, picture
from support import wait_until

from relay.cli.demo.ledger import Reconciliation
from relay.cli.demo.page import PageControls, open_page, page_settings
from relay.cli.demo.run import Course, prepare
from relay.cli.demo.services import Services


@pytest.mark.spark
def test_the_demo_survives_its_own_kills_and_comes_out_clean(outbox_postgres_server, outbox_kafka):
    url = outbox_postgres_server.url("postgres")
    environment = os.environ | {
        "OUTBOX_DATABASE_URL": url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
    }
    done = subprocess.run(
        [sys.executable, "-m", "relay.cli", "demo", "--events", "3000", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["clean"] is True
    assert result["committed"] == result["applied"] >= 3000
    assert result["published"] >= result["committed"]
    assert "kill -9 relay" in done.stderr
    assert "kill -9 spark" in done.stderr


class Shown:
    """A panel that keeps what it is shown."""

    def __init__(self):
        self.said = []
        self.sight = None
        self.states = {}

    def say(self, text):
        self.said.append(text)

    def update(self, sight, states):
        self.sight, self.states = sight, states

    def hint(self, text):
        raise AssertionError("only the command knows of keys")

    def result(self, line, *, clean, seconds):
        raise AssertionError("the command shows the result, not the run")


@pytest.mark.spark
def test_the_demo_survives_whatever_is_pressed_on_its_page(outbox_postgres_server, private_kafka, monkeypatch):
    cluster = private_kafka()
    services = Services(outbox_postgres_server.url("postgres"), cluster.bootstrap_servers, cluster)
    course = Course(events=200, rate=100, afterwards=50, kill=False)
    panel = Shown()
    with (
        prepare(services, course, panel) as demo,
        open_page(
            page_settings(demo.environment, "127.0.0.1:0"), PageControls(demo.controls, lambda: demo.sight)
        ) as link,
        browser() as chromium,
        ThreadPoolExecutor(1) as pool,
    ):
        controls = demo.controls
        tab = chromium.new_page(viewport={"width": 1280, "height": 1000})
        tab.goto(link)
        demo.open()
        running = pool.submit(demo.run)

        def becomes(condition, what):
            # At once if the demo has failed.
            wait_until(lambda: running.done() or condition(), 60, what)
            assert not running.done(), running.result()

        def press(label, said):
            tab.get_by_role("button", name=label).click()
            tab.get_by_role("status").get_by_text(said).first.wait_for()

        def figure(name):
            return tab.locator(".figure", has=tab.get_by_text(name, exact=True)).locator("dd").inner_text()

        becomes(lambda: panel.sight.applied > 0, "the first event to be applied")
        press("Repeat a delivery", "again, at offset")
        becomes(lambda: panel.sight.duplicates == 1, "the consumer to drop the repeat")
        # Without anybody who loads the page anew.
        wait_until(lambda: figure("repeats dropped") == "1", what="the page to show it")

        monkeypatch.setattr("relay.cli.demo.controls.AWAY_SECONDS", 600.0)
        press("Stop the broker", "the broker is stopped")
        assert cluster.pids == []
        press("Kill the relay", "kill -9 relay")
        press("Kill the consumer", "kill -9 spark")
        before = panel.sight
        becomes(lambda: panel.sight.committed > before.committed + 50, "the shop to go on without a broker")
        # Both are started while there is no Kafka, and wait for it.
        becomes(lambda: controls.states()["spark"].state == "running", "the consumer to be there")
        assert controls.states()["relay"].state == "running"
        assert panel.sight.applied == before.applied
        wait_until(lambda: figure("spark") == "running, killed 1×", what="the page to show it")
        assert figure("broker") == "stopped, stopped 1×"
        press("Start the broker", "the broker runs again")
        becomes(lambda: panel.sight.applied > before.committed + 50, "the consumer to catch up")

        monkeypatch.setattr("relay.cli.demo.controls.AWAY_SECONDS", 0.0)
        controls.stop_broker()
        becomes(lambda: panel.said[-1] == "the broker runs again", "the broker to come back by itself")
        press("Repeat a delivery", "again, at offset")
        assert panel.sight.committed > course.events, "it goes on until the shop is closed"
        wait_until(lambda: figure("broker") == "running, stopped 2×", what="the page to show it")
        assert [figure(name) for name in ("lost", "applied twice", "out of order")] == ["0", "0", "0"]
        picture(tab, "overview")
        demo.close_shop()
        result = running.result(120)
        assert {name: str(standing) for name, standing in panel.states.items()} == {
            "shop": "ended",
            "relay": "ended, killed 1×",
            "spark": "ended, killed 1×",
            "broker": "running, stopped 2×",
        }
    assert result.clean, result
    assert panel.sight.unread == 0
    # Each event once in the sink, and every other message was dropped.
    assert panel.sight.duplicates == result.published - result.applied >= 2


@pytest.mark.spark
def test_on_a_terminal_the_demo_obeys_keys_and_goes_on_until_ctrl_c(outbox_postgres_server, outbox_kafka):
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read():
        # A terminal whose other end is closed can't be read.
        with contextlib.suppress(OSError):
            while more := os.read(ours, 65536):
                shown.extend(more)

    demo = subprocess.Popen(
        [sys.executable, "-m", "relay.cli", "demo", "--events", "200", "--no-kill"],
        env=os.environ
        | {
            "OUTBOX_DATABASE_URL": outbox_postgres_server.url("postgres"),
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
            "TERM": "xterm",
            "COLUMNS": "120",
            "LINES": "50",
        },
        preexec_fn=functools.partial(os.login_tty, theirs),
    )
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()

    def text():
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))

    def figure(name):
        found = re.findall(rf"│ {name} +([0-9,]+)", text())
        return int(found[-1].replace(",", "")) if found else 0

    def shows(condition, what):
        wait_until(lambda: demo.poll() is not None or condition(), 120, what)
        assert demo.poll() is None, text()

    try:
        shows(lambda: "d repeat a delivery · Ctrl-C end" in text(), "the shop to open")
        os.write(ours, b"?d")
        shows(lambda: figure("repeats dropped") == 1, "the consumer to drop a repeat")
        os.write(ours, b"rb")
        shows(lambda: re.search(r"│ relay +running, killed 1×", text()), "the relay to be back")
        assert "this Kafka is not the demo's own" in text()
        shows(lambda: figure("applied") > 300, "more than the first 200 events")
        os.write(ours, b"\x03")
        assert demo.wait(240) == 0, text()
    finally:
        demo.kill()
        demo.wait()
        reader.join()
        os.close(ours)
    assert "closing the shop" in text()
    [(committed, through)] = set(re.findall(r"committed (\d+) · .*? applied (\d+) · lost 0 · applied twice 0", text()))
    assert committed == through
    assert int(committed) > 300


@pytest.mark.parametrize(
    "changes",
    [
        {"applied": 9, "lost": 1},
        {"applied": 11, "applied_twice": 1},
        {"out_of_order": 1},
        {"published": 9},
        {"differing_orders": 1},
        {"phantom_orders": 1},
        {"lost": 1, "applied_twice": 1},
    ],
)
def test_anything_off_is_not_clean(changes):
    good = {
        "committed": 10,
        "published": 10,
        "applied": 10,
        "lost": 0,
        "applied_twice": 0,
        "out_of_order": 0,
        "differing_orders": 0,
        "phantom_orders": 0,
    }
    assert Reconciliation(**good).clean
    assert not Reconciliation(**good | changes).clean
