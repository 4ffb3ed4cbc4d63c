"""PostgresServer: a real server that is started, stopped, killed and found to be ours."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from outbox.sandbox import _dirs, _pgbin, postgres
from outbox.sandbox._dirs import User
from outbox.sandbox._ports import free_ports
from outbox.sandbox.errors import PortTaken, ServiceError, StartFailed
from outbox.sandbox.postgres import PostgresServer

ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(settings={"fsync": "off"}) as running:
        yield running


def value(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query).fetchone()  # type: ignore[call-overload]
    assert row is not None
    return row[0]


def test_databases_are_created_cloned_and_dropped_under_any_name(server: PostgresServer) -> None:
    name = 'a "shop" at 100% / ü'
    url = server.create_database(name)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE goods (id int)")
        connection.execute("INSERT INTO goods VALUES (1), (2)")
    clone = server.create_database("clone", template=name)
    assert value(clone, "SELECT count(*) FROM goods") == 2

    with psycopg.connect(clone):
        server.drop_database("clone")  # in spite of a connection
    server.drop_database("clone")  # and when it is not there
    reader = psycopg.pq.PGconn.connect(f"{server.create_database('read')}?replication=database".encode())
    reader.exec_(b"CREATE_REPLICATION_SLOT read_slot LOGICAL pgoutput")
    reader.exec_(b"START_REPLICATION SLOT read_slot LOGICAL 0/0 (proto_version '1', publication_names 'none')")
    assert value(server.url(), "SELECT active FROM pg_replication_slots") is True
    server.drop_database("read")  # in spite of a slot that is read
    reader.finish()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(clone)
    assert value(url, "SELECT current_database()") == name


def test_restart_keeps_port_and_data_and_leaving_removes_a_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs had taken its first two picks of ports meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        offers = iter([[taken], [taken], free_ports(1)])
        monkeypatch.setattr(postgres, "free_ports", lambda _: next(offers))
        server = PostgresServer().start()
    with server:
        assert value(server.url(), "SHOW fsync") == "on"
        url, port = server.create_database("shop"), server.port
        assert port != taken
        assert value(url, "SHOW port") == str(port)
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE goods AS SELECT 1 AS id")
        first = server.pid
        server.restart()
        assert (server.port, server.running) == (port, True)
        assert server.pid != first
        assert value(url, "SELECT id FROM goods") == 1
        server.stop()
        assert not server.running
        assert server.pid is None
        server.stop()  # twice is once
        assert server.data_dir.exists()
        server.start()
        assert value(url, "SELECT id FROM goods") == 1
    assert not server.running
    assert not server.data_dir.exists()


def test_a_given_directory_is_kept_and_taken_up_again(open_directory: Path) -> None:
    directory = open_directory / "below" / "pg"
    with PostgresServer(directory) as server:
        server.create_database("shop")
        assert PostgresServer(directory).start().pid == server.pid
    with PostgresServer(directory) as again:
        assert value(again.url("shop"), "SELECT current_database()") == "shop"


def test_a_given_port_that_somebody_has_is_an_error_with_the_log(server: PostgresServer) -> None:
    with pytest.raises(PortTaken, match=rf"(?s)listens on port {server.port}.*could not bind.*in use") as caught:
        PostgresServer(port=server.port).start()
    assert caught.value.log is not None
    assert value(server.url(), "SELECT 1") == 1  # whoever had the port still has it


def test_a_start_that_fails_shows_the_log() -> None:
    server = PostgresServer(settings={"shared_buffers": "nonsense"})
    with pytest.raises(StartFailed, match=r"(?s)ended while starting.*invalid value for parameter.*nonsense"):
        server.start()
    assert not server.running
    server.close()
    assert not server.data_dir.exists()


def test_a_setting_cannot_smuggle_in_another() -> None:
    with pytest.raises(ServiceError, match=r"is not a setting of postgresql\.conf"):
        PostgresServer(settings={"work_mem": "1MB'\nfsync = 'off"})


# -- as root, and not as root


@pytest.mark.skipif(not ROOT, reason="only root can drop to another user")
def test_root_drops_to_a_user_who_owns_the_data(server: PostgresServer) -> None:
    assert server.pid is not None
    user = psutil.Process(server.pid).uids()
    assert 0 not in {user.real, user.effective, user.saved}
    assert psutil.Process(server.pid).gids().real != 0
    assert (server.data_dir / "pgdata").stat().st_uid == user.real


@pytest.mark.skipif(not ROOT, reason="everybody else gets the system's own error")
def test_root_is_told_which_directory_is_closed_to_that_user(open_directory: Path) -> None:
    closed = open_directory / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ServiceError, match=f"can't pass {closed}; .*chmod"):
        PostgresServer(closed / "pg").start()


@pytest.mark.skipif(not ROOT, reason="only root's files are closed to the user that Postgres runs as")
def test_programs_in_a_closed_directory_are_copied_once(open_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = _dirs.unprivileged_user()
    assert user is not None
    wheel = _pgbin._newest_install().parent
    home = open_directory / "home"
    home.mkdir(mode=0o700)
    shutil.copytree(wheel, home / wheel.name, ignore=shutil.ignore_patterns("pginstall"))
    for libraries in wheel.parent.glob(f"{wheel.name}*libs"):
        shutil.copytree(libraries, home / libraries.name)
    monkeypatch.syspath_prepend(home)
    monkeypatch.delitem(sys.modules, wheel.name, raising=False)
    monkeypatch.setenv("OUTBOX_CACHE", str(open_directory / "cache"))
    assert _dirs.blocking_directory(_pgbin._newest_install(), user) == home

    with PostgresServer(settings={"fsync": "off"}) as server:
        assert server.pid is not None
        assert open_directory / "cache" in Path(psutil.Process(server.pid).exe()).parents
        assert value(server.url(), "SELECT 1") == 1
    made = (open_directory / "cache").stat().st_mtime_ns
    assert _dirs.blocking_directory(_pgbin.binaries(user), user) is None
    assert (open_directory / "cache").stat().st_mtime_ns == made


@pytest.mark.skipif(not ROOT, reason="not root already: the other tests show it")
def test_whoever_is_not_root_runs_it_as_themselves(open_directory: Path) -> None:
    user = _dirs.unprivileged_user()
    assert user is not None
    script = (
        "from outbox.sandbox.postgres import PostgresServer\n"
        "import psutil, os\n"
        "with PostgresServer() as server:\n"
        "    print(os.getuid(), psutil.Process(server.pid).uids().real, server.data_dir.stat().st_uid)\n"
    )
    result = subprocess.run(
        [python_for(user), "-c", script],
        env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "HOME": str(open_directory)},
        cwd="/",
        user=user.uid,
        group=user.gid,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(user.uid)] * 3


def python_for(user: User) -> str:
    """An interpreter of our version that this user may execute."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [Path(sys.executable), *(Path(directory, version) for directory in ("/usr/bin", "/usr/local/bin"))]
    for candidate in candidates:
        if candidate.exists() and _dirs.blocking_directory(candidate.resolve(), user) is None:
            return str(candidate)
    pytest.skip(f"there is no {version} that the user {user.name} can execute")
