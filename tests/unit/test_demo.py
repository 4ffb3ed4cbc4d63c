"""The parts of the demo that need no servers: its processes, its trend, and its controls without a broker to stop."""

from __future__ import annotations

import sys

import pytest
from support import wait_until

from relay.cli.demo import processes
from relay.cli.demo.controls import Controls
from relay.cli.demo.ledger import Sight
from relay.cli.demo.processes import Child, DemoFailed
from relay.cli.demo.trend import Trend

WORKS = "import time; print('ready for work', flush=True); time.sleep(600)"


@pytest.fixture
def child(tmp_path, request):
    """Return a function that starts a Python program as a child of the demo."""
    started = []

    def start(program, ready=None):
        one = Child("relay", [sys.executable, "-c", program], {}, tmp_path, ready)
        started.append(one)
        one.start()
        return one

    yield start
    for one in started:
        one.finish(10)


@pytest.fixture
def _at_once(monkeypatch):
    monkeypatch.setattr(processes, "RESTART_SECONDS", 0.0)


def test_a_child_runs_once_its_log_says_that_it_is_ready(child, tmp_path):
    (tmp_path / "relay.log").write_text("ready for work, said the one before\n")
    go = tmp_path / "go"
    one = child(
        f"import time, pathlib\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n{WORKS}", "ready"
    )
    assert one.running
    assert one.state == "starting"
    go.touch()
    wait_until(lambda: one.state == "running")


@pytest.mark.usefixtures("_at_once")
def test_a_killed_child_is_started_again(child):
    one = child(WORKS, "ready")
    wait_until(lambda: one.state == "running")
    assert one.crash()
    assert (one.state, one.kills) == ("killed", 1)
    assert not one.crash(), "it does not run"
    assert one.tend() == "relay starts again"
    wait_until(lambda: one.state == "running")
    assert one.tend() is None
    assert one.kills == 1


def test_a_killed_child_stays_away_for_a_moment(child, monkeypatch):
    monkeypatch.setattr(processes, "RESTART_SECONDS", 600.0)
    one = child(WORKS)
    one.crash()
    assert one.tend() is None
    assert one.state == "killed"
    one.finish(10)
    assert one.state == "ended"


@pytest.mark.usefixtures("_at_once")
def test_an_error_of_a_child_ends_the_demo_unless_it_is_forgiven(child):
    one = child("raise SystemExit('no broker')")
    wait_until(lambda: not one.running)
    assert one.tend(forgive=True) == "relay ended with status 1"
    assert one.tend() == "relay starts again"
    wait_until(lambda: not one.running)
    with pytest.raises(DemoFailed, match=r"relay ended with status 1:(.|\n)*no broker"):
        one.tend()


def test_a_child_that_ends_well_is_left_alone(child):
    one = child("print('sold out')")
    wait_until(lambda: not one.running)
    assert one.tend() is None
    assert one.state == "ended"


def controls(tmp_path, said, broker=None):
    children = [Child(name, [sys.executable, "-c", WORKS], {}, tmp_path) for name in ("shop", "relay", "spark")]
    return Controls(*children, broker, {"bootstrap.servers": "127.0.0.1:1"}, "events", said.append)


def test_what_does_not_run_is_not_killed_and_another_ones_broker_is_not_stopped(tmp_path):
    said = []
    made = controls(tmp_path, said)
    texts = [made.kill_relay(), made.kill_consumer(), made.stop_broker(), made.start_broker()]
    assert texts == said
    assert texts[:2] == ["relay does not run", "spark does not run"]
    assert texts[2] == texts[3]
    assert "not the demo's own" in texts[2]
    assert {name: str(standing) for name, standing in made.states().items()} == {
        "shop": "not started",
        "relay": "not started",
        "spark": "not started",
        "broker": "running",
    }
    made.close()


class Broker:
    """Notes what is done to it; the first starts fail."""

    def __init__(self, failures=0):
        self.done = []
        self._failures = failures

    def stop(self):
        self.done.append("stop")

    def start(self):
        self.done.append("start")
        if self._failures:
            self._failures -= 1
            raise DemoFailed("the port is taken")


def test_a_broker_is_down_once_and_comes_back_by_hand(tmp_path):
    broker, said = Broker(), []
    made = controls(tmp_path, said, broker)
    assert made.start_broker() == "the broker runs"
    assert "it starts again in 8 s" in made.stop_broker()
    assert not made.broker_runs
    assert made.stop_broker() == "the broker is down already"
    assert made.repeat_delivery() == "the broker is down: there is nothing to repeat"
    made.tend()
    assert broker.done == ["stop"], "8 s are not over"
    assert made.start_broker() == "the broker runs again"
    assert str(made.states()["broker"]) == "running, stopped 1×"
    assert broker.done == ["stop", "start"]
    made.close()
    assert broker.done == ["stop", "start"]
    assert (made.stop_broker(), made.repeat_delivery()) == ("the demo is over", "the demo is over")
    assert broker.done == ["stop", "start"]


def test_a_stopped_broker_comes_back_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("relay.cli.demo.controls.AWAY_SECONDS", 0.0)
    broker, said = Broker(), []
    made = controls(tmp_path, said, broker)
    made.stop_broker()
    made.tend()
    wait_until(lambda: made.broker_runs)
    made.tend()
    made.close()
    assert broker.done == ["stop", "start"]
    assert said[-1] == "the broker runs again"


def test_a_broker_that_does_not_come_back_ends_the_demo(tmp_path, monkeypatch):
    monkeypatch.setattr("relay.cli.demo.controls.AWAY_SECONDS", 0.0)
    broker = Broker(failures=1)
    made = controls(tmp_path, [], broker)
    made.stop_broker()
    with pytest.raises(DemoFailed, match="the port is taken"):
        wait_until(made.tend)
    assert made.states()["broker"].state == "stopped"
    made.close()
    assert broker.done == ["stop", "start", "start"], "it is started at the end, for whoever comes next"
    assert made.broker_runs


def test_a_broker_that_does_not_stop_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr("relay.cli.demo.controls.AWAY_SECONDS", 0.0)

    class Stubborn(Broker):
        def stop(self):
            super().stop()
            raise DemoFailed("it survived SIGKILL")

    broker = Stubborn()
    made = controls(tmp_path, [], broker)
    with pytest.raises(DemoFailed, match="survived"):
        made.stop_broker()
    made.tend()
    wait_until(lambda: made.broker_runs)
    made.close()
    assert broker.done == ["stop", "start"]


def sight(committed, applied, published=0):
    return Sight(committed, published, applied, 0, None, 0, 0)


def test_the_trend_of_a_pipeline_that_is_killed_and_catches_up():
    trend = Trend()
    assert trend.rate("committed") == 0
    assert trend.behind is None
    for second in range(11):
        trend.add(float(second), sight(100 * second, 100 * second if second < 5 else 400))
    assert trend.rate("committed") == 100
    assert trend.rate("applied") == 0
    assert trend.behind == 5, "event 401 was seen at 5 s, and it is 10 s now"
    trend.add(11.0, sight(1100, 850))
    assert trend.rate("applied") == 150
    assert trend.behind == 2
    trend.add(12.0, sight(1100, 1100))
    assert trend.behind is None
