"""A real Apache Kafka on loopback, one broker or three, without Docker. Needs Java 17 or newer.

``with KafkaCluster(brokers=3) as kafka:`` and give clients its ``bootstrap_servers``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final, Self

from outbox.sandbox import jars
from outbox.sandbox._broker import Broker, Node, Runtime, new_id
from outbox.sandbox._dirs import User, blocking_directory, make_directory, temporary_directory, unprivileged_user
from outbox.sandbox._ports import free_ports, listening
from outbox.sandbox._process import kill_with_children, pause, wait_for
from outbox.sandbox.errors import PortTaken, ServiceError, StartFailed, tail
from outbox.sandbox.java import java
from outbox.sandbox.versions import DEFAULT, jars_of

_START_TIMEOUT: Final = 90.0
_STOP_TIMEOUT: Final = 20.0
_PORT_ATTEMPTS: Final = 3
_HOST: Final = "127.0.0.1"


class KafkaCluster:
    """A cluster of nodes that are broker and controller at once (KRaft). Methods number them from 0.

    data_dir   None: a temporary directory, removed by ``close`` (or by leaving the ``with`` block), and brokers that
               end when this process does, even by kill -9. A given directory is kept, with its data, its ports, its
               number of brokers and its version; its brokers outlive this process, and ``start`` finds those that run
               already.
    brokers    1, or 3: replication factor 3, min.insync.replicas 2. None: as many as data_dir has, 1 if it is new.
    version    of Kafka, one of KAFKA_VERSIONS. None: that of data_dir; if it is new, $OUTBOX_KAFKA_VERSION or DEFAULT.
    settings   for server.properties; they override ours. Topics are not created automatically by default.
    heap       of each broker: the value of -Xmx.

    If we run as root, the brokers run as the user ``postgres`` or ``nobody``, unless that user can't reach Java or
    data_dir, which is said on standard error.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        brokers: int | None = None,
        settings: Mapping[str, str] | None = None,
        heap: str = "512m",
        version: str | None = None,
    ) -> None:
        if brokers not in {None, 1, 3}:
            raise ServiceError(f"brokers must be 1 or 3, not {brokers}")
        self._wanted_version = version
        self.version = version or os.environ.get("OUTBOX_KAFKA_VERSION") or DEFAULT
        """The version of Kafka; before the first start, the one that a new cluster gets."""
        jars_of(self.version)  # raises ServiceError if it is not one of ours
        self._temporary = data_dir is None
        if data_dir is None:
            data_dir = temporary_directory("kafka", unprivileged_user())
            self._cleanup = weakref.finalize(self, shutil.rmtree, data_dir, ignore_errors=True)
        self.data_dir = data_dir.absolute()
        if "," in str(self.data_dir):
            raise ServiceError(f"Kafka's directory must not contain a comma: {data_dir}")
        self._record = self.data_dir / "cluster.json"
        self._wanted_size = brokers
        self._settings = dict(settings or {})
        self._heap = heap
        self._brokers: list[Broker] = []
        self._cluster_id = ""
        self._found_runtime: Runtime | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The brokers' addresses, for ``bootstrap.servers``. Raises ServiceError before the first start."""
        if not self._brokers:
            raise ServiceError("this Kafka was never started, so it has no ports yet; call start()")
        return ",".join(f"{_HOST}:{broker.node.port}" for broker in self._brokers)

    @property
    def brokers(self) -> int:
        """The number of brokers in the cluster, running or not; 0 before the first start."""
        return len(self._brokers)

    @property
    def running(self) -> bool:
        return bool(self._brokers) and all(broker.running for broker in self._brokers)

    @property
    def pids(self) -> list[int]:
        return [broker.process.pid for broker in self._brokers if broker.running and broker.process is not None]

    @property
    def logs(self) -> list[Path]:
        return [broker.log for broker in self._brokers]

    def start(self) -> Self:
        """Start the brokers that don't run, and wait until all are in the cluster.

        Raises ServiceError without Java, ServiceError when the jars can't be downloaded, PortTaken when another
        process has a port of an earlier start, StartFailed with the ends of the logs when a broker does not become
        ready.
        """
        if self.running:
            return self
        known = bool(self._brokers) or self.attach()
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            if not known:
                self._invent()
            try:
                self._start_missing()
            except PortTaken:
                if not known:
                    self._forget()
                # The ports of a known cluster are fixed. Something may have held one for a moment, while a broker was
                # starting; whatever holds it for longer is found by the look before the next attempt.
                if attempt == _PORT_ATTEMPTS:
                    raise
            else:
                return self
        raise AssertionError("unreachable")

    def attach(self) -> bool:
        """Take over an existing cluster in data_dir, with its running brokers. Returns whether there is one.

        Raises ServiceError when its number of brokers or its version differs from the requested one, or its record
        can't be read.
        """
        try:
            record = json.loads(self._record.read_text())
            # By name: other versions may write more.
            nodes = [Node(node["number"], node["port"], node["controller_port"]) for node in record["nodes"]]
            cluster_id = record["cluster_id"]
            # Without one it is of the version that this package tests most, which may move with the package.
            version = record.get("kafka_version") or DEFAULT
        except FileNotFoundError:
            return False
        except (ValueError, LookupError, TypeError) as error:
            raise ServiceError(
                f"{self._record} is damaged or of another version ({type(error).__name__}: {error}); end its brokers, "
                f"if any run, and remove the directory {self.data_dir} for a new cluster"
            ) from error
        if self._wanted_size not in {None, len(nodes)}:
            raise ServiceError(
                f"the Kafka in {self.data_dir} has {len(nodes)} brokers, not {self._wanted_size}; request "
                f"{len(nodes)}, or remove the directory"
            )
        if self._wanted_version not in {None, version}:
            raise ServiceError(
                f"the Kafka in {self.data_dir} is {version}, not {self._wanted_version}; request {version}, or remove "
                "the directory"
            )
        self.version = version
        self._make(cluster_id, nodes)
        for broker in self._brokers:
            broker.adopt()
        return True

    def stop(self) -> None:
        """Stop all brokers at once and keep their data, so that ``start`` continues with them."""
        for broker in self._brokers:
            if broker.process is not None:
                broker.process.signal(signal.SIGCONT)
                broker.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT
        for broker in self._brokers:
            # The last broker may wait minutes for a controller, as the others are gone. Its log is on disk, so it is
            # killed.
            if broker.process is not None and not broker.process.wait(max(0.0, deadline - time.monotonic())):
                kill_with_children(broker.process)

    def close(self) -> None:
        """Stop the cluster; a temporary data directory is removed."""
        if self._temporary:
            self.kill()
            self._cleanup()
        else:
            self.stop()

    def kill(self) -> None:
        """Kill all brokers by SIGKILL, like a crash of the machine."""
        for index in range(len(self._brokers)):
            self.kill_broker(index)

    def kill_broker(self, index: int) -> None:
        process = self._broker(index).process
        if process is not None:
            kill_with_children(process)

    def start_broker(self, index: int) -> None:
        """Start a killed broker with its port and data, and wait until it is back in the cluster."""
        broker = self._broker(index)
        if not broker.running:
            self._check_ports([broker])
            broker.launch()
        self._wait_until_ready([broker], members=1)

    def pause_broker(self, index: int) -> None:
        """Halt a broker by SIGSTOP: its connections stay open, but it does not answer."""
        process = self._broker(index).process
        if process is None:
            raise ServiceError(f"broker {index} does not run, so it can't be paused; start it first")
        pause(process)

    def resume_broker(self, index: int) -> None:
        process = self._broker(index).process
        if process is not None:
            process.signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- making the nodes

    def _invent(self) -> None:
        """Define a new cluster on free ports."""
        size = self._wanted_size or 1
        ports = free_ports(2 * size)
        nodes = [Node(index + 1, ports[2 * index], ports[2 * index + 1]) for index in range(size)]
        cluster_id = "A" + new_id()[1:]  # the format tool would parse one with a - in front as an option
        if not self._temporary:
            # Before anything else, so that the next start resumes an interrupted one.
            make_directory(self.data_dir, unprivileged_user())
            record = {"cluster_id": cluster_id, "nodes": [asdict(node) for node in nodes]}
            if self.version != DEFAULT:
                record["kafka_version"] = self.version
            self._record.write_text(json.dumps(record))
        self._make(cluster_id, nodes)

    def _forget(self) -> None:
        """Drop a cluster that did not start, because its ports were taken."""
        self._record.unlink(missing_ok=True)
        for broker in self._brokers:
            shutil.rmtree(broker.directory, ignore_errors=True)
        self._brokers = []

    def _make(self, cluster_id: str, nodes: list[Node]) -> None:
        self._cluster_id = cluster_id
        self._brokers = [
            Broker(
                node,
                self.data_dir / f"broker-{node.number}",
                runtime=self._runtime,
                heap=self._heap,
                temporary=self.data_dir if self._temporary else None,
            )
            for node in nodes
        ]

    def _runtime(self) -> Runtime:
        if self._found_runtime is None:
            program, found, user = java(), jars.fetch(jars_of(self.version)), self._account()
            if user is not None:
                found = jars.readable(found, user)
            self._found_runtime = program, os.pathsep.join(str(jar) for jar in found), user
        return self._found_runtime

    def _account(self) -> User | None:
        """Return the account that the brokers run as; None: ours."""
        user = unprivileged_user()
        if user is None:
            return None
        make_directory(self.data_dir, user)
        blocked = blocking_directory(self.data_dir, user) or blocking_directory(java().resolve(), user)
        if blocked is None:
            return user
        print(f"Kafka runs as root: the user {user.name} can't pass {blocked}", file=sys.stderr, flush=True)
        return None

    def _properties(self, node: Node) -> dict[str, str]:
        voters = ",".join(f"{b.node.number}@{_HOST}:{b.node.controller_port}" for b in self._brokers)
        replicas = str(len(self._brokers))
        in_sync = "1" if len(self._brokers) == 1 else "2"
        advertised = f"PLAINTEXT://{_HOST}:{node.port}"
        return {
            "process.roles": "broker,controller",
            "node.id": str(node.number),
            "controller.quorum.voters": voters,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": f"{advertised},CONTROLLER://{_HOST}:{node.controller_port}",
            "advertised.listeners": advertised,
            "auto.create.topics.enable": "false",
            "num.partitions": "4",
            "default.replication.factor": replicas,
            "min.insync.replicas": in_sync,
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": in_sync,
            # 50 partitions each by default, which take seconds to create on a small machine.
            "offsets.topic.num.partitions": "6",
            "transaction.state.log.num.partitions": "6",
            "share.coordinator.state.topic.num.partitions": "3",
            "group.initial.rebalance.delay.ms": "0",
            # The default is a third of a small heap.
            "log.cleaner.dedupe.buffer.size": str(16 << 20),
            # A killed broker is readmitted when its old session has expired: nine seconds by default. Several brokers
            # on one busy machine need some slack, or a slow one is fenced.
            "broker.session.timeout.ms": "2000" if len(self._brokers) == 1 else "4000",
            "broker.heartbeat.interval.ms": "250" if len(self._brokers) == 1 else "500",
            # A single controller needs no proof of leadership: by default it writes one twice a second, which is a
            # quarter of an idle broker's CPU time.
            **({"metadata.max.idle.interval.ms": "0"} if len(self._brokers) == 1 else {}),
            # How long a broker waits for a halted controller: half a minute by default.
            "controller.socket.timeout.ms": "3000",
            **self._settings,
        }

    # -- starting them

    def _start_missing(self) -> None:
        missing = [broker for broker in self._brokers if not broker.running]
        self._check_ports(missing)
        for broker in missing:
            broker.prepare(self._cluster_id, self._properties(broker.node))
        try:
            for broker in missing:
                broker.launch()
            self._wait_until_ready(self._brokers, members=len(self._brokers))
        except BaseException:
            for broker in missing:
                if broker.process is not None:
                    kill_with_children(broker.process)
            raise

    def _check_ports(self, brokers: list[Broker]) -> None:
        for broker in brokers:
            for port in (broker.node.port, broker.node.controller_port):
                if listening(port):
                    raise PortTaken(
                        f"another process listens on port {port}, which belongs to broker {broker.node.number} of the "
                        f"Kafka in {self.data_dir}; end that process, or remove the directory for a new cluster"
                    )

    def _wait_until_ready(self, required: list[Broker], members: int) -> None:
        """Wait until each of these brokers answers, and sees itself among at least ``members`` nodes of our cluster."""

        def up_to_now() -> bool:
            for broker in required:
                if not broker.running:
                    raise self._ended(broker)
            return all(listening(broker.node.port) for broker in required)

        if wait_for(up_to_now, _START_TIMEOUT) and wait_for(
            lambda: up_to_now() and self._are_members(required, members), _START_TIMEOUT
        ):
            return
        logs = "\n".join(tail(broker.log) for broker in required)
        raise StartFailed(f"Kafka was not ready within {_START_TIMEOUT:g} s\n{logs}")

    def _are_members(self, required: list[Broker], members: int) -> bool:
        """Return whether they are members now. Raises PortTaken if another cluster answers."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        for broker in required:
            address = f"{_HOST}:{broker.node.port}"
            client = AdminClient({"bootstrap.servers": address, "log_level": 0, "socket.timeout.ms": 5000})
            try:
                seen = client.describe_cluster(request_timeout=5).result()
            except KafkaException:
                return False
            if seen.cluster_id != self._cluster_id:
                raise PortTaken(f"another Kafka, of the cluster {seen.cluster_id}, answers on {address}")
            if len(seen.nodes) < members or not any(node.id == broker.node.number for node in seen.nodes):
                return False
        return True

    def _ended(self, broker: Broker) -> StartFailed:
        logs = f"{tail(broker.output, 20)}\n{tail(broker.log)}"
        message = f"broker {broker.node.number} of the Kafka in {self.data_dir} ended while starting"
        if "Address already in use" in logs:
            return PortTaken(f"{message}: one of its ports was taken\n{logs}")
        return StartFailed(f"{message}\n{logs}")

    def _broker(self, index: int) -> Broker:
        if not 0 <= index < len(self._brokers):
            raise ServiceError(f"there is no broker {index}; the cluster has {len(self._brokers)}, counted from 0")
        return self._brokers[index]
