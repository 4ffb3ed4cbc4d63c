"""What all tests share: which of them run in one process, property tests, and an environment without user settings."""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import pickle
import random
import secrets
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import typer.testing

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "support"))

import machine
from groups import group
from hypothesis import settings
from nursery import NURSERY, Nursery

from outbox.sandbox import _broker, _ports

if TYPE_CHECKING:
    from kafka_proxy import KafkaProxy

    from outbox.sandbox.kafka import KafkaCluster
    from outbox.testing.fixtures import Database, DatabaseServer, KafkaServer, PrivatePostgres, RelayFactory, Topics

SUPPORT = Path(__file__).parent / "support"

# To rewrite the assertions of all tests takes two thirds of their collection, and each worker process collects them:
# what one run has rewritten is kept for the next, also where PYTHONDONTWRITEBYTECODE is set.
sys.dont_write_bytecode = False

# Assertions in what tests share show values too, as those in test files do.
_scripts = {"class_archives", "groups", "impatient", "machine", "mutant", "nursery", "warm_daemon"}
pytest.register_assert_rewrite(*sorted({path.stem for path in SUPPORT.glob("*.py")} - _scripts))

# Other examples in every run, drawn from the run's seed; a failure prints them. `fixed`: always the same examples.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("seeded", database=None, deadline=None, print_blob=True)
settings.load_profile("seeded")

# These choose the servers that the fixtures use; everything else would change what is tested.
for _name in list(os.environ):
    if _name.startswith("OUTBOX_") and _name not in {
        "OUTBOX_TEST_DATABASE_URL",
        "OUTBOX_TEST_KAFKA",
        "OUTBOX_KAFKA_VERSION",
        "OUTBOX_CACHE",
        "OUTBOX_PG_BIN",
        "OUTBOX_MAVEN_REPOSITORY",
        "OUTBOX_PATIENCE",
    }:
        del os.environ[_name]

machine.prepare()
# To format the storage of a cluster takes a JVM, once in a process for all settings that matter to it: these do not.
_broker._NODE_SETTINGS = (
    *_broker._NODE_SETTINGS,
    "allow.everyone.if.no.acl.found",
    "authorizer.class.name",
    "auto.create.topics.enable",
    "background.threads",
    "broker.heartbeat.interval.ms",
    "broker.session.timeout.ms",
    "group.consumer.heartbeat.interval.ms",
    "group.consumer.min.heartbeat.interval.ms",
    "group.consumer.min.session.timeout.ms",
    "group.consumer.session.timeout.ms",
    "group.min.session.timeout.ms",
    "num.io.threads",
    "num.network.threads",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms",
    "transaction.partition.verification.enable",
)
if "TEST_FORMATTED" not in os.environ:
    os.environ["TEST_FORMATTED"] = tempfile.mkdtemp(prefix="outbox-formatted-")
    atexit.register(shutil.rmtree, os.environ["TEST_FORMATTED"], ignore_errors=True)


class Formatted(dict[object, dict[str, bytes]]):
    """Formatted storage, which all processes of a run share: files named by a hash of the settings."""

    def get(self, key: object, default: object = None) -> dict[str, bytes] | None:
        file = self._file(key)
        return pickle.loads(file.read_bytes()) if file.exists() else None

    def __setitem__(self, key: object, files: dict[str, bytes]) -> None:
        new = self._file(f"{key}, by {os.getpid()}")
        new.write_bytes(pickle.dumps(files))
        new.rename(self._file(key))

    @staticmethod
    def _file(key: object) -> Path:
        return Path(os.environ["TEST_FORMATTED"]) / hashlib.sha256(repr(key).encode()).hexdigest()


_broker._formatted = Formatted()


class PortsInTurn:
    """Ports that no other worker of a run chooses from; one comes again when all the others have had their turn.

    A server that starts has no hold on its port yet, and one that is stopped leaves it to others until it starts again.
    """

    def __init__(self) -> None:
        self._turns: deque[int] = deque()

    def sample(self, ports: Sequence[int], k: int) -> Iterator[int]:
        """Return ``k`` ports, as random.sample does."""
        if not self._turns:
            number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
            size = len(ports) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
            # Next to each other: `relay run --workers` listens on the ports above the one that it is given.
            mine = list(ports[number * size : (number + 1) * size])
            # Other runs on this machine begin elsewhere; property tests give all workers the same numbers.
            random.SystemRandom().shuffle(mine)
            self._turns = deque(mine)
        for _ in range(k):
            port = self._turns.popleft()
            self._turns.append(port)
            yield port


