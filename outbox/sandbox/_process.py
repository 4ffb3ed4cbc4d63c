"""The two ways in which a server runs: supervised (ends with us, however we end) and detached (outlives us)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from outbox.sandbox._dirs import User, identity
from outbox.sandbox.errors import ServiceError, StartFailed

_SUPERVISOR: Final = Path(__file__).with_name("_supervisor.py")
_PATIENCE: Final = "OUTBOX_PATIENCE"
_KILL_SECONDS: Final = 10.0


class Process(Protocol):
    """A server's process, whichever way it runs."""

    @property
    def pid(self) -> int: ...
    @property
    def running(self) -> bool: ...
    def signal(self, number: int) -> None: ...
    def wait(self, timeout: float) -> bool: ...


class Supervised:
    """A child process that a small supervisor ends when we end, even by kill -9.

    argv, env (None: ours), cwd   as for subprocess.
    log             the file that its output is appended to.
    user            the account it runs as; None: ours.
    orphan_signal   the signal that ends it when we are gone; SIGKILL follows after five seconds.
    remove          a directory that is removed in that case.

    Raises StartFailed when the program can't be executed.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: User | None = None,
        orphan_signal: signal.Signals = signal.SIGKILL,
        remove: Path | None = None,
    ) -> None:
        spec = {
            "argv": list(argv),
            "log": str(log),
            "cwd": None if cwd is None else str(cwd),
            "identity": identity(user),
            "orphan_signal": int(orphan_signal),
            "remove": None if remove is None else str(remove),
        }
        # A session of its own: Ctrl-C in a terminal reaches us, and we stop the servers in order. The environment is
        # inherited from the supervisor, never passed on a command line, where everybody could read it.
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISOR), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        _supervisors.add(self._supervisor)
        self.exit_code: int | None = None
        """The exit status, once ``wait`` has returned True; negative for a signal."""
        self._collecting = threading.Lock()
        message = self._read()
        if "pid" not in message:
            self._supervisor.wait()
            _close_pipes(self._supervisor)
            raise StartFailed(f"{argv[0]} can't be executed: {message.get('error', 'its supervisor died')}", log)
        self._child = psutil_process(int(message["pid"]))
        self.pid = int(message["pid"])

    @property
    def running(self) -> bool:
        if self._supervisor.poll() is not None:
            # It ended without ``wait``: collect its status and close the pipes here.
            self.wait(0)
            return False
        return self._child is not None and alive(self._child)

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process is gone."""
        if self._child is not None and self._supervisor.poll() is None:
            send(self._child, number)

    def wait(self, timeout: float) -> bool:
        """Wait for its end, at most ``timeout`` seconds. False when it still runs."""
        try:
            self._supervisor.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        # Several threads may see its end at once.
        with self._collecting:
            if self.exit_code is None:
                self.exit_code = int(self._read().get("exit", -signal.SIGKILL))
                _close_pipes(self._supervisor)
        return True

    def _read(self) -> dict[str, Any]:
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        return dict(json.loads(line)) if line else {}


_started_detached: list[subprocess.Popen[bytes]] = []
"""Kept until we end: Python warns when a Popen is deleted while its process runs, and these are meant to run on."""


