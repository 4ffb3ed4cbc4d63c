"""Runs one server for as long as the process that asked for it lives, so that kill -9 leaves no orphan.

Started as a script (standard library only, so that it starts in milliseconds) with one argument, a JSON object;
``_process.Supervised`` is the other end. The server gets this process's environment. The protocol:

    stdin    a pipe whose other end only the asking process holds; end-of-file means that process is gone, however
             it went. Then the server is ended, and the directory ``remove`` with it.
    stdout   {"pid": n} or {"error": text}, and at the end {"exit": code}, negative for a signal.

If this process itself is killed, Linux ends the server by the parent-death signal. On other systems, kill -9 of this
process leaves an orphan.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(spec: dict[str, Any]) -> int:
    """Start the server, and wait until it or the asking process ends. Returns this process's exit status."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    stopping: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    child = _start(spec)
    if child is None:
        return 1
    asked_to_end = False
    while child.poll() is None:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 512)
        if stopping or (0 in ready and not os.read(0, 512)):
            asked_to_end = True
            break
    if asked_to_end:
        _end(child, signal.Signals(spec["orphan_signal"]), wake_read, spec["orphan_grace"])
        if spec["remove"]:
            directory = Path(spec["remove"])
            shutil.rmtree(directory, ignore_errors=True)
            if directory.parent.name.startswith(spec["remove_parent_prefix"]):
                _remove_if_empty(directory.parent)
    _say({"exit": child.returncode})
    return 0


def _start(spec: dict[str, Any]) -> subprocess.Popen[bytes] | None:
    death_signal = int(spec["orphan_signal"])
    supervisor = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def bind_to_supervisor() -> None:
        # Runs in the child after the change of user, which would clear the setting.
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
            if os.getppid() != supervisor:
                os._exit(1)

    identity: dict[str, Any] = {}
    if spec["user"] is not None:
        identity = {"user": spec["user"][0], "group": spec["user"][1], "extra_groups": []}
    try:
        with Path(spec["log"]).open("ab") as log:
            child = subprocess.Popen(
                spec["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=spec["cwd"],
                preexec_fn=bind_to_supervisor,  # noqa: PLW1509 - there are no threads here
                **identity,
            )
    except (OSError, subprocess.SubprocessError) as error:
        _say({"error": str(error)})
        return None
    _say({"pid": child.pid})
    return child


def _end(child: subprocess.Popen[bytes], number: signal.Signals, wake_read: int, grace: float) -> None:
    """Signal the server to end, and kill it after ``grace`` seconds."""
    child.send_signal(number)
    deadline = time.monotonic() + grace
    while child.poll() is None:
        left = deadline - time.monotonic()
        if left <= 0:
            child.kill()
            child.wait()
            return
        if select.select([wake_read], [], [], left)[0]:
            os.read(wake_read, 512)


def _remove_if_empty(directory: Path) -> None:
    """Remove a directory that several servers share: the last one to go finds it empty."""
    try:
        directory.rmdir()
    except OSError:
        return


def _say(message: dict[str, Any]) -> None:
    """Write a message to the asking process, if it still exists."""
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        return


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
