"""One Kafka node: its files and its process. kafka.py decides which nodes there are and when they are ready."""

from __future__ import annotations

import base64
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from outbox.sandbox._dirs import User, hand_over, make_directory
from outbox.sandbox._process import Detached, Supervised, completed
from outbox.sandbox.errors import StartFailed

_LOGGING: Final = """\
<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="WARN">
  <Appenders>
    <RollingFile name="file" fileName="{log}" filePattern="{log}.%i">
      <PatternLayout pattern="%d{{ISO8601}} %p [%t] %c{{1}}: %m%n"/>
      <Policies><SizeBasedTriggeringPolicy size="20 MB"/></Policies>
      <DefaultRolloverStrategy max="2"/>
    </RollingFile>
  </Appenders>
  <Loggers>
    <Root level="INFO"><AppenderRef ref="file"/></Root>
    <Logger name="org.apache.kafka.common.config" level="WARN"/>
    <Logger name="kafka.server.KafkaConfig" level="WARN"/>
  </Loggers>
</Configuration>
"""

_JVM: Final = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
    # Fail visibly instead of going on in a broken state.
    "-XX:+ExitOnOutOfMemoryError",
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node's number and its ports on 127.0.0.1."""

    number: int
    port: int
    controller_port: int


Runtime = tuple[Path, str, User | None]
"""The Java program, the class path, and the account that runs them; None: ours."""


class Broker:
    """A node that is broker and controller at once, in a directory of its own.

    runtime     returns what runs; called only when needed, as it may download the jars.
    heap        the value of -Xmx.
    temporary   the directory that is removed when we die, together with the broker. None: it outlives this process.
    """

    def __init__(
        self, node: Node, directory: Path, *, runtime: Callable[[], Runtime], heap: str, temporary: Path | None
    ) -> None:
        self.node = node
        self.directory = directory
        self._runtime = runtime
        self._heap = heap
        self._temporary = temporary
        self.process: Supervised | Detached | None = None  # started or found last
        self.log = directory / "logs" / "server.log"
        self.output = directory / "output.log"
        self._properties = directory / "server.properties"
        self._logging = directory / "log4j2.xml"
        self._data = directory / "data"

    @property
    def running(self) -> bool:
        """Return whether its process exists (it may be paused)."""
        return self.process is not None and self.process.running

    def prepare(self, cluster_id: str, properties: Mapping[str, str]) -> None:
        """Write the configuration, and format the storage unless it is formatted."""
        make_directory(self.directory, self._runtime()[2])
        data = self._data
        lines = [f"{name}={_escaped(value)}\n" for name, value in {**properties, "log.dirs": str(data)}.items()]
        self._properties.write_text("".join(lines))
        self._logging.write_text(_LOGGING.format(log=escape(str(self.log), {'"': "&quot;"})))
        if (data / "meta.properties").exists():
            return
        shutil.rmtree(data, ignore_errors=True)  # left by an interrupted format
        # The formatted storage depends on the settings, but not on the node: one program start for a cluster, not
        # three.
        key = (self._runtime()[1], tuple(sorted(item for item in properties.items() if item[0] not in _NODE_SETTINGS)))
        found = _formatted.get(key)
        if found is None:
            self._format(cluster_id)
            _formatted[key] = {path.name: path.read_bytes() for path in data.iterdir() if path.is_file()}
            return
        new = self.directory / "formatting"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for name, content in found.items():
            (new / name).write_bytes(content)
        own = {"version": "1", "cluster.id": cluster_id, "node.id": str(self.node.number), "directory.id": new_id()}
        (new / "meta.properties").write_text("".join(f"{name}={value}\n" for name, value in own.items()))
        new.rename(data)

    def _hand_over(self) -> None:
        """Let the account that the broker runs as have its files. Their directory stays ours, as we write into it."""
        for directory in (self._data, self.log.parent):
            directory.mkdir(exist_ok=True)
        for path in (self._properties, self._logging, self._data, self.log.parent):
            hand_over(path, self._runtime()[2])

    def _format(self, cluster_id: str) -> None:
        self._hand_over()
        java, class_path, user = self._runtime()
        arguments = ("format", "--config", str(self._properties), "--cluster-id", cluster_id)
        jvm = (java, "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", class_path)
        result = completed([*jvm, "-Dlog4j2.level=ERROR", "kafka.tools.StorageTool", *arguments], user)
        if result.returncode != 0:
            output = result.stdout + result.stderr
            raise StartFailed(f"formatting the storage of broker {self.node.number} failed:\n{output}")

    def launch(self) -> None:
        """Start the process; it is not ready yet. Raises StartFailed when it can't be executed."""
        self._hand_over()
        java, class_path, user = self._runtime()
        argv = [
            *(str(java), f"-Xmx{self._heap}", f"-Xms{self._heap}", *_JVM),
            *(f"-Dlog4j2.configurationFile={self._logging}", "-cp", class_path),
            *("kafka.Kafka", str(self._properties)),
        ]
        # Variables that a user set for another Kafka do not apply to this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KAFKA_")}
        if self._temporary is None:
            self.process = Detached.start(argv, log=self.output, env=environment, user=user)
        else:
            self.process = Supervised(
                argv, log=self.output, env=environment, cwd=self.directory, user=user, remove=self._temporary
            )

    def adopt(self) -> bool:
        """Find the process that an earlier command started here. Returns whether there is one."""
        self.process = Detached.find("kafka.Kafka", str(self._properties))
        return self.process is not None


_formatted: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, bytes]] = {}
"""The files of formatted storage, by class path and settings."""

_NODE_SETTINGS: Final = ("node.id", "listeners", "advertised.listeners", "controller.quorum.voters")


def new_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _escaped(value: str) -> str:
    """Return a value escaped for java.util.Properties, which reads a file as Latin-1."""
    units = value.replace("\\", "\\\\").replace("\n", "\\n").encode("utf-16-be")
    codes = (int.from_bytes(units[i : i + 2]) for i in range(0, len(units), 2))
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)
