"""Kafka Connect with Debezium's Postgres connector: a worker on loopback, from the jars in jars.lock.

The tests in this folder and the benchmarks run it.
``python tests/peers/connect.py lock`` writes jars.lock anew.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from outbox.sandbox import jars
from outbox.sandbox._ports import free_ports
from outbox.sandbox._process import Supervised, kill_with_children, wait_for
from outbox.sandbox.errors import ServiceError, StartFailed, tail
from outbox.sandbox.java import java
from release.jars import Roots, resolve

LOCK: Final = Path(__file__).with_name("jars.lock")
CONNECT: Final = "connect"
LOGGING: Final = "logging"
DEBEZIUM: Final = "debezium"

_KAFKA: Final = "4.3.1"
_DEBEZIUM: Final = "3.7.0.Final"

ROOTS: Final[Roots] = {
    CONNECT: (
        True,
        (
            f"org.apache.kafka:connect-runtime:{_KAFKA}",
            f"org.apache.kafka:connect-json:{_KAFKA}",
            f"org.apache.kafka:connect-transforms:{_KAFKA}",
            f"org.apache.kafka:kafka-clients:{_KAFKA}",
        ),
    ),
    # Apart: what log4j depends on would manage the versions of Connect's libraries down.
    LOGGING: (
        False,
        (
            "org.apache.logging.log4j:log4j-api:2.25.4",
            "org.apache.logging.log4j:log4j-core:2.25.4",
            "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
        ),
    ),
    # A plugin has a class loader of its own, which looks into the worker's jars only for what the plugin lacks. So
    # these are named one by one: what Connect has itself, Kafka's clients above all, does not belong there.
    DEBEZIUM: (
        False,
        (
            f"io.debezium:debezium-api:{_DEBEZIUM}",
            f"io.debezium:debezium-config:{_DEBEZIUM}",
            f"io.debezium:debezium-connect-plugins:{_DEBEZIUM}",
            f"io.debezium:debezium-connector-common:{_DEBEZIUM}",
            f"io.debezium:debezium-connector-postgres:{_DEBEZIUM}",
            f"io.debezium:debezium-openlineage-api:{_DEBEZIUM}",
            f"io.debezium:debezium-util:{_DEBEZIUM}",
            "com.datadoghq:sketches-java:0.8.2",
            "com.fasterxml.jackson.core:jackson-annotations:2.21",
            "com.fasterxml.jackson.core:jackson-core:2.21.2",
            "com.fasterxml.jackson.core:jackson-databind:2.21.2",
            "com.fasterxml.jackson.datatype:jackson-datatype-jsr310:2.21.2",
            "com.google.protobuf:protobuf-java:3.25.5",
            "org.postgresql:postgresql:42.7.13",
        ),
    ),
}

_START_TIMEOUT: Final = 90.0
_STOP_TIMEOUT: Final = 30.0
_HOST: Final = "127.0.0.1"

_LOGGING: Final = """\
<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="WARN">
  <Appenders>
    <Console name="console"><PatternLayout pattern="%d{ISO8601} %p [%t] %c{1}: %m%n"/></Console>
  </Appenders>
  <Loggers>
    <Root level="INFO"><AppenderRef ref="console"/></Root>
    <Logger name="org.apache.kafka.common.config" level="WARN"/>
    <Logger name="org.apache.kafka.clients" level="WARN"/>
    <Logger name="org.apache.kafka.connect.runtime.isolation" level="WARN"/>
  </Loggers>
