"""README's quickstart, typed as it stands by somebody who has nothing yet: no home, no settings, no servers."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.sandbox._dirs import cache_dir
from outbox.sandbox._process import patience

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Typed before the servers are stopped: what is left over, and what came out.
LOOK = """
import json, os, psycopg
with psycopg.connect(os.environ["OUTBOX_DATABASE_URL"]) as connection:
    print(json.dumps({name: connection.execute(query).fetchall() for name, query in {
        "orders": "SELECT order_id, customer, total_cents, status, events_applied, out_of_order FROM order_totals",
        "waiting": "SELECT event_id::text FROM outbox.events",
        "failures": "SELECT to_jsonb(f)::text FROM outbox.failures AS f",
        "dead letters": "SELECT to_jsonb(d)::text FROM consumer.dead_letters AS d",
    }.items()}))
"""


def quickstart() -> tuple[list[str], dict[str, str], str]:
    """Return the lines to type, block by block, the files to save, and the result that the text promises."""
    text = (ROOT / "README.md").read_text()
    [section] = re.findall(r"^## Quickstart\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    blocks = BLOCK.findall(section)
    files = {}
    for language, code in blocks:
        assert language in {"sh", "python"}
        if language == "python":
            [name] = re.findall(r"^# (\w+\.py)\n", code)
            assert f"Save this as `{name}`." in section
            files[name] = code
    [promised] = re.findall(r"It is `(\[.*?\])`", section)
    return [code for language, code in blocks if language == "sh"], files, promised


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty home, closed to others."""
    made = Path(tempfile.mkdtemp(prefix="outbox-test-"))
    yield made
    down = [sys.executable, "-m", "relay.cli", "sandbox", "down", "--purge"]
    subprocess.run(down, env=environment(made), check=True, capture_output=True, timeout=300)
    shutil.rmtree(made)


def environment(home: Path) -> dict[str, str]:
    """Return what a fresh shell has, and what has been downloaded already."""
    kept = ("JAVA_HOME", "JDK_JAVA_OPTIONS", "OUTBOX_PATIENCE", "OUTBOX_PG_BIN", "OUTBOX_MAVEN_REPOSITORY")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "HOME": str(home),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OUTBOX_CACHE": str(cache_dir()),
        "OUTBOX_SANDBOX": str(home / "sandbox"),
    }


# Found before the real one: a relay that is slow to start, for as long as nothing waits for what it publishes.
SLOW_RELAY = """#!/usr/bin/env bash
case "$1 $2" in
"relay run") until [ -e {home}/waited ]; do sleep 0.1; done ;;
"relay wait") touch {home}/waited ;;
esac
exec {outbox} "$@"
"""


@pytest.mark.spark
def test_the_quickstart_works_as_it_is_typed(home):
    typed, files, promised = quickstart()
    # The tests' interpreter has the package already.
    assert "pip install 'outbox-kafka[spark,sandbox]'" in typed[0]
    folder = home / "work"
    folder.mkdir()
    for name, code in files.items():
        (folder / name).write_text(code)
    look = home / "look.py"
    look.write_text(LOOK)
    slow = home / "slow" / "outbox"
    slow.parent.mkdir()
    slow.write_text(SLOW_RELAY.format(home=home, outbox=Path(sys.executable).parent / "outbox"))
    slow.chmod(0o755)
    shell_environment = environment(home)
    shell_environment["PATH"] = os.pathsep.join([str(slow.parent), shell_environment["PATH"]])
    script = "".join([*typed[1:-1], f"python {look} > {home}/found\n", typed[-1]])
    log = home / "log"
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", script],
            cwd=folder,
            env=shell_environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = shell.wait(180 * patience())
    finally:
        # The relay, where the text did not get as far as stopping it.
        try:
            os.killpg(shell.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        shell.wait()
    shown = log.read_text()
    assert status == 0, shown[-6000:]
    assert json.loads((home / "found").read_text()) == {
        "orders": [["1", "ada", 4200, "placed", 1, 0]],
        "waiting": [],
        "failures": [],
        "dead letters": [],
    }, shown[-6000:]
    assert promised in shown.splitlines()
    assert ast.literal_eval(promised) == [("1", "ada", 4200, "placed")]