_ports.random = PortsInTurn()  # type: ignore[assignment]
# Each call of a command builds all commands from their functions' signatures, unless those of an application are kept.
typer.testing._get_command = cache(typer.testing._get_command)
# A line for each topic and each producer of each test is a good part of what a broker does.
_broker._LOGGING = _broker._LOGGING.replace('<Root level="INFO">', '<Root level="WARN">')


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take the run's seed from TEST_SEED, or draw one; let pass what pyspark itself warns of.

    xdist's workers get the seed of their controller. The names of tests do not depend on it.
    """
    option = config.option
    if hasattr(config, "workerinput"):
        option.hypothesis_seed = config.workerinput["test_seed"]
    elif option.hypothesis_seed in {None, "random"}:
        option.hypothesis_seed = str(int(os.environ.get("TEST_SEED") or secrets.randbelow(2**32)))
    if version("pyspark").startswith("4.1."):
        # It leaves the sockets of collect() to the garbage collector; 4.2 closes them.
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep Python's collector from looking through 4,600 tests again and again: none of them can be rubbish."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["test_seed"] = node.config.option.hypothesis_seed


def pytest_report_header(config: pytest.Config) -> str:
    """Return how to repeat what property tests and random walks do."""
    return f"seed of random choices: repeat them with TEST_SEED={config.option.hypothesis_seed}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seed below the failures too, where it is looked for, and where `-q` leaves out the header."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(pytest_report_header(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of --dist loadgroup: it knows our groups without marks.

    xdist's own reads them from test ids that it changes, which pytest 9.2 does not let it: each test would be alone.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    assert hasattr(LoadScopeScheduling, "_split_scope"), "another xdist: see how it finds the group of a test"

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Groups(config, log)


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    """Close what a test left open, and forget where it let the log go: pytest's capture has closed that file."""
    yield
    if structlog := sys.modules.get("structlog"):
        structlog.reset_defaults()
    if support := sys.modules.get("support"):
        support.close_connections()
    if connections := sys.modules.get("outbox.consumer.connections"):
        connections.close_all()


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of this test: they follow from the run's seed and from the test's name, not from other tests."""
    return random.Random(f"{request.config.option.hypothesis_seed} {request.node.nodeid}")


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[Nursery]:
    yield NURSERY
    NURSERY.close()


@pytest.fixture(scope="session")
def outbox_kafka_cluster(_outbox_extra: None) -> Iterator[KafkaServer]:
    """The fixture of the test kit, but the broker tells its controller every two seconds that it lives, not four times
    a second, which is a third of an idle broker's processor time. Nothing kills this one. Sessions of consumers may be
    as short as a second.
    """
    from outbox.sandbox.kafka import KafkaCluster
    from outbox.testing.fixtures import ExternalKafka

    if servers := os.environ.get("OUTBOX_TEST_KAFKA"):
        yield ExternalKafka(servers)
        return
    settings = {
        "broker.heartbeat.interval.ms": "2000",
        "broker.session.timeout.ms": "18000",
        "group.min.session.timeout.ms": "1000",
        # The newer protocol's sessions and heartbeats, of which the broker says how long they are: 45 and 5 seconds.
        "group.consumer.heartbeat.interval.ms": "500",
        "group.consumer.min.heartbeat.interval.ms": "500",
        "group.consumer.min.session.timeout.ms": "6000",
        "group.consumer.session.timeout.ms": "6000",
        # Idle, each thread wakes three times a second.
        "background.threads": "2",
        "num.io.threads": "2",
        "num.network.threads": "1",
    }
    with KafkaCluster(settings=settings) as cluster:
        yield cluster


class OfGroup(ExitStack):
    """What the tests of a group share. It ends behind them: idle, a broker takes more processor time than a start."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[Callable[[], AbstractContextManager[Any]], Any] = {}

    def once(self, make: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Return what ``make`` makes; it is called once."""
        if make not in self._made:
            self._made[make] = self.enter_context(make())
        return self._made[make]

    def close(self) -> None:
        """End all of it."""
        self._made.clear()
        super().close()


OF_GROUP = OfGroup()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End what a group has shared behind its last test."""
    try:
        return (yield)
    finally:
        if nextitem is None or group(nextitem.nodeid) != group(item.nodeid):
            OF_GROUP.close()
            # Clients in cycles: else they end, all at once, within some other test. What is left stays for the session,
            # and need not be looked through again and again.
            gc.collect()
            gc.freeze()


@pytest.fixture(scope="session")
def of_group() -> Iterator[OfGroup]:
    """What brokers are kept in that the tests of a group share."""
    yield OF_GROUP
    # Behind a run that was broken off.
    OF_GROUP.close()


@contextmanager
def _mortal() -> Iterator[tuple[KafkaCluster, KafkaProxy]]:
    from kafka_proxy import KafkaProxy, ProxiedKafka

    settings = {
        # How often the coordinator looks for transactions that are too old: every ten seconds by default.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
        # Sessions of consumers may be this short: 6 seconds by default.
        "group.min.session.timeout.ms": "1000",
        # Access rights, where a test makes rules.
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with KafkaProxy() as proxy, ProxiedKafka(proxy, settings=settings) as cluster:
        yield cluster, proxy


@pytest.fixture
def mortal_network(of_group: OfGroup) -> Iterator[tuple[KafkaCluster, KafkaProxy]]:
    """A broker that tests may kill, and a proxy that leads to it. The broker runs again when a test has ended."""
    from confluent_kafka.admin import AdminClient
    from secured import revoke_all

    cluster, proxy = of_group.once(_mortal)
    yield cluster, proxy
    # As they were, whatever a test that failed has left.
    cluster.resume_broker(0)
    cluster.start()
    # Who may do what, too.
    revoke_all(AdminClient({"bootstrap.servers": cluster.bootstrap_servers}))
    # Its connections, and what it holds back, are not the next test's.
    proxy.stop()
    proxy.clear()
    proxy.heal()
    proxy.start()


@pytest.fixture
def mortal_kafka(mortal_network: tuple[KafkaCluster, KafkaProxy]) -> Iterator[tuple[KafkaCluster, Topics]]:
    """The same broker past the proxy, and topics on it."""
    from outbox.testing.fixtures import Topics

    cluster, _ = mortal_network
    with Topics(cluster.bootstrap_servers) as topics:
        yield cluster, topics
        cluster.start()


def _three() -> KafkaCluster:
    from outbox.sandbox.kafka import KafkaCluster

    # As brokers do by default.
    return KafkaCluster(brokers=3, settings={"auto.create.topics.enable": "true"})


@pytest.fixture
def three_brokers(of_group: OfGroup) -> KafkaCluster:
    """Three brokers that tests may kill. All run when a test begins."""
    return of_group.once(_three).start()


@pytest.fixture
def outbox_relay(request: pytest.FixtureRequest, tmp_path: Path, _nursery: Nursery) -> Iterator[RelayFactory]:
    """The fixture of the test kit, but relays are forked and need not import everything anew; see nursery."""
    from nursery import relays

    # In the order in which the test kit's own fixture asks for them, and for its reason.
    for name in ("outbox_postgres", "outbox_kafka"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    with relays(
        _nursery,
        lambda: request.getfixturevalue("outbox_postgres").url,
        lambda: request.getfixturevalue("outbox_kafka").bootstrap_servers,
        tmp_path,
    ) as factory:
        yield factory


@pytest.fixture(scope="session")
def _maintenance(outbox_postgres_server: DatabaseServer) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(outbox_postgres_server.url(), autocommit=True) as connection:
        yield connection


@pytest.fixture
def outbox_postgres(
    outbox_postgres_server: DatabaseServer, _outbox_template: str, _maintenance: psycopg.Connection[Any]
) -> Iterator[Database]:
    """The fixture of the test kit, but one connection makes and drops the databases of all tests: another one for each
    is a third of what it takes.
    """
    from outbox.sandbox.postgres import PostgresServer, drop_database_over
    from outbox.testing.fixtures import Database, token

    name = f"outbox_test_{token()}"
    ours = isinstance(outbox_postgres_server, PostgresServer) and _maintenance.info.server_version >= 150000
    strategy = " STRATEGY FILE_COPY" if ours else ""
    _maintenance.execute(f"CREATE DATABASE {name} TEMPLATE {_outbox_template}{strategy}")
    with Database(outbox_postgres_server.url(name), name) as database:
        yield database
    drop_database_over(_maintenance, name)


@pytest.fixture
def private_postgres(private_postgres: PrivatePostgres) -> Iterator[PrivatePostgres]:
    """The fixture of the test kit, but servers start with files that are made once in a run; see prepared_postgres."""
    from prepared_postgres import PreparedPostgres

    with PreparedPostgres() as factory:
        yield factory


@pytest.fixture(scope="session")
def _outbox_template(_outbox_template: str, outbox_postgres_server: DatabaseServer) -> str:
    """The same database with the consumers' tables as well: consumers' tests need not make them one by one."""
    from outbox._app.migrate import upgrade_consumer

    upgrade_consumer(outbox_postgres_server.url(_outbox_template))
    return _outbox_template
