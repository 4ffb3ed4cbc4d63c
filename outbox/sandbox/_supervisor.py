"""Runs one server for as long as the process that asked for it lives, so that kill -9 leaves no orphan.

Started as a script (standard library only, so that it starts in milliseconds) with one argument, a JSON object;
``_process.Supervised`` is the other end. The server gets this process's environment. The protocol:

    stdin    a pipe whose other end only the asking process holds. At end-of-file that process is gone, however it
             ended: the server is ended too, and the directory ``remove`` is removed.
    stdout   {"pid": n} or {"error": text}, and at the end {"exit": code}, negative for a signal.

If this process itself is killed, Linux ends the server by the parent-death signal. On other systems, kill -9 of this
process leaves an orphan.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 5.0


def main(spec: dict[str, Any]) -> int:
    """Start the server, and wait until it or the asking process ends. Returns this process's exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    child = _start(spec)
    if child is None:
        return 1
    ending = threading.Event()

    def end(*_: object) -> None:
        ending.set()
        child.send_signal(spec["orphan_signal"])
        kill = threading.Timer(_GRACE_SECONDS, child.kill)
        kill.daemon = True
        kill.start()

    def end_at_end_of_file() -> None:
        # Not through sys.stdin, whose lock would be held when this process exits.
        while os.read(0, 512):
            pass
        end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=end_at_end_of_file, daemon=True).start()
    child.wait()
    if ending.is_set() and spec["remove"]:
        # Several servers may share the directory: the last one to end finds it unused.
        shutil.rmtree(spec["remove"], ignore_errors=True)
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

    try:
        with Path(spec["log"]).open("ab") as log:
            child = subprocess.Popen(
                spec["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=spec["cwd"],
                preexec_fn=bind_to_supervisor,  # noqa: PLW1509 - there are no threads yet
                **spec["identity"],
            )
    except (OSError, subprocess.SubprocessError) as error:
        _say({"error": str(error)})
        return None
    _say({"pid": child.pid})
    return child


def _say(message: dict[str, Any]) -> None:
    """Write a message to the asking process, if it still exists."""
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        return


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