class Detached:
    """A process in a session of its own that outlives us, found again by its command line."""

    def __init__(self, process: psutil.Process, popen: subprocess.Popen[bytes] | None = None) -> None:
        self._child = process
        self._popen = popen  # to notice its end and reap its zombie while we live
        if popen is not None:
            _started_detached.append(popen)
        self.pid: int = process.pid

    @classmethod
    def start(
        cls, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, user: User | None = None
    ) -> Detached:
        """Start it. Raises StartFailed when the program can't be executed."""
        try:
            with log.open("ab") as file:
                popen = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd="/",
                    start_new_session=True,
                    **identity(user),
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise StartFailed(f"{argv[0]} can't be executed: {error}", log) from error
        process = psutil_process(popen.pid)
        if process is None or popen.poll() is not None:
            raise StartFailed(f"{argv[0]} ended at once", log)
        return cls(process, popen)

    @classmethod
    def find(cls, *arguments: str) -> Detached | None:
        """Find the process with all these arguments on its command line, or None.

        A pid file is not used: a kill at the wrong moment leaves none, and its pid can belong to another process by
        now.
        """
        for process in psutil.process_iter(["cmdline"]):
            if set(arguments) <= set(process.info["cmdline"] or ()) and alive(process):
                return cls(process)
        return None

    @property
    def running(self) -> bool:
        if self._popen is not None and self._popen.poll() is not None:
            return False
        return alive(self._child)

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process is gone."""
        send(self._child, number)

    def wait(self, timeout: float) -> bool:
        """Wait for its end, at most ``timeout`` seconds. False when it still runs."""
        return wait_for(lambda: not self.running, timeout)


def completed(argv: Sequence[str | Path], user: User | None) -> subprocess.CompletedProcess[str]:
    """Run a program as ``user`` (None: our own account) to its end, and return what it has printed."""
    return subprocess.run(
        argv, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **identity(user)
    )


def psutil_process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def alive(process: psutil.Process) -> bool:
    """Return whether it exists and is not a zombie: in a container, orphans may never be reaped.

    A killed process is one already while other threads of it still hold its files and ports.
    """
    try:
        return bool(process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1))
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to this process, never to another that has its pid by now."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def pause(process: Process, timeout: float = 10.0) -> None:
    """Halt a process by SIGSTOP and wait until it has stopped. Raises ServiceError when it does not run."""
    process.signal(signal.SIGSTOP)
    halted = psutil_process(process.pid) if process.running else None
    if halted is None or not wait_for(lambda: halted.status() == psutil.STATUS_STOPPED, timeout, every=0.001):
        raise ServiceError(f"process {process.pid} can't be halted: it does not run; start it first")


def kill_with_children(process: Process) -> None:
    """Kill a server and all its children by SIGKILL, like a crash of the machine.

    The parent is halted first, so that it can neither fork nor clean up meanwhile. Raises ServiceError when one of
    them survives.
    """
    process.signal(signal.SIGSTOP)
    parent = psutil_process(process.pid) if process.running else None
    children: list[psutil.Process] = []
    if parent is not None:
        with suppress(psutil.NoSuchProcess):
            children = parent.children(recursive=True)
    for child in children:
        send(child, signal.SIGKILL)
    process.signal(signal.SIGKILL)
    ended = process.wait(_KILL_SECONDS)
    if not (ended and wait_for(lambda: not any(alive(child) for child in children), _KILL_SECONDS)):
        raise ServiceError(f"process {process.pid} or a child of it survived SIGKILL for {_KILL_SECONDS:g} s")


def patience() -> float:
    """Return the factor of all time limits, $OUTBOX_PATIENCE. Raises ServiceError if it is invalid."""
    given = os.environ.get(_PATIENCE, "1")
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1000:
        raise ServiceError(f"{_PATIENCE}={given} must be a number above 0, such as 3")
    return factor


def wait_for(condition: Callable[[], bool], timeout: float, every: float = 0.02) -> bool:
    """Poll a condition for at most ``timeout`` seconds (times ``patience``) until it holds. Returns whether it did."""
    deadline = time.monotonic() + timeout * patience()
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every)
    return True


_supervisors: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def _close_pipes(supervisor: subprocess.Popen[bytes]) -> None:
    for pipe in (supervisor.stdin, supervisor.stdout):
        if pipe is not None:
            pipe.close()


def _let_go_in_fork() -> None:
    """Close the pipes in a fork without exec (multiprocessing), which would hide our death from the supervisors."""
    for supervisor in list(_supervisors):
        _close_pipes(supervisor)


os.register_at_fork(after_in_child=_let_go_in_fork)
