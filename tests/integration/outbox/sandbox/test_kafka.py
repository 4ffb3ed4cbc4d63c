"""KafkaCluster: real brokers that are started, killed, paused and found to be ours."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource

from outbox.sandbox import jars
from outbox.sandbox import java as java_module
from outbox.sandbox import kafka as kafka_module
from outbox.sandbox._broker import Broker
from outbox.sandbox._dirs import unprivileged_user
from outbox.sandbox._ports import free_ports
from outbox.sandbox.errors import PortTaken, ServiceError, StartFailed
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.versions import DEFAULT, KAFKA_VERSIONS, jars_of
from outbox.testing.fixtures import Topics
from relay.operations.doctor import kafka as doctor_kafka


@dataclass(frozen=True)
class Solo:
    cluster: KafkaCluster
    taken: int
    """A port that was offered to it and that somebody else had."""

    @property
    def controller_port(self) -> int:
        return int(json.loads((self.cluster.data_dir / "cluster.json").read_text())["nodes"][0]["controller_port"])


@pytest.fixture(scope="module")
def solo() -> Iterator[Solo]:
    """One broker, in a directory that every user can reach and that is kept. Its first pick of ports went wrong."""
    parent = Path(tempfile.mkdtemp(prefix="outbox-test-"))
    parent.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.MonkeyPatch.context() as patch:
        taken = other.getsockname()[1]
        offers = iter([[free_ports(1)[0], taken], free_ports(2)])
        patch.setattr(kafka_module, "free_ports", lambda _: next(offers))
        # The look before the start would notice: here the port is taken between that look and the start.
        patch.setattr(KafkaCluster, "_check_ports", lambda *_: None)
        cluster = KafkaCluster(parent / "below" / 'a "place" & <é> 😀').start()
    yield Solo(cluster, taken)
    cluster.close()
    shutil.rmtree(parent)


def admin(cluster: KafkaCluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})


def produce(cluster: KafkaCluster, topic: str, values: range) -> None:
    """With acks=all and idempotence, each value acknowledged."""
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap_servers, "enable.idempotence": True, "log_level": 0, "linger.ms": 0}
    )
    failed: list[object] = []
    for number in values:
        producer.produce(
            topic, str(number).encode(), on_delivery=lambda error, _: failed.append(error) if error else None
        )
    assert producer.flush(60) == 0
    assert failed == []


def values(messages: list) -> list[int]:
    return sorted(int(message.value()) for message in messages)


def test_ports_that_were_taken_meanwhile_were_replaced(solo: Solo) -> None:
    client = admin(solo.cluster)
    (node,) = client.describe_cluster().result().nodes
    assert solo.cluster.bootstrap_servers == f"{node.host}:{node.port}"
    assert solo.taken not in {node.port, solo.controller_port}


def test_a_paused_broker_is_there_and_does_not_answer(solo: Solo) -> None:
    client = admin(solo.cluster)
    assert client.list_topics(timeout=30).brokers
    solo.cluster.pause_broker(0)
    try:
        assert solo.cluster.running
        # What a client says of silence differs.
        with pytest.raises(KafkaException, match=r"Timed out|transport failure"):
            client.list_topics(timeout=0.5)
    finally:
        solo.cluster.resume_broker(0)
    assert client.list_topics(timeout=30).brokers


def dropped(cluster: KafkaCluster) -> int:
    """The user that the broker runs as, who is not root and has no group of root's."""
    [pid] = cluster.pids
    process = psutil.Process(pid)
    ids = {*process.uids(), *process.gids()}
    assert 0 not in ids
    return process.uids().real


def leave_as_roots(cluster: KafkaCluster, file: Path) -> None:
    """Make all of its directory root's, as an earlier version did, and link a file in it."""
    [logs] = (log.parent for log in cluster.logs)
    (logs / "link").symlink_to(file)
    for path in cluster.data_dir.rglob("*"):
        os.lchown(path, 0, 0)


