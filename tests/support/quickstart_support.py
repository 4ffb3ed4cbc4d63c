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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def empty_home() -> Iterator[Path]:
    """An empty home, closed to others; what the quickstart started is stopped at the end."""
    made = Path(tempfile.mkdtemp(prefix="outbox-test-"))
    yield made
    down = [sys.executable, "-m", "relay.cli", "sandbox", "down", "--purge"]
    ours = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    subprocess.run(down, env=fresh_shell(made) | ours, check=True, capture_output=True, timeout=300)
    shutil.rmtree(made)


def fresh_shell(home: Path) -> dict[str, str]:
    """Return what a fresh shell has, and what has been downloaded already."""
    kept = (
        "JAVA_HOME",
        "JDK_JAVA_OPTIONS",
        "OUTBOX_PATIENCE",
        "OUTBOX_PG_BIN",
        "OUTBOX_MAVEN_REPOSITORY",
        "OUTBOX_KAFKA_VERSION",
    )
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "HOME": str(home),
        "OUTBOX_CACHE": str(cache_dir()),
        "OUTBOX_SANDBOX": str(home / "sandbox"),
    }


def type_in(home: Path, typed: Sequence[str], variables: Mapping[str, str], seconds: float) -> None:
    """Type these lines in an empty folder, save the text's files first, and check what is there at the end."""
    _, files, promised = quickstart()
    folder = home / "work"
    folder.mkdir()
    for name, code in files.items():
        (folder / name).write_text(code)
    look = home / "look.py"
    look.write_text(LOOK)
    script = "".join([*typed[:-1], f"python {look} > {home}/found\n", typed[-1]])
    log = home / "log"
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", script],
            cwd=folder,
            env=fresh_shell(home) | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = shell.wait(seconds * patience())
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
