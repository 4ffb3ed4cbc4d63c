"""Fetching jars: from a repository on loopback that cuts connections and serves other bytes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import stamina

from outbox.sandbox import jars
from outbox.sandbox._dirs import blocking_directory, unprivileged_user
from outbox.sandbox.errors import ServiceError


@dataclass
class Repository:
    """What the server serves, and what it was asked."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """Statuses to answer with first, one a request."""
    cut_after: list[int] = field(default_factory=list)
    """Bytes to send before the connection is closed, one a request."""

    def put(self, jar: jars.Jar, content: bytes) -> None:
        self.files[f"/maven/{jar.path}"] = content


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Repository]:
    served = Repository()
    guard = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with guard:
                served.requests.append(self.path)
                status = served.answers.pop(0) if served.answers else 200
                content = served.files.get(self.path)
                cut = served.cut_after.pop(0) if served.cut_after else None
            if status != 200 or content is None:
                self.send_response(status if status != 200 else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:cut])
            if cut is not None:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    served.address = f"http://127.0.0.1:{server.server_port}/maven"
    monkeypatch.setenv("OUTBOX_MAVEN_REPOSITORY", served.address + "/")
    monkeypatch.setenv("OUTBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with stamina.set_testing(True, attempts=6):  # the tries, without the pauses
        yield served
    server.shutdown()
    server.server_close()
    thread.join()


CONTENT = os.urandom(200_000)


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[jars.Jar]]:
    """Put jars of these contents into the lock."""

    def write(*contents: bytes) -> list[jars.Jar]:
        found = [
            jars.Jar("org.example", f"part{number}", "1.0", hashlib.sha256(content).hexdigest(), len(content))
            for number, content in enumerate(contents)
        ]
        lines = ["# comment", "[set]", *(f"{jar}  sha256:{jar.sha256}  {jar.size}" for jar in found)]
        monkeypatch.setattr(jars, "_lock_text", lambda: "\n".join(lines))
        return found

    return write


Lock = Callable[..., list[jars.Jar]]


def test_a_set_is_fetched_once_in_its_order_and_then_comes_from_the_cache(repository: Repository, lock: Lock) -> None:
    contents = [os.urandom(50_000) for _ in range(6)]
    for jar, content in zip(lock(*contents), contents, strict=True):
        repository.put(jar, content)
    paths = jars.fetch("set")
    assert [path.read_bytes() for path in paths] == contents
    assert [re.sub(r"^\w{16}-", "", path.name) for path in paths] == [f"part{n}-1.0.jar" for n in range(6)]
    assert len(repository.requests) == 6
    assert jars.fetch("set") == paths
    assert len(repository.requests) == 6


def test_a_cut_connection_is_tried_again(repository: Repository, lock: Lock) -> None:
    repository.put(lock(CONTENT)[0], CONTENT)
    repository.cut_after = [70_000, 50_000]
    (path,) = jars.fetch("set")
    assert path.read_bytes() == CONTENT
    assert len(repository.requests) == 3


def test_the_next_call_fetches_only_what_is_missing(repository: Repository, lock: Lock) -> None:
    first, second = lock(CONTENT, b"other")
    repository.put(first, CONTENT)
    with pytest.raises(ServiceError, match="answers 404"):
        jars.fetch("set")
    lock(CONTENT)
    jars.fetch("set")  # the failure may have cancelled it
    repository.put(second, b"other")
    lock(CONTENT, b"other")
    repository.requests.clear()
    assert [path.read_bytes() for path in jars.fetch("set")] == [CONTENT, b"other"]
    assert repository.requests == [f"/maven/{second.path}"]


def test_what_a_killed_process_left_is_replaced(repository: Repository, lock: Lock) -> None:
    (jar,) = lock(CONTENT)
    repository.put(jar, CONTENT)
    (path,) = jars.fetch("set")
    path.rename(path.with_name(path.name + ".part"))
    with path.with_name(path.name + ".part").open("ab") as file:
        file.write(b"more")
    assert jars.fetch("set")[0].read_bytes() == CONTENT


def test_other_bytes_are_refused_and_thrown_away(repository: Repository, lock: Lock) -> None:
    (jar,) = lock(CONTENT)
    wrong = bytearray(CONTENT)
    wrong[100_000] ^= 1
    repository.put(jar, bytes(wrong))
    with pytest.raises(ServiceError, match=rf"{jar.name} has the SHA-256 \w+, jars.lock says {jar.sha256}"):
        jars.fetch("set")
    left = [file.name for file in (Path(os.environ["OUTBOX_CACHE"]) / "jars").iterdir() if file.suffix != ".lock"]
    assert left == []
    repository.put(jar, CONTENT)
    assert jars.fetch("set")[0].read_bytes() == CONTENT


def test_a_file_that_was_changed_in_the_cache_is_fetched_again(repository: Repository, lock: Lock) -> None:
    repository.put(lock(CONTENT)[0], CONTENT)
    (path,) = jars.fetch("set")
    path.write_bytes(CONTENT[:-1] + b"!")
    assert jars.fetch("set")[0].read_bytes() == CONTENT
    assert len(repository.requests) == 2
    os.utime(path)  # touched, but the same: read again, not fetched
    assert jars.fetch("set") == [path]
    assert len(repository.requests) == 2


def test_server_errors_are_tried_again_and_a_missing_file_is_not(repository: Repository, lock: Lock) -> None:
    (jar,) = lock(CONTENT)
    repository.put(jar, CONTENT)
    repository.answers = [503, 500, 429]
    assert jars.fetch("set")[0].read_bytes() == CONTENT
    assert len(repository.requests) == 4

    other = b"other"
    lock(other)
    repository.requests.clear()
    repository.files.clear()
    with pytest.raises(ServiceError, match=r"answers 404 .*OUTBOX_MAVEN_REPOSITORY"):
        jars.fetch("set")
    assert len(repository.requests) == 1


def test_a_repository_that_cannot_be_reached_is_an_error_that_says_what_to_set(
    repository: Repository, lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock(CONTENT)
    monkeypatch.setenv("OUTBOX_MAVEN_REPOSITORY", "http://127.0.0.1:1")
    with pytest.raises(ServiceError, match=r"refused.*after 6 tries.*OUTBOX_MAVEN_REPOSITORY"):
        jars.fetch("set")
    monkeypatch.setenv("OUTBOX_MAVEN_REPOSITORY", "file:///etc")
    with pytest.raises(ServiceError, match="must start with https"):
        jars.fetch("set")


def test_without_jgo_and_without_an_address_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_MAVEN_REPOSITORY", raising=False)
    assert jars.repository().startswith("https://")
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    with pytest.raises(ServiceError, match=r"outbox-kafka\[sandbox\].*OUTBOX_MAVEN_REPOSITORY"):
        jars.repository()


def test_two_processes_at_once_fetch_every_file_once(repository: Repository, tmp_path: Path) -> None:
    """The real set of Kafka, from the real cache by way of the server on loopback."""
    with pytest.MonkeyPatch.context() as usual:
        usual.delenv("OUTBOX_CACHE")
        usual.delenv("OUTBOX_MAVEN_REPOSITORY")
        real = jars.fetch(jars.KAFKA)
    for jar, path in zip(jars.locked(jars.KAFKA), real, strict=True):
        repository.put(jar, path.read_bytes())
    command = [sys.executable, "-c", "from outbox.sandbox import jars; print(*jars.fetch(jars.KAFKA), sep='\\n')"]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/") for _ in range(2)
    ]
    results = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert results[0][0] == results[1][0]
    fetched = [Path(line) for line in results[0][0].splitlines()]
    assert [path.read_bytes() for path in fetched] == [path.read_bytes() for path in real]
    assert sorted(repository.requests) == sorted(repository.files)
    assert any(f"Downloading kafka ({len(real)} files, " in output for _, output in results)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's files are closed to the user that Kafka runs as")
def test_jars_that_the_servers_user_can_not_read_are_copied_once(
    open_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_CACHE", str(open_directory / "cache"))
    user = unprivileged_user()
    assert user is not None
    jar = open_directory / "home" / "a.jar"
    jar.parent.mkdir(mode=0o700)
    jar.write_bytes(b"classes")
    for closed, file, directory in ((True, 0o644, 0o700), (False, 0o644, 0o755), (True, 0o600, 0o755)):
        jar.chmod(file)
        jar.parent.chmod(directory)
        [found] = jars.readable([jar], user)
        assert (found == jar) is not closed
        assert (found.read_bytes(), found.stat().st_mode & 0o777) == (b"classes", 0o644)
        assert blocking_directory(found.parent, user) is None
        if closed:
            made = found.stat().st_mtime_ns
            assert jars.readable([jar], user) == jars.readable([found], user) == [found]
            assert found.stat().st_mtime_ns == made
    (open_directory / "cache" / "readable-jars" / "lock").unlink()
    (open_directory / "cache" / "readable-jars" / "lock").mkdir()
    with pytest.raises(ServiceError, match=r"can't read .*home, and there is no copy: .* Set OUTBOX_CACHE"):
        jars.readable([jar], user)