def test_after_a_kill_a_given_directory_goes_on_with_its_data_on_its_ports(
    solo: Solo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Root drops to a user who owns the data: who gets what an earlier version has left as root's, but not what links
    in it lead to.
    """
    directory, addresses, pids = solo.cluster.data_dir, solo.cluster.bootstrap_servers, solo.cluster.pids
    is_root, ours = os.geteuid() == 0, tmp_path / "ours"
    ours.touch()
    user = dropped(solo.cluster) if is_root else None
    topics = Topics(addresses)
    topic = topics.create_topic(topics.name("orders"), partitions=2)
    produce(solo.cluster, topic, range(100))
    solo.cluster.kill_broker(0)
    assert (solo.cluster.running, solo.cluster.pids) == (False, [])
    if is_root:
        leave_as_roots(solo.cluster, ours)

    with pytest.raises(ServiceError, match="has 1 brokers, not 3"):
        KafkaCluster(directory, brokers=3).start()
    taken = int(addresses.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", taken)):
        with pytest.raises(PortTaken, match=rf"listens on port {taken}, which belongs to broker 1"):
            solo.cluster.start()

    # Something else has the port for a moment, after the look and while the broker starts.
    look, held = KafkaCluster._check_ports, []

    def looked(cluster: KafkaCluster, brokers: list[Broker]) -> None:
        if held:
            held[0].close()
        look(cluster, brokers)
        if not held:
            held.append(socket.create_server(("127.0.0.1", taken)))

    monkeypatch.setattr(KafkaCluster, "_check_ports", looked)
    with KafkaCluster(directory) as again:
        assert held
        assert again.bootstrap_servers == addresses
        assert again.pids != pids
        assert values(topics.consume(topic)) == list(range(100))
        if is_root:
            assert dropped(again) == user
            [data] = directory.glob("broker-1/data")
            assert {path.stat().st_uid for path in (data, *data.rglob("*"))} == {user}
            assert (ours.stat().st_uid, (directory / "broker-1").stat().st_uid) == (0, 0)
    assert directory.exists()
    assert not again.running


def test_a_directory_of_an_older_version_goes_on(tmp_path: Path) -> None:
    node = {"number": 1, "port": 9001, "controller_port": 9002, "proxied_port": None}
    (tmp_path / "cluster.json").write_text(json.dumps({"cluster_id": "A", "nodes": [node], "version": 0}))
    cluster = KafkaCluster(tmp_path)
    assert cluster.attach()
    assert (cluster.bootstrap_servers, cluster.running) == ("127.0.0.1:9001", False)


def test_another_version_is_started_and_its_directory_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KafkaCluster(tmp_path, version="4.4.0") as cluster:
        broker = ConfigResource(ConfigResource.Type.BROKER, "1")
        client = admin(cluster)
        (described,) = client.describe_configs([broker]).values()
        assert doctor_kafka._SINCE_4_3 in described.result()

        monkeypatch.setenv("OUTBOX_KAFKA_VERSION", "4.0.2")
        for version in ("4.0.2", DEFAULT):
            with pytest.raises(ServiceError, match=rf"is 4\.4\.0, not {version}; request 4\.4\.0, or remove"):
                KafkaCluster(tmp_path, version=version).start()
        again = KafkaCluster(tmp_path)
        assert again.version == "4.0.2"
        assert again.attach()
        assert (again.version, again.running) == ("4.4.0", True)

    with pytest.raises(ServiceError, match=rf"no jars of Kafka '4\.2', only of .*{DEFAULT}, .*: choose one"):
        KafkaCluster(version="4.2")
    node = {"number": 1, "port": 9001, "controller_port": 9002}
    (tmp_path / "cluster.json").write_text(json.dumps({"cluster_id": "A", "nodes": [node], "kafka_version": "2.8.2"}))
    gone = KafkaCluster(tmp_path)
    assert gone.attach()
    with pytest.raises(ServiceError, match=r"no jars of Kafka '2\.8\.2'"):
        gone.start()


def test_the_lock_has_each_version() -> None:
    for version in KAFKA_VERSIONS:
        (broker,) = (jar.version for jar in jars.locked(jars_of(version)) if jar.artifact == "kafka_2.13")
        assert broker == version


@pytest.mark.parametrize(
    "record", ["", "[]", "{}", '{"cluster_id": "A", "nodes": null}', '{"cluster_id": "A", "nodes": [{"number": 1}]}']
)
def test_a_directory_that_can_not_be_read_says_what_to_do(tmp_path: Path, record: str) -> None:
    (tmp_path / "cluster.json").write_text(record)
    with pytest.raises(ServiceError, match=r"cluster\.json.* end its brokers.* remove the directory"):
        KafkaCluster(tmp_path).start()


def test_a_start_that_fails_shows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = KafkaCluster(settings={"num.partitions": "many"})
    with pytest.raises(StartFailed, match=r"(?s)formatting.*num\.partitions"):
        cluster.start()
    cluster.close()
    # The format tool lets this pass; the broker does not.
    cluster = KafkaCluster(settings={"transaction.state.log.replication.factor": "0"})
    with pytest.raises(StartFailed, match=r"(?s)(formatting|ended while starting).*replication\.factor"):
        cluster.start()
    assert cluster.pids == []
    cluster.close()
    assert not cluster.data_dir.exists()


# -- as root


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop to another user")
def test_root_stays_root_where_that_user_can_not_reach_java_or_the_data(
    open_directory: Path, java_of, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = open_directory / "closed"
    closed.mkdir(mode=0o700)
    user = unprivileged_user()
    assert user is not None
    assert KafkaCluster(open_directory / "open")._account() == user
    assert KafkaCluster(closed / "kafka")._account() is None
    assert capsys.readouterr().err == f"Kafka runs as root: the user {user.name} can't pass {closed}\n"
    java_of('openjdk version "17.0.15" 2025-04-15')
    assert KafkaCluster(open_directory / "open")._account() is None
    assert f"Kafka runs as root: the user {user.name} can't pass " in capsys.readouterr().err


# -- Java


@pytest.fixture
def java_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a java in JAVA_HOME that says what it is told to say."""

    def put(says: str, status: int = 0) -> Path:
        program = tmp_path / "bin" / "java"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{says}\nEND\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        java_module._java.cache_clear()
        return program

    yield put
    java_module._java.cache_clear()


def test_an_older_java_is_refused_with_what_to_install(java_of) -> None:
    for says in ('openjdk version "17.0.15" 2025-04-15', 'java version "21" 2023-09-19 LTS'):
        assert java_of(says) == java_module.java()
    for says, version in (('openjdk version "11.0.2" 2019-01-15', 11), ('java version "1.8.0_202"', 8)):
        java_of(says)
        with pytest.raises(ServiceError, match=rf"is Java {version}; install Java 17 or newer .*openjdk"):
            KafkaCluster().start()


def test_no_java_is_refused_with_what_to_install(java_of, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java_of("The operation couldn't be completed. Unable to locate a Java Runtime.", status=1)
    with pytest.raises(ServiceError, match=r"is not a working Java .*Unable to locate"):
        java_module.java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(ServiceError, match="contains no bin/java; install Java 17"):
        java_module.java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    with pytest.raises(ServiceError, match="none on the PATH; install Java 17"):
        java_module.java()
