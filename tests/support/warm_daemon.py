"""Spark's daemons of Python workers, with what our tasks import loaded before they fork them: for tests only.

A worker that has failed is not used again, and tests make tasks fail by the hundred: each would import pyarrow, pandas
and psycopg anew, a second of processor time. Spark's own daemon loads nothing, as there are modules that start threads
when they are imported, and threads do not come along into a fork. These start none, as they are told here.

Spark has a daemon for each kind of worker, half a dozen of them. They are forked too, from one process that has loaded
everything (``serving``): what Spark has started hands over its arguments, environment and standard streams on a socket,
and stays until the fork has ended, because Spark watches it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SOCKET = "TEST_WARM_DAEMON"
"""The variable that daemons find the socket by."""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Start the process that daemons are forked from; gives its socket. It ends with the block, or with this one."""
    with tempfile.TemporaryDirectory(prefix="outbox-daemon-") as folder:
        path = str(Path(folder, "socket"))
        # As Spark starts its daemons: what is fixed when an interpreter starts.
        environment = os.environ | {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "warm_daemon", "serve", path]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True):
            yield path


def _load() -> None:
    # Such threads would be those of numpy's OpenBLAS, and the one that tidies up for Arrow's jemalloc.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

    # Spark puts an archive of pyspark's sources, and a jar, before what is installed: each daemon would compile them,
    # and Python 3.11 lists all of them again for each new worker, once for each of their folders.
    sys.path[:] = [path for path in sys.path if _wanted(path)]
    sys.path_importer_cache.clear()

    for name in (
        *("numpy", "pandas", "psycopg", "psycopg_binary", "pyarrow", "pyarrow.compute", "pyarrow.json", "orjson"),
        *("pyarrow.pandas_compat", "concurrent.futures.thread"),
        *("pyspark.worker", "pyspark.sql.types", "pyspark.sql.pandas.serializers", "pyspark.sql.pandas.types"),
        *("pyspark.sql.worker.write_into_data_source", "pyspark.sql.worker.python_streaming_sink_runner"),
        *("spark_jobs.task.partition", "spark_jobs.task.incoming", "spark_jobs.task.accumulators"),
        *("spark_jobs.payloads.json_text", "spark_jobs.payloads.json_whole", "spark_jobs.payloads.json_output"),
        *("spark_jobs.postgres.sink", "spark_jobs.dedup.processed", "spark_jobs.order_totals"),
        *("spark_jobs.driver.outbox_sink", "outbox._app.settings"),
        # A function of a test comes by its name: its worker imports the test's module, and that imports these.
        *("pytest", "bench"),
    ):
        importlib.import_module(name)

    # Each worker looks through its memory once before it begins, and need not look through this.
    gc.collect()
    gc.freeze()

    # Only Linux tells.
    if (threads := Path("/proc/self/task")).exists():
        assert len(list(threads.iterdir())) == 1, "a module has started a thread"


def _wanted(path: str) -> bool:
    return not path.endswith((".zip", ".jar"))


def _serve(path: str) -> list[str]:
    """Fork a daemon for each that asks. Returns in these, with their arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        while True:
            ready, _, _ = select.select([0, listening], [], [])
            if 0 in ready:
                # Who has started this is gone, or needs no more daemons.
                os._exit(0)
            asking, _ = listening.accept()
            text, streams, _, _ = socket.recv_fds(asking, 1 << 16, 3)
            while not text.endswith(b"\n"):
                text += asking.recv(1 << 16)
            if os.fork() == 0:
                # As long as it is open, who has asked is there.
                asking.detach()
                return _become(json.loads(text), streams)
            for one in (*streams, asking.fileno()):
                os.close(one)
            asking.detach()


def _become(asked: dict[str, object], streams: list[int]) -> list[str]:
    """Make a fork what it would be had Spark started it. Gives its arguments."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment = dict(asked["environment"])  # type: ignore[call-overload]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(asked["folder"]))
    given = filter(_wanted, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [path for path in given if path and path not in sys.path]
    return list(asked["arguments"])  # type: ignore[call-overload]


def _ask(path: str) -> None:
    """Have a daemon forked, and wait for its end."""
    asked = {"arguments": sys.argv, "environment": dict(os.environ), "folder": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX) as asking:
        deadline = time.monotonic() + 120
        # It may still be loading.
        while asking.connect_ex(path):
            assert time.monotonic() < deadline, "nobody forks daemons"
            time.sleep(0.01)
        text = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(asking, [text], [0, 1, 2])
        asking.sendall(text[sent:])
        asking.recv(1)


def main() -> None:
    """Be a daemon, ask for one, or be where they come from."""
    if sys.argv[1:2] != ["serve"] and SOCKET in os.environ:
        return _ask(os.environ[SOCKET])
    _load()
    if sys.argv[1:2] == ["serve"]:
        sys.argv = _serve(sys.argv[2])
    from pyspark.daemon import manager

    return manager()


if __name__ == "__main__":
    main()
