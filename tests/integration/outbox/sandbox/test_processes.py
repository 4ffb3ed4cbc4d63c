"""No orphans: whoever started a server may be killed in any way, and the server goes with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from outbox.sandbox._process import Supervised, alive, kill_with_children, patience, psutil_process, wait_for
from outbox.sandbox.errors import ServiceError

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()",
]


def gone(pid: int) -> bool:
    process = psutil_process(pid)
    return process is None or not alive(process)


@pytest.fixture
def owners() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for owner in started:
        owner.kill()
        owner.communicate()


def run_owner(script: str, owners: list[subprocess.Popen[str]]) -> tuple[subprocess.Popen[str], dict[str, object]]:
    """Run a script that starts servers, prints what it has as JSON and waits."""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    owners.append(owner)
    assert owner.stdout is not None
    line = owner.stdout.readline()
    assert line, "the owner ended without a word"
    return owner, json.loads(line)


def test_kill_9_of_the_owner_takes_postgres_and_kafka_along(owners: list[subprocess.Popen[str]]) -> None:
    owner, facts = run_owner(
        """
import json, psutil, signal
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.postgres import PostgresServer
with PostgresServer() as postgres, KafkaCluster() as kafka:
    below = [p.pid for p in psutil.Process().children(recursive=True)]
    print(json.dumps({"pids": below, "postgres": postgres.pid, "kafka": kafka.pids,
                      "directories": [str(postgres.data_dir), str(kafka.data_dir)]}), flush=True)
    signal.pause()
""",
        owners,
    )
    pids: list[int] = facts["pids"]  # type: ignore[assignment]
    assert facts["postgres"] in pids
    # Two supervisors, a broker, the postmaster and its processes; one of those may have come to its end by itself.
    assert sum(not gone(pid) for pid in pids) > 5
    assert not any(gone(pid) for pid in (facts["postgres"], *facts["kafka"]))  # type: ignore[misc]

    owner.send_signal(signal.SIGKILL)

    assert wait_for(lambda: all(gone(pid) for pid in pids), 30), [pid for pid in pids if not gone(pid)]
    directories = [Path(str(directory)) for directory in facts["directories"]]  # type: ignore[attr-defined]
    assert wait_for(lambda: not any(directory.exists() for directory in directories), 30)


def owner_of(argv: list[str], log: Path, more: str = "") -> str:
    return f"""
import json, os, signal, sys
from pathlib import Path
from outbox.sandbox._process import Supervised
# nohup passes on that it is ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
server = Supervised({argv!r}, log=Path({str(log)!r}), orphan_signal=signal.SIGTERM)
facts = {{"server": server.pid, "supervisor": server._supervisor.pid}}
{more}
print(json.dumps(facts), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_however_the_owner_ends(number: signal.Signals, owners: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    owner, facts = run_owner(owner_of(SLEEPER, tmp_path / "log"), owners)
    owner.send_signal(number)
    assert wait_for(lambda: gone(int(str(facts["server"]))) and gone(int(str(facts["supervisor"]))), 10)


def test_a_fork_of_the_owner_does_not_keep_the_server_alive(
    owners: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    fork = "facts['fork'] = os.fork()\nif not facts['fork']:\n    os.close(1)\n    signal.pause()"
    owner, facts = run_owner(owner_of(SLEEPER, tmp_path / "log", fork), owners)
    try:
        owner.send_signal(signal.SIGKILL)
        assert wait_for(lambda: gone(int(str(facts["server"]))), 10)
        assert not gone(int(str(facts["fork"])))
    finally:
        os.kill(int(str(facts["fork"])), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")
def test_kill_9_of_the_supervisor_ends_the_server_too(owners: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    _, facts = run_owner(owner_of(SLEEPER, tmp_path / "log"), owners)
    os.kill(int(str(facts["supervisor"])), signal.SIGKILL)
    assert wait_for(lambda: gone(int(str(facts["server"]))), 10)


def test_a_server_that_does_not_listen_is_killed_after_a_while(
    owners: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    owner, facts = run_owner(owner_of(STUBBORN, log), owners)
    assert wait_for(lambda: "deaf" in log.read_text(), 10)
    owner.send_signal(signal.SIGKILL)
    assert wait_for(lambda: gone(int(str(facts["server"]))), 15)


def test_the_end_of_the_server_is_seen_with_its_status(tmp_path: Path) -> None:
    log = tmp_path / "log"
    finished = Supervised([sys.executable, "-c", "print('bye'); raise SystemExit(3)"], log=log)
    assert finished.wait(60)
    assert (finished.exit_code, finished.running) == (3, False)
    assert log.read_text() == "bye\n"

    killed = Supervised(SLEEPER, log=log)
    assert killed.running
    assert not killed.wait(0)
    killed.signal(signal.SIGKILL)
    assert killed.wait(60)
    assert killed.exit_code == -signal.SIGKILL
    killed.signal(signal.SIGTERM)  # nobody there, nobody hurt


def test_several_threads_see_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Supervised(SLEEPER, log=tmp_path / "log")
    read, entered, second = server._read, list[int](), threading.Event()

    def reading() -> dict[str, object]:
        entered.append(threading.get_ident())
        if len(entered) > 1:
            second.set()
        # Another one that reads, too, is there by then.
        second.wait(0.5)
        return read()

    monkeypatch.setattr(server, "_read", reading)
    server.signal(signal.SIGKILL)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(server.wait, [60.0] * 4)) == [True] * 4
    assert (len(entered), server.exit_code) == (1, -signal.SIGKILL)


def test_the_environment_is_handed_down_and_on_no_command_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "import os, signal; print(os.environ['SECRET'], flush=True); signal.pause()"
    server = Supervised([sys.executable, "-c", script], log=log, env={"SECRET": "s3cr3t"})
    assert wait_for(lambda: log.read_text() == "s3cr3t\n", 10)
    for pid in (server.pid, server._supervisor.pid):
        assert not any("s3cr3t" in argument for argument in psutil.Process(pid).cmdline())
    server.signal(signal.SIGKILL)
    assert server.wait(60)


def test_kill_with_children_leaves_nobody(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = Supervised(
        [sys.executable, "-c", f"import subprocess; subprocess.run({SLEEPER!r}, start_new_session=True)"], log=log
    )
    process = psutil.Process(parent.pid)
    assert wait_for(lambda: bool(process.children()), 10)
    child = process.children()[0]
    kill_with_children(parent)
    assert not parent.running
    assert gone(child.pid)


def test_patience_multiplies_time_limits_and_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_PATIENCE", raising=False)
    assert patience() == 1
    monkeypatch.setenv("OUTBOX_PATIENCE", "0.5")
    assert patience() == 0.5
    for wrong in ("much", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("OUTBOX_PATIENCE", wrong)
        with pytest.raises(ServiceError, match="OUTBOX_PATIENCE="):
            patience()


def test_a_process_that_ended_by_itself_leaves_no_file_open(tmp_path: Path) -> None:
    """Nobody waits for it: its pipes would be closed by the garbage collector, with a warning in the next test."""
    process = Supervised([sys.executable, "-c", "pass"], log=tmp_path / "log")
    pipes = (process._supervisor.stdin, process._supervisor.stdout)
    # The supervisor, which has the pipes' other ends, outlives it for a moment.
    assert wait_for(lambda: process._supervisor.poll() is not None, 30)
    assert not process.running
    assert all(pipe is not None and pipe.closed for pipe in pipes)
    assert process.exit_code == 0
