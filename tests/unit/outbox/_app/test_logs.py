"""Logs on a terminal: what others wrote must not affect it. And logs that can't be written: only they are lost."""

from __future__ import annotations

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


@pytest.fixture(params=["full disk", "closed pipe", "closed"])
def unwritable(request):
    """A standard error for a process to which nothing can be written, as what starts it."""
    if request.param == "full disk":
        if not Path("/dev/full").exists():
            pytest.skip("there is no /dev/full")
        prepare = "exec 2>/dev/full"
    else:
        prepare = {"closed": "exec 2>&-", "closed pipe": "exec 2> >(exec true); wait $!"}[request.param]
    return ["bash", "-c", f'{prepare}; exec "$@"', "bash", sys.executable, "-c"]


def test_a_line_that_cannot_be_written_is_lost_and_nothing_else(unwritable):
    done = subprocess.run([*unwritable, LOGS], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("went on\n", 0)


def test_signals_do_what_they_are_for_where_their_text_cannot_be_written(unwritable):
    done = subprocess.run([*unwritable, SIGNALLED], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("True\n", 1)
