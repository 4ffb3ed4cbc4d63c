"""A failpoint acts before the next statement of the thread that reaches it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from chaos.course import NAMES

from relay.failpoints import VARIABLE

# As in a relay, it is not the main thread that reaches the failpoint.
_STEPS = """
import os, threading
from relay.failpoints import arm_from_environment, failpoint

def steps():
    while True:
        failpoint("txn.confirmed")
        os.write(1, b".")

arm_from_environment()
thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def test_a_pause_halts_its_own_thread_at_once():
    """Otherwise the relay commits what it was to be halted in front of, whenever its main thread wakes up late."""
    environment = os.environ | {VARIABLE: "txn.confirmed=pause@1+"}
    with subprocess.Popen([sys.executable, "-c", _STEPS], stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            for nth in range(100):
                _, status = os.waitpid(process.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status), status
                if nth:
                    assert os.read(process.stdout.fileno(), 100) == b"."
                os.kill(process.pid, signal.SIGCONT)
        finally:
            process.kill()


def test_tests_arm_only_failpoints_that_there_are():
    """One that there is not is never reached, and nothing fails."""
    tests = Path(__file__).parents[2]
    armed = {
        name
        for path in tests.rglob("*.py")
        for name in re.findall(r"\b([a-z_]+\.[a-z_]+)=(?:kill|pause|error|delay)", path.read_text())
    }
    assert armed
    assert armed <= NAMES
