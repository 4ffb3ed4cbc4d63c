"""The demo's processes and its verdict, without servers."""

from __future__ import annotations

import sys

import pytest
from support import wait_until

from examples.demo import processes
from examples.demo.ledger import Reconciliation
from examples.demo.processes import Child, DemoFailed

WORKS = "import time; print('ready for work', flush=True); time.sleep(600)"


@pytest.fixture
def child(tmp_path):
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


def test_a_killed_child_is_started_again(child, monkeypatch):
    monkeypatch.setattr(processes, "RESTART_SECONDS", 0.0)
    one = child(WORKS, "ready")
    wait_until(lambda: one.state == "running")
    one.crash()
    assert one.state == "killed"
    assert one.restart_if_due() == "relay starts again"
    wait_until(lambda: one.state == "running")
    assert one.restart_if_due() is None


def test_a_killed_child_stays_away_for_a_moment(child, monkeypatch):
    monkeypatch.setattr(processes, "RESTART_SECONDS", 600.0)
    one = child(WORKS)
    one.crash()
    assert one.restart_if_due() is None
    assert one.state == "killed"
    one.finish(10)
    assert one.state == "ended"


def test_an_error_of_a_child_ends_the_demo(child):
    one = child("raise SystemExit('no broker')")
    wait_until(lambda: not one.running)
    with pytest.raises(DemoFailed, match=r"relay ended with status 1:(.|\n)*no broker"):
        one.restart_if_due()


def test_a_child_that_ends_well_is_left_alone(child):
    one = child("print('sold out')")
    wait_until(lambda: not one.running)
    assert one.restart_if_due() is None
    assert one.state == "ended"


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
def test_any_difference_is_not_clean(changes):
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
