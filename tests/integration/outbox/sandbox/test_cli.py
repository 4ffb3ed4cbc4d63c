"""``outbox sandbox``: outlives its command, is found again, and keeps what is in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
from click.testing import Result
from typer.testing import CliRunner

from outbox.sandbox import _process
from outbox.sandbox._process import alive, psutil_process, send, wait_for
from outbox.sandbox.sandbox import Sandbox
from outbox.sandbox.versions import KAFKA_VERSIONS
from outbox.testing.fixtures import Topics
from outbox.urls import display_url
from relay.cli.app import app

COMMAND = [sys.executable, "-m", "relay.cli", "sandbox"]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A closed directory, as a home directory usually is."""
    made = Path(tempfile.mkdtemp(prefix="outbox-test-"))
    yield made
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBOX_SANDBOX", str(made))
        run("down", "--purge")
    # Commands that ran in this process have started them: nothing else collects their ends.
    for started in _process._started_detached:
        started.wait(30)
    _process._started_detached.clear()
    shutil.rmtree(made)


@pytest.fixture(autouse=True)
def _here(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_SANDBOX", str(directory))


def run(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(app, ["sandbox", *arguments])
    assert result.exit_code == status, result.stderr
    return result


def facts(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_two_ups_at_once_give_one_sandbox_that_outlives_them(directory: Path) -> None:
    both = [
        subprocess.Popen([*COMMAND, "up", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=480) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in outputs)
    assert first == second
    assert first["running"] is True
    assert sum("Starting Kafka" in errors for _, errors in outputs) == 1

    assert facts(run("up", "--json")) == first
    with psycopg.connect(first["database_url"]) as connection:
        assert connection.execute("SELECT current_database(), current_setting('fsync')").fetchone() == ("outbox", "on")
        connection.execute("CREATE TABLE kept AS SELECT 1 AS id")
    topics = Topics(first["bootstrap_servers"])
    assert topics.consume(topics.create_topic("kept", partitions=3)) == []
    shown = run("status").stdout
    assert f"Home      {directory}\n" in shown
    assert display_url(first["database_url"]) in shown
    assert f"{first['bootstrap_servers']} (version {first['kafka_version']})" in shown
    for log in first["logs"]:
        assert log in shown
        assert Path(log).stat().st_size > 0


def test_other_users_of_the_machine_do_not_get_in(directory: Path) -> None:
    url = urlsplit(facts(run("status", "--json"))["database_url"])
    assert url.password
    for userinfo in ("postgres", "postgres:wrong"):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(url._replace(netloc=f"{userinfo}@{url.hostname}:{url.port}").geturl())
    with psycopg.connect(url.geturl()) as connection:
        (stored,) = connection.execute("SELECT rolpassword FROM pg_authid WHERE rolname = 'postgres'").fetchone() or ()
        assert stored.startswith("SCRAM-SHA-256$")
        rules = connection.execute("SELECT DISTINCT auth_method FROM pg_hba_file_rules").fetchall()
        assert rules == [("scram-sha-256",)]
    file = directory / "postgres.password"
    assert (file.read_text(), file.stat().st_mode & 0o777) == (url.password, 0o600)
    # It is for programs and shells, not for screens and lists of processes.
    assert url.password not in run("status").stdout + run("up").stdout
    assert not any(url.password in " ".join(process.cmdline()) for process in sandbox_processes())
    log = Sandbox().status().postgres_log.read_text()
    assert url.password not in log


def test_a_sandbox_stays_with_its_version_of_kafka() -> None:
    version = facts(run("status", "--json"))["kafka_version"]
    assert facts(run("up", "--kafka", version, "--json"))["running"]
    other = next(one for one in KAFKA_VERSIONS if one != version)
    assert f"is {version}, not {other}; request {version}" in run("up", "--kafka", other, status=1).stderr
    assert f"only of {', '.join(KAFKA_VERSIONS)}" in run("up", "--kafka", "4", status=1).stderr


def test_export_lines_work_in_a_shell() -> None:
    script = 'eval "$1" && echo "$OUTBOX_DATABASE_URL|$OUTBOX_KAFKA__BOOTSTRAP_SERVERS"'
    exported = run("up", "--export").stdout
    result = subprocess.run(["sh", "-c", script, "sh", exported], capture_output=True, text=True, check=True)
    state = Sandbox().status()
    assert result.stdout == f"{state.database_url}|{state.bootstrap_servers}\n"


def test_what_has_died_is_started_again_on_its_ports_with_its_data() -> None:
    before = facts(run("status", "--json"))
    processes = sandbox_processes()
    assert len(processes) == 2
    for process in processes:
        send(process, signal.SIGKILL)
    assert wait_for(lambda: not any(alive(process) for process in processes), 10)
    died = facts(run("status", "--json", status=1))
    assert (died["postgres_running"], died["brokers_running"], died["brokers"]) == (False, 0, 1)

    assert facts(run("up", "--json")) == before
    with psycopg.connect(before["database_url"]) as connection:
        assert connection.execute("SELECT id FROM kept").fetchone() == (1,)
    assert Topics(before["bootstrap_servers"]).consume("kept") == []


def sandbox_processes() -> list[psutil.Process]:
    """The postmaster and the broker of the sandbox."""
    state = Sandbox().status()
    marks = {str(state.postgres_log.parent / "pgdata"), str(state.kafka_logs[0].parents[1] / "server.properties")}
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if marks & set(process.info["cmdline"] or ()) and alive(process)
    ]


def test_down_ends_everything_and_purge_forgets_it(directory: Path) -> None:
    pids = [process.pid for process in sandbox_processes()]
    before = Sandbox().status()
    run("down")
    assert all(psutil_process(pid) is None or not alive(psutil.Process(pid)) for pid in pids)
    stopped = Sandbox().status()
    assert not stopped.running
    assert stopped.database_url == before.database_url  # it will be there again
    Sandbox().down()  # twice is once

    # A port that somebody else has by now is an error that says what to do.
    port = urlsplit(before.database_url).port
    assert port is not None
    with socket.create_server(("127.0.0.1", port)):
        assert "For a new, empty sandbox: outbox sandbox down --purge" in run("up", status=1).stderr

    run("down", "--purge")
    assert sorted(path.name for path in directory.iterdir()) == ["lock"]
    assert not before.postgres_log.parent.exists()
    assert Sandbox().status().database_url == ""


def test_the_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTBOX_SANDBOX", str(tmp_path / "a"))
    assert Sandbox().directory == tmp_path / "a"
    monkeypatch.delenv("OUTBOX_SANDBOX")
    monkeypatch.setenv("OUTBOX_CACHE", str(tmp_path / "b"))
    assert Sandbox().directory == tmp_path / "b" / "sandbox"
    monkeypatch.delenv("OUTBOX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert Sandbox().directory == tmp_path / "c" / "outbox" / "sandbox"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "d"))
    assert Sandbox().directory == tmp_path / "d" / ".cache" / "outbox" / "sandbox"
    assert os.environ["HOME"]
