"""A real Spark standalone cluster on loopback: a master and two workers, each with a core, as processes of our own."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any, Self

import psutil
import pyspark
from support import wait_until

from outbox.sandbox._ports import free_ports
from outbox.sandbox._process import Supervised

HOME = Path(pyspark.__file__).parent
# Spark starts the second attempt of a slow task on another host only: each worker has an address of its own.
_ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Cluster:
    """``url`` is Spark's master. Inside a ``with`` block both workers are alive, and nothing is left after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rpc, self._web, *self._worker_ports = free_ports(6)
        self.url = f"spark://127.0.0.1:{rpc}"
        self._rpc = rpc
        self._processes: list[Supervised] = []

    def __enter__(self) -> Self:
        try:
            self._start("master", "127.0.0.1", "master.Master", "--port", self._rpc, "--webui-port", self._web)
            wait_until(lambda: self.state() is not None, 120, "the master to answer")
            ports = iter(self._worker_ports)
            for number, address in enumerate(_ADDRESSES):
                sizes = ["--cores", 1, "--memory", "1g", "--work-dir", self.folder / f"work{number}"]
                where = ["--port", next(ports), "--webui-port", next(ports)]
                self._start(f"worker{number}", address, "worker.Worker", *where, *sizes, self.url)
            wait_until(lambda: self.alive() == len(_ADDRESSES), 120, "both workers to be alive")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            for executor in self._children(process):
                executor.kill()
            process.signal(signal.SIGKILL)
            process.wait(30)

    def state(self) -> dict[str, Any] | None:
        """What the master says of itself, None while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._web}/json/", timeout=10) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None  # it does not listen, or has not yet put its pages up

    def alive(self) -> int:
        """How many workers the master counts as alive."""
        state = self.state() or {}
        return sum(worker["state"] == "ALIVE" for worker in state.get("workers", []))

    def executors(self) -> list[psutil.Process]:
        """The executors' JVMs."""
        return [executor for process in self._processes[1:] for executor in self._children(process)]

    def _children(self, process: Supervised) -> list[psutil.Process]:
        try:
            children = psutil.Process(process.pid).children(recursive=True)
            return [child for child in children if _is_executor(child)]
        except psutil.NoSuchProcess:
            return []

    def _start(self, name: str, address: str, kind: str, *arguments: object) -> None:
        folder = self.folder / name
        folder.mkdir()
        program = [HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{kind}", "--host", address, *arguments]
        # The executors import what is installed and what spark-submit sends, and nothing else.
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "OUTBOX_"))}
        env |= {"SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": address, "SPARK_DAEMON_MEMORY": "256m"}
        env |= {"SPARK_NO_DAEMONIZE": "1", "SPARK_LOCAL_DIRS": str(folder)}
        log = self.folder / f"{name}.log"
        self._processes.append(Supervised(list(map(str, program)), log=log, env=env, cwd=folder))


def _is_executor(process: psutil.Process) -> bool:
    try:
        return any("CoarseGrainedExecutorBackend" in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
