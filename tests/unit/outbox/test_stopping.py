"""A signal that comes while the main thread is within the event that its handler sets."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from outbox.stopping import Stopping

INTERRUPTED = """
import signal, threading
from outbox.stopping import Stopping
from outbox.inbox import Consumer

stop = EVENT
signal.signal(signal.SIGUSR1, lambda *_: stop.set())
# As for a moment in each wait().
with stop._cond:
    signal.raise_signal(signal.SIGUSR1)
assert stop.is_set() and stop.wait(0)
"""


@pytest.mark.parametrize("event", ["Stopping()", "Consumer('postgresql://', ['t'], group='g', kafka={})._stopping"])
def test_it_is_set(event):
    subprocess.run([sys.executable, "-c", INTERRUPTED.replace("EVENT", event)], timeout=60, check=True)


def test_it_wakes_a_thread_that_waits():
    stop, woken = Stopping(), threading.Event()
    thread = threading.Thread(target=lambda: stop.wait(60) and woken.set())
    thread.start()
    stop.set()
    thread.join(60)
    assert woken.is_set()