</Configuration>
"""


class Worker:
    """A Connect worker in ``directory``. It ends with this process, also by kill -9.

    What a connector sets itself (converters, transforms) is not set here: the worker has Connect's defaults.

    heap         as -Xmx takes it.
    group        None: a standalone worker. Otherwise a distributed one, alone in this group, which keeps its state in
                 topics that begin with the group's name and allows exactly-once delivery by connectors.
    properties   of the worker, over those set here.
    """

    def __init__(
        self,
        directory: Path,
        bootstrap_servers: str,
        *,
        heap: str = "512m",
        group: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._bootstrap_servers = bootstrap_servers
        self._heap = heap
        self._group = group
        self._properties = dict(properties or {})
        (self._port,) = free_ports(1)
        self.log = directory / "connect.log"
        self._process: Supervised | None = None

    @property
    def running(self) -> bool:
        """Return whether its process is there."""
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int:
        """Its process id. Raises ServiceError before the first start."""
        if self._process is None:
            raise ServiceError("this Kafka Connect was never started, so it has no process; call start()")
        return self._process.pid

    def start(self) -> Self:
        """Start it and wait until it answers."""
        plugin = self._directory / "plugins" / "debezium"
        plugin.mkdir(parents=True, exist_ok=True)
        for jar in jars.fetch(DEBEZIUM, lock=LOCK):
            link = plugin / jar.name
            link.unlink(missing_ok=True)
            link.symlink_to(jar)
        properties = {
            "bootstrap.servers": self._bootstrap_servers,
            "listeners": f"http://{_HOST}:{self._port}",
            "plugin.path": str(plugin.parent),
            "plugin.discovery": "service_load",
            # A minute by default: how long the slot stays behind what is acknowledged.
            "offset.flush.interval.ms": "1000",
            "key.converter": "org.apache.kafka.connect.json.JsonConverter",
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
            **self._storage(),
            **self._properties,
        }
        file = self._directory / "worker.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        logging = self._directory / "log4j2.xml"
        logging.write_text(_LOGGING)
        worker_jars = [*jars.fetch(CONNECT, lock=LOCK), *jars.fetch(LOGGING, lock=LOCK)]
        class_path = os.pathsep.join(str(jar) for jar in worker_jars)
        self._process = Supervised(
            [
                *(str(java()), f"-Xmx{self._heap}", "-XX:+UseSerialGC", "-Djava.awt.headless=true"),
                *(f"-Dlog4j2.configurationFile={logging}", "-cp", class_path),
                f"org.apache.kafka.connect.cli.Connect{'Standalone' if self._group is None else 'Distributed'}",
                str(file),
            ],
            log=self.log,
            env={name: value for name, value in os.environ.items() if not name.startswith(("KAFKA_", "CONNECT_"))},
            cwd=self._directory,
        )
        ready = wait_for(lambda: not self.running or self._answers(), _START_TIMEOUT, every=0.1)
        if not ready or not self.running:
            self.kill()
            raise StartFailed(f"Kafka Connect was not ready within {_START_TIMEOUT:g} s\n{tail(self.log)}")
        return self

    def stop(self) -> None:
        """End the worker as an operator would (SIGTERM): its connectors stop and keep their offsets."""
        if self._process is not None:
            self._process.signal(signal.SIGTERM)
            if not self._process.wait(_STOP_TIMEOUT):
                kill_with_children(self._process)

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            kill_with_children(self._process)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- what an operator does, over REST

    def create(self, name: str, config: Mapping[str, str]) -> None:
        """Create a connector, and start it."""
        self._ask("PUT", f"/connectors/{name}/config", dict(config))

    def delete(self, name: str) -> None:
        """Remove a connector and what is known of its offsets."""
        with contextlib.suppress(Refused):
            self.stop_connector(name)
            self.forget_offsets(name)
            self._ask("DELETE", f"/connectors/{name}")

    def stop_connector(self, name: str) -> None:
        """Stop a connector, and wait until its task is gone. It is still there, with its offsets."""
        self._ask("PUT", f"/connectors/{name}/stop")
        stopped = wait_for(lambda: self.state(name) == ("STOPPED", []), _STOP_TIMEOUT)
        if not stopped:
            raise ServiceError(f"the connector {name} does not stop: {self.state(name)}\n{tail(self.log)}")

    def resume_connector(self, name: str) -> None:
        """Let a stopped connector go on."""
        self._ask("PUT", f"/connectors/{name}/resume")

    def forget_offsets(self, name: str) -> None:
        """Remove the offsets of a stopped connector."""
        self._ask("DELETE", f"/connectors/{name}/offsets")

    def offsets(self, name: str) -> list[dict[str, Any]]:
        """Return the offsets of a connector."""
        return [entry["offset"] for entry in self._ask("GET", f"/connectors/{name}/offsets")["offsets"]]

    def state(self, name: str) -> tuple[str, list[str]]:
        """Return the states of a connector and of its tasks. Raises ServiceError when a task has failed."""
        status = self._ask("GET", f"/connectors/{name}/status")
        for task in [status["connector"], *status["tasks"]]:
            if task["state"] == "FAILED":
                raise ServiceError(f"the connector {name} failed: {task['trace']}")
        return status["connector"]["state"], [task["state"] for task in status["tasks"]]

    def _storage(self) -> dict[str, str]:
        """Return where the worker keeps offsets, and if it is a distributed one, all it needs to be that."""
        if self._group is None:
            return {"offset.storage.file.filename": str(self._directory / "offsets")}
        topics = {f"{what}.storage.topic": f"{self._group}-{what}" for what in ("config", "offset", "status")}
        replication = {f"{what}.storage.replication.factor": "1" for what in ("config", "offset", "status")}
        partitions = {"offset.storage.partitions": "1", "status.storage.partitions": "1"}
        return {
            "group.id": self._group,
            "exactly.once.source.support": "enabled",
            **topics,
            **replication,
            **partitions,
        }

    def _answers(self) -> bool:
        try:
            return isinstance(self._ask("GET", "/connectors"), list)
        except (OSError, http.client.HTTPException, Refused):
            return False

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 300:
            raise Refused(f"{method} {path}: {answer.status} {text}")
        return json.loads(text) if text else None


class Refused(ServiceError):
    """Connect answers, but does not do it."""


def main(arguments: list[str]) -> int:
    if arguments != ["lock"]:
        print("usage: python tests/peers/connect.py lock", file=sys.stderr)
        return 2
    heading = (
        "What Kafka Connect and Debezium are run from: Maven coordinates, SHA-256, size in bytes.",
        "Written by: python tests/peers/connect.py lock",
    )
    LOCK.write_text(resolve(ROOTS, heading))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
