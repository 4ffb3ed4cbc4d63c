"""A relay whose main thread hangs ends all the same after a signal, and says where its threads stand."""

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
