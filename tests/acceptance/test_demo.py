"""``make demo`` itself, as a newcomer runs it, on a small shop."""

from __future__ import annotations

import contextlib
import functools
import os
import pty
import re
import signal
import subprocess
import sys
import threading

import pytest
from bench import PLAIN_SPARK
from docs_support import ROOT
from support import wait_until


@pytest.fixture
def environment(outbox_postgres_server, outbox_kafka):
    return os.environ | {
        "OUTBOX_DATABASE_URL": outbox_postgres_server.url("postgres"),
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
    }


@pytest.mark.spark
def test_the_demo_survives_its_own_kills_and_goes_on_until_ctrl_c(environment):
    """It ends with 0 only if the sink equals the shop."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read():
        # A terminal whose other end is closed can't be read.
        with contextlib.suppress(OSError):
            while more := os.read(ours, 65536):
                shown.extend(more)

    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--events", "1000"],
        env=environment
        | {"TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
        | {"JDK_JAVA_OPTIONS": f"{PLAIN_SPARK} {environment['JDK_JAVA_OPTIONS']}"},
        cwd=ROOT,
        preexec_fn=functools.partial(os.login_tty, theirs),
    )
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()

    def text():
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))

    def figure(name):
        found = re.findall(rf"{name} +([0-9,]+)  ", text())
        return int(found[-1].replace(",", "")) if found else 0

    def shows(condition, what):
        wait_until(lambda: demo.poll() is not None or condition(), 200, what)
        assert demo.poll() is None, text()

    try:
        shows(lambda: re.search(r"http://127\.0\.0\.1:\d+/", text()), "the page's link")
        shows(lambda: "kill -9 spark" in text() and "kill -9 relay" in text(), "the kills")
        shows(lambda: figure("applied") > 1_050, "more than the first 1,000 events")
        os.write(ours, b"\x03")
        assert demo.wait(240) == 0, text()
    finally:
        demo.send_signal(signal.SIGKILL)
        demo.wait()
        reader.join()
        os.close(ours)
    assert "closing the shop" in text()
    [(committed, through)] = set(re.findall(r"committed (\d+) · .*? applied (\d+) · lost 0 · applied twice 0", text()))
    assert committed == through
    assert int(committed) > 1_050
