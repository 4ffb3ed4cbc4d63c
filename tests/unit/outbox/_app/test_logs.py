"""Logs on a terminal: what others wrote must not affect it. And logs that can't be written: only they are lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from outbox._app import logs


@pytest.fixture
def configured(capsys):
    before = structlog.get_config()
    yield logs.configure
    structlog.configure(**before)


def test_what_others_wrote_is_escaped(configured, capsys):
    configured(style="console")
    log = structlog.get_logger("page")
    try:
        raise ValueError("key \x1b[2J\nsecond line \x9b31m")
    except ValueError:
        log.exception("a view failed", path="/\x1b]0;x\x07", shown="\u202etxt.exe")
    said = capsys.readouterr().err
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(said), said
    for text in (r"/\x1b]0;x\x07", r"\u202etxt.exe", "Traceback (most recent call last):\n", 'raise ValueError("key'):
        assert text in said
    assert said.endswith("ValueError: key \\x1b[2J\nsecond line \\x9b31m\n")


LOGS = """
import structlog
from outbox._app import logs

logs.configure(style="json")
log = structlog.get_logger("relay")
for n in range(300):
    log.info("a line", n=n, text="x" * 100)
try:
    raise RuntimeError("upkeep")
except RuntimeError:
    log.exception("upkeep failed")
print("went on")
"""

SIGNALLED = """
import signal
from outbox._app.ending import obey_signals
from outbox.stopping import Stopping

stop = Stopping()
obey_signals(stop, first="stopping", second="ended")
signal.raise_signal(signal.SIGTERM)
print(stop.is_set(), flush=True)
signal.raise_signal(signal.SIGTERM)
print("still there")
"""


@pytest.fixture(params=["full disk", "closed pipe", "none"])
def run(request):
    """Return a function that runs code with a standard error to which nothing can be written."""
    if request.param == "full disk":
        if not Path("/dev/full").exists():
            pytest.skip("there is no /dev/full")
        error = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, error = os.pipe()
        os.close(reading)
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh"] if request.param == "none" else []

    def start(code: str) -> tuple[str, int]:
        command = [*shell, sys.executable, "-c", code]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=error, text=True, timeout=120)
        return done.stdout, done.returncode

    yield start
    os.close(error)


def test_a_line_that_cannot_be_written_is_lost_and_nothing_else(run):
    assert run(LOGS) == ("went on\n", 0)


def test_signals_do_what_they_are_for_where_their_text_cannot_be_written(run):
    assert run(SIGNALLED) == ("True\n", 1)
