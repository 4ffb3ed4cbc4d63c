"""A real Spark standalone cluster on loopback: a master and two workers, each with a core, in one JVM of our own.

Each would take a JVM, and another one to find its options; what the tests kill are the executors, which have theirs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pyspark
from py4j.java_gateway import GatewayParameters, JavaGateway
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
        self._rpc, self._web, self._gateway, *self._worker_ports = free_ports(7)
        self.url = f"spark://127.0.0.1:{self._rpc}"
        self._process: Supervised | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
            wait_until(self._answers, 120, "the JVM to answer")
            gateway = JavaGateway(gateway_parameters=GatewayParameters(port=self._gateway, auto_convert=True))
            try:
                self._deploy(gateway)
            finally:
                gateway.close()
            wait_until(lambda: self.alive() == len(_ADDRESSES), 120, "both workers to be alive")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            for executor in self.executors():
                executor.kill()
            self._process.signal(signal.SIGKILL)
            self._process.wait(30)

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
        assert self._process is not None
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if _is_executor(child)]

    def _start(self) -> None:
        # The executors import what is installed and what spark-submit sends, and nothing else.
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "OUTBOX_"))}
        env |= {"SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": _ADDRESSES[0], "SPARK_DRIVER_MEMORY": "512m"}
        env |= {"SPARK_LOCAL_DIRS": str(self.folder)}
        program = [str(HOME / "bin" / "spark-class"), "py4j.GatewayServer", str(self._gateway)]
        self._process = Supervised(program, log=self.folder / "cluster.log", env=env, cwd=self.folder)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._gateway), 10):
            return True
        return False

    def _deploy(self, gateway: JavaGateway) -> None:
        """Start the master and the workers, as their own programs do."""
        deploy = gateway.jvm.org.apache.spark.deploy
        conf = gateway.jvm.org.apache.spark.SparkConf()
        deploy.master.Master.startRpcEnvAndEndpoint(_ADDRESSES[0], self._rpc, self._web, conf)
        masters = gateway.new_array(gateway.jvm.java.lang.String, 1)
        masters[0] = self.url
        nothing = gateway.jvm.scala.Option.empty()
        ports = iter(self._worker_ports)
        for number, address in enumerate(_ADDRESSES):
            where, sizes, folder = (address, next(ports), next(ports)), (1, 1024), str(self.folder / f"work{number}")
            name = gateway.jvm.scala.Some(number)
            deploy.worker.Worker.startRpcEnvAndEndpoint(*where, *sizes, masters, folder, name, conf, nothing)


def _is_executor(process: psutil.Process) -> bool:
    try:
        return any("CoarseGrainedExecutorBackend" in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
