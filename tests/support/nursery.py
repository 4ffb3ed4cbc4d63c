"""Relays and commands for tests, forked from a process that has imported the relay.

That is half a second of processor time less for each. A relay so started is a process like any other: with an
environment, a directory, a log and a session of its own, killed and halted by signals. Only the interpreter's start and
the imports are done once. The protocol, JSON lines on a socket:

    asked     {"argv": […], "env": {…}, "cwd": path, "out": path, "err": path}; argv as after ``python``
    answered  {"pid": n}, in the order of the questions; and at its end {"pid": n, "exit": code}, negative for a signal

When the asking process is gone, however it went, the socket ends; then this process does, and Linux ends its relays.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import queue
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from outbox.testing.fixtures import RelayFactory, Started

_PR_SET_PDEATHSIG = 1


class Forked:
    """One process, as ``outbox.sandbox._process.Supervised`` shows its own, and with what Popen has in common."""

    def __init__(self, pid: int) -> None:
        from outbox.sandbox._process import psutil_process

        self.pid = pid
        self._child = psutil_process(pid)
        self._ended = threading.Event()
        self._exit_code: int | None = None

    @property
    def running(self) -> bool:
        from outbox.sandbox._process import alive

        return not self._ended.is_set() and self._child is not None and alive(self._child)

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    def poll(self) -> int | None:
        return self._exit_code

    def signal(self, number: int) -> None:
        from outbox.sandbox._process import send

        if self._child is not None and not self._ended.is_set():
            send(self._child, number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> bool:
        return self._ended.wait(timeout)

    def end(self, code: int) -> None:
        """Note its end."""
        self._exit_code = code
        self._ended.set()


class Nursery:
    """The process that relays are forked from, and what is known of them. It starts when the first one is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._born: queue.SimpleQueue[Forked | None] = queue.SimpleQueue()

    def fork(
        self, argv: Sequence[str], environment: Mapping[str, str], cwd: Path, out: Path, err: Path | None = None
    ) -> Forked:
        """Start ``python argv``. What it writes is appended to ``out``, and its errors to ``err`` if that is given."""
        with self._lock:
            if self._process is None:
                self._start()
            assert self._socket is not None
            files = {"cwd": str(cwd), "out": str(out), "err": str(err or out)}
            asked = {"argv": list(argv), "env": dict(environment), **files}
            self._socket.sendall(json.dumps(asked).encode() + b"\n")
            born = self._born.get(timeout=120)
            assert born is not None, "the nursery has ended"
            return born

    def run(
        self, argv: Sequence[str], environment: Mapping[str, str], timeout: float = 480.0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python argv`` to its end, as ``subprocess.run`` does. Raises TimeoutExpired."""
        with tempfile.TemporaryDirectory(prefix="outbox-command-") as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            child = self.fork(argv, environment, cwd or Path.cwd(), out, err)
            if not child.wait(timeout):
                child.signal(signal.SIGKILL)
                child.wait(30)
                raise subprocess.TimeoutExpired(list(argv), timeout, out.read_bytes(), err.read_bytes())
            assert child.exit_code is not None
            return subprocess.CompletedProcess(list(argv), child.exit_code, out.read_text(), err.read_text())

    def close(self) -> None:
        """End it, and whatever it has started."""
        if self._process is not None and self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._process.wait(30)
            self._reader.join(30)
            self._socket.close()
            self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment | {"PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours
        _sockets.add(ours)
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, ours: socket.socket) -> None:
        living: dict[int, Forked] = {}
        with ours.makefile("rb") as lines:
            for line in lines:
                told = json.loads(line)
                if "exit" in told:
                    living.pop(told["pid"]).end(told["exit"])
                else:
                    living[told["pid"]] = born = Forked(told["pid"])
                    self._born.put(born)
        # Its relays end with it, by SIGKILL.
        for one in living.values():
            one.end(-signal.SIGKILL)
        self._born.put(None)


NURSERY: Final = Nursery()
"""Of this process; conftest.py closes it."""


def run(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``python argv`` to its end, as a command that a user has typed."""
    return NURSERY.run(argv, environment)


def relays(nursery: Nursery, *arguments: Any) -> RelayFactory:
    """Make a factory of relays that forks them."""
    from outbox.testing.fixtures import RelayFactory, RelayProcess

    class ForkedRelay(RelayProcess):
        def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> Started:
            return nursery.fork(command[1:], environment, self.log_file.parent, self.log_file)

    class Forking(RelayFactory):
        _kind = ForkedRelay

    return Forking(*arguments)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _let_go_in_fork() -> None:
    """A fork of the asking process must not keep the socket open."""
    for one in list(_sockets):
        one.close()


os.register_at_fork(after_in_child=_let_go_in_fork)


def _serve(asking: socket.socket) -> list[str]:
    """Fork what is asked for. Returns in a child, with its arguments; the process that serves ends in here."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server, rest = os.getpid(), b""
    while True:
        ready, _, _ = select.select([asking, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 512)
            for pid, code in _ended():
                asking.sendall(json.dumps({"pid": pid, "exit": code}).encode() + b"\n")
        if asking not in ready:
            continue
        received = asking.recv(1 << 16)
        if not received:
            # Not by sys.exit, which would wait for nobody's sake; the relays get their signal from the kernel.
            os._exit(0)
        *asked, rest = (rest + received).split(b"\n")
        for question in map(json.loads, asked):
            # There from the start: who asked reads it from now on.
            outputs = [
                os.open(question[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) for name in ("out", "err")
            ]
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (wake_read, wake_write):
                    os.close(descriptor)
                asking.close()
                return _become(question, outputs, server)
            for descriptor in outputs:
                os.close(descriptor)
            asking.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _ended() -> list[tuple[int, int]]:
    """Return who has ended, and how."""
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _become(asked: dict[str, Any], outputs: Sequence[int], server: int) -> list[str]:
    """Make a forked process what it would be had it been executed. Gives its arguments."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:
            os._exit(1)
    for descriptor, output in enumerate(outputs, 1):
        os.dup2(output, descriptor)
        os.close(output)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    time.tzset()
    argv = list(asked["argv"])
    sys.path[0] = asked["cwd"] if argv[0] == "-m" else str(Path(argv[0]).parent)
    sys.path[1:1] = filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep))
    return argv


def main() -> None:
    """Import what a relay imports, then wait to be asked."""
    asking = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(asking.fileno(), False)
    from relay.cli.assembly import assemble

    assemble(["relay", "run"])
    for name in ("confluent_kafka.admin", "relay.failpoints", "outbox._app.logs", "relay.wiring", "relay.workers"):
        importlib.import_module(name)
    # None of them may have started a thread: it would not come along.
    if (threads := Path("/proc/self/task")).exists():
        assert len(list(threads.iterdir())) == 1, "an import of the relay's started a thread"
    # Nothing of this can be rubbish, and a relay whose collector looked through it would have to copy all the memory.
    gc.freeze()
    program, *arguments = _serve(asking)
    if program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
