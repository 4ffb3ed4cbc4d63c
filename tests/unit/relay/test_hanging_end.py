"""What signals do to a relay; one whose main thread hangs ends all the same, and says where its threads stand."""

from __future__ import annotations

import signal
import subprocess
import sys

HANGS = """
import threading
from outbox.stopping import Stopping
from relay.cli.relay import _stop_on_signals

def a_statement_without_an_answer():
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()

_stop_on_signals(Stopping(), Stopping(), 0.1)
a_statement_without_an_answer()
"""


def test_a_relay_that_hangs_says_where():
    with subprocess.Popen(
        [sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in a_statement_without_an_answer" in errors


SIGNALLED = """
import signal
from outbox.stopping import Stopping
from relay.cli.relay import _stop_on_signals
from relay.workers import ABANDON

for abandon_at, *numbers in {cases}:
    stop, abandon = Stopping(), Stopping()
    _stop_on_signals(stop, abandon, 60.0, abandon_at=abandon_at)
    for number in numbers:
        signal.raise_signal(number)
        print(stop.is_set(), abandon.is_set())
"""
STOPS, ABANDONS = "True False", "True True"
CASES = {
    "(None, signal.SIGTERM, signal.SIGINT)": [STOPS, ABANDONS],
    # A worker gets each signal from a process manager that signals all of a unit, and from its parent.
    "(ABANDON, signal.SIGTERM, signal.SIGTERM, signal.SIGINT)": [STOPS, STOPS, STOPS],
    "(ABANDON, signal.SIGTERM, ABANDON, signal.SIGTERM)": [STOPS, ABANDONS, ABANDONS],
    "(ABANDON, ABANDON)": [ABANDONS],
}


def test_what_a_second_signal_does_to_a_relay_and_to_a_worker():
    code = SIGNALLED.format(cases=f"[{', '.join(CASES)}]")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [line for said in CASES.values() for line in said]
