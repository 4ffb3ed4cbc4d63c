"""A Postgres and a Kafka behind TLS, passwords and tokens: what gets in, and what an operator reads if it does not."""

from __future__ import annotations

import json
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import credential_provider
import psycopg
import pytest
import schema_registry
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AclOperation, AdminClient, NewTopic, ResourceType
from psycopg import sql
from secured import PASSWORD, SecuredKafka, allow, secured_postgres, set_password
from secured_clients import CLIENTS, limit
from support import ends, wait_until, write
from typer.testing import CliRunner

from outbox import Event
from outbox._app import migrate as db
from outbox._clients import credentials
from outbox._clients.checks import Level
from outbox._clients.kafka import complete
from outbox._clients.kafka_client import Admin
from outbox.consumer import connections
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import Range
from outbox.credentials import Credential, CredentialRequest
from outbox.errors import OutboxError
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import token
from relay.cli.app import app
from relay.config import load
from relay.database import Connector
from relay.operations.doctor import examine
from relay.wal.replication import Replication
from spark_jobs.payloads.registry import Registry
from spark_jobs.task.reader import RangeReader, ReaderSettings

CURRENT: dict[str, str] = {}
ASKED: list[CredentialRequest] = []
"""What ``provide`` returns, and what it was asked for."""


def provide(request: CredentialRequest) -> Credential:
    """Be the provider: the password as it is now; for Kafka a token of three seconds."""
    ASKED.append(request)
    if request.purpose == "postgres":
        return Credential(CURRENT["password"])
    until = time.time() + 3
    return Credential(credential_provider.unsigned(until), until, "outbox")


def fail(request: CredentialRequest) -> Credential:
    raise RuntimeError("the vault is sealed")


def give_text(request: CredentialRequest) -> Any:
    return "a secret that is no Credential"


class Servers:
    """Kafka, a Postgres with TLS at ``port``, and its server."""

    def __init__(self, kafka: SecuredKafka, database: PostgresServer, port: int) -> None:
        self.certificates, self.admin, self.kafka = kafka.certificates, kafka.admin, kafka.options
        self.database, self.port = database, port

    @property
    def kafka_port(self) -> int:
        return int(self.kafka["bootstrap.servers"].rpartition(":")[2])

    def url(self, user: str, password: str | None, host: str = "127.0.0.1", authority: str = "authority") -> str:
        secret = "" if password is None else f":{quote(password, safe='')}"
        root = getattr(self.certificates, authority)
        return f"postgresql://{user}{secret}@{host}:{self.port}/shop?sslmode=verify-full&sslrootcert={root}"

    def topic(self, partitions: int = 1) -> str:
        name = f"t-{token()}"
        self.admin.create_topics([NewTopic(name, partitions)], operation_timeout=30)[name].result()
        return name


@pytest.fixture(scope="module")
def servers(secured) -> Iterator[Servers]:
    with secured_postgres(secured.certificates) as (database, port):
        url = database.create_database("shop")
        db.upgrade(url)
        db.upgrade_consumer(url)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE ROLE outbox SUPERUSER LOGIN PASSWORD {}").format(sql.Literal(PASSWORD)))
        yield Servers(secured, database, port)


@pytest.fixture(autouse=True)
def _no_provider() -> Iterator[None]:
    CURRENT.clear()
    ASKED.clear()
    yield
    credentials.use(None)


def settings(servers: Servers, url: str, **changes: str | None) -> dict[str, str]:
    """Return the environment of a command that reaches both servers, with changes to Kafka's options."""
    kafka = {name: value for name, value in (servers.kafka | changes).items() if value is not None}
    names = {f"OUTBOX_KAFKA__{name.replace('.', '_').upper()}": value for name, value in kafka.items()}
    return {"OUTBOX_DATABASE_URL": url, **names}


def run(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments, env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), (done.exception, done.output)
    assert PASSWORD not in done.output
    return done.exit_code, done.output


def test_a_password_that_changes_between_two_connections(servers):
    """Every way to Postgres asks for the password anew: the relay's, the stream's, the consumers', the migrations'."""
    role = f"iam_{token()}"
    with psycopg.connect(servers.database.url("shop"), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {} SUPERUSER LOGIN").format(sql.Identifier(role)))
        credentials.use(f"{__name__}:provide")
        url = servers.url(role, None)
        ways = {
            "relay": lambda: Connector(url, "test")().close(),
            "stream": lambda: Replication(url, "test").close(),
            "consumer": lambda: connections.connect(url, "test").close(),
            "migrations": lambda: db.upgrade(url),
        }
        for number, (name, connect) in enumerate(ways.items()):
            CURRENT["password"] = f"{number} of 4: p#a?s/s"
            alter = sql.SQL("ALTER ROLE {} PASSWORD {}")
            admin.execute(alter.format(sql.Identifier(role), sql.Literal(CURRENT["password"])))
            connect()
            assert len(ASKED) == number + 1, name
        assert set(ASKED) == {CredentialRequest("postgres", "127.0.0.1", str(servers.port), role, "shop")}
        # The old one is not good any more.
        CURRENT["password"] = "0 of 4: p#a?s/s"
        with pytest.raises(OutboxError, match="password authentication failed") as caught:
            ways["relay"]()
        assert CURRENT["password"] not in str(caught.value)
        # An address with a password of its own asks nobody.
        count = len(ASKED)
        Connector(servers.url("outbox", PASSWORD), "test")().close()
        assert len(ASKED) == count
        admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fail", f"the credentials of {__name__}:fail: RuntimeError: the vault is sealed"),
        (
            "give_text",
            f"the credentials of {__name__}:give_text: TypeError: it must return outbox.credentials.Credential",
        ),
    ],
)
def test_a_provider_that_fails_is_an_outage_with_its_reason(servers, name, text):
    credentials.use(f"{__name__}:{name}")
    url = servers.url("outbox", None)
    for connect in (Connector(url, "test"), lambda: db.upgrade(url)):
        with pytest.raises(OutboxError) as caught:
            connect()
        assert text in str(caught.value)
        assert "a secret" not in str(caught.value)
    with pytest.raises(psycopg.OperationalError, match=text.split(":")[0]):
        connections.connect(url, "test")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("nowhere", "must be package.module:function; got 'nowhere'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        (f"{__name__}:absent", "has no attribute 'absent'"),
        (f"{__name__}:PASSWORD", "is not a function"),
    ],
)
def test_a_provider_that_is_not_there_is_a_mistake_in_the_settings(spec, problem):
    status, output = run({"OUTBOX_CREDENTIALS": spec, "OUTBOX_DATABASE_URL": "postgresql://u@127.0.0.1:1/x"}, "status")
    assert (status, output.count("\n")) == (2, 1), output
    assert "OUTBOX_CREDENTIALS" in output
    assert problem in output


def test_relays_and_consumers_come_with_tokens_and_passwords_of_the_provider(
    servers, outbox_relay, monkeypatch, tmp_path
):
    """Every client: the relay's producers and admin clients, the doctor, the driver, the readers of ranges."""
    monkeypatch.setenv("TEST_PASSWORD", PASSWORD)
    # A module of the working directory.
    shutil.copy(credential_provider.__file__, tmp_path / "vault.py")
    monkeypatch.chdir(tmp_path)
    topic, name, kind = servers.topic(2), f"outbox-{token()}", f"Order-{token()}"
    everything = AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS, AclOperation.READ, AclOperation.WRITE
    allow(servers.admin, ResourceType.TOPIC, topic, *everything)
    allow(servers.admin, ResourceType.TOPIC, f"{name}.*", *everything, AclOperation.CREATE)
    allow(servers.admin, ResourceType.TRANSACTIONAL_ID, f"{name}*", AclOperation.DESCRIBE, AclOperation.WRITE)
    by_token = {"sasl.mechanism": "OAUTHBEARER", "sasl.username": None, "sasl.password": None}
    environment = settings(servers, servers.url("outbox", None), **by_token) | {
        "OUTBOX_CREDENTIALS": "vault:from_environment",
        "OUTBOX_ROUTES": json.dumps({kind: topic}),
        "OUTBOX_NAME": name,
        "OUTBOX_DELIVERY": "exactly-once",
        "TEST_PASSWORD": PASSWORD,
    }
    write(servers.database.url("shop"), [Event(kind, f"k{number}", "T") for number in range(20)])
    relay = outbox_relay(
        database_url=environment["OUTBOX_DATABASE_URL"],
        bootstrap_servers=servers.kafka["bootstrap.servers"],
        env=environment,
    )
    waiting = "SELECT count(*) FROM outbox.events"
    with psycopg.connect(servers.database.url("shop"), autocommit=True) as connection:
        wait_until(lambda: connection.execute(waiting).fetchone() == (0,), what="the events to be published")
    ends(relay)
    assert PASSWORD not in relay.log()
    _, output = run(environment, "doctor", "--json")
    findings = {each["about"]: each for each in json.loads(output)["findings"]}
    assert findings["Kafka"]["level"] == "ok", output
    assert {f"topic {topic}", f"topic {name}.relay.state", "open transactions"} <= findings.keys()
    # A consumer's driver and task.
    credentials.use("credential_provider:from_environment")
    options = {key: value for key, value in (servers.kafka | by_token).items() if value is not None}
    ids, extents = KafkaAdmin(options).look([topic])
    read = 0
    reader = RangeReader(ReaderSettings(options, "tokens", patience_seconds=30.0))
    for (_, part), extent in extents.items():
        batches = reader.range((topic, part), Range(ids[topic], extent.first, extent.end))
        read += sum(len(messages) for messages in batches)
    reader.close()
    assert read == 20


def test_a_token_is_replaced_before_it_runs_out(servers):
    credentials.use(f"{__name__}:provide")
    options = {name: value for name, value in servers.kafka.items() if name not in {"sasl.username", "sasl.password"}}
    admin = AdminClient(complete({**options, "sasl.mechanism": "OAUTHBEARER", "log_level": 0}))
    assert admin.list_topics(timeout=20).brokers

    def replaced() -> bool:
        admin.poll(0.1)
        return len(ASKED) > 1

    wait_until(replaced, what="another token")


def test_a_topic_that_may_not_be_described_is_not_taken_for_lost(servers, secured):
    """Markers are lost, and Kafka has events of two topics: nothing is settled or released while one is not seen."""
    url = servers.database.create_database(f"described_{token()}")
    db.upgrade(url)
    seen, hidden, name = servers.topic(), servers.topic(), f"outbox-{token()}"
    rights = AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS, AclOperation.READ, AclOperation.WRITE
    allow(servers.admin, ResourceType.TOPIC, seen, *rights)
    allow(servers.admin, ResourceType.TOPIC, f"{name}.*", *rights, AclOperation.CREATE)
    allow(servers.admin, ResourceType.TRANSACTIONAL_ID, f"{name}*", AclOperation.DESCRIBE, AclOperation.WRITE)
    write(url, [Event(kind, "k", "T") for kind in ("Seen", "Hidden")])
    environment = settings(servers, url) | {
        "OUTBOX_ROUTES": json.dumps({"Seen": seen, "Hidden": hidden}),
        "OUTBOX_NAME": name,
        "OUTBOX_DELIVERY": "exactly-once",
    }
    state = "SELECT max(last_batch), (SELECT count(*) FROM outbox.events) FROM outbox.lanes"
    with psycopg.connect(url, autocommit=True) as connection:
        producer = Producer({"bootstrap.servers": secured.plain})

        def publish(kind: str, topic: str) -> None:
            query = "SELECT payload::text, event_id::text FROM outbox.events WHERE aggregate_type = %s"
            payload, event_id = connection.execute(query, (kind,)).fetchone()
            producer.produce(topic, payload, "k", headers=[("ce_id", event_id)])
            assert producer.flush(30) == 0

        def refused(last_batch: int | None, *arguments: str) -> None:
            connection.execute("UPDATE outbox.lanes SET last_batch = %s", (last_batch,))
            status, output = run(environment, *arguments)
            assert status == 1, output
            assert f"{hidden} may not be seen with these credentials: grant DESCRIBE" in output
            assert connection.execute(state).fetchone() == (last_batch, 2)

        reconcile = ("relay", "reconcile", "--apply", "--reason", "lost")
        recover = ("recover", "--since", "2020-01-01", "--reason", "restored")
        publish("Hidden", hidden)
        refused(None, *recover)
        publish("Seen", seen)
        for arguments in (recover, reconcile[:2], reconcile):
            refused(7, *arguments)
        allow(servers.admin, ResourceType.TOPIC, hidden, AclOperation.DESCRIBE, AclOperation.READ)
        status, output = run(environment, *reconcile)
        assert status == 0, output
        assert connection.execute(state).fetchone() == (8, 0)


UNVERIFIED = (
    "SSL handshake failed: error:0A000086:SSL routines::certificate verify failed: broker certificate could not be "
    "verified, verify that ssl.ca.location is correctly configured"
)
WRONG: dict[str, tuple[dict[str, str], str]] = {
    "authority": (
        {"ssl.ca.location": "{certificates.stranger}"},
        f"sasl_ssl://127.0.0.1:{{port}}/bootstrap: {UNVERIFIED}",
    ),
    "host name": ({"bootstrap.servers": "localhost:{port}"}, f"sasl_ssl://localhost:{{port}}/bootstrap: {UNVERIFIED}"),
    "password": (
        {"sasl.password": "incorrect"},
        "SASL authentication error: Authentication failed during authentication due to invalid credentials",
    ),
}
# That the host's name is verified is librdkafka's doing, and it says the same of it: one client is enough.
REFUSED = [("relay", "host name"), *((client, wrong) for client in CLIENTS for wrong in ("authority", "password"))]


# The topic is there, and the user may at most DESCRIBE it.
NO_RIGHTS = {
    "relay": "does not exist, or the relay may not DESCRIBE it; create it, grant it",
    "takeover": "grant WRITE and DESCRIBE on the transactional id",
    "publisher": "grant it WRITE and DESCRIBE on the transactional ids that begin with its name",
    "sender": "the relay may not write to topic '{topic}': grant it WRITE and DESCRIBE",
    "doctor": "if it is there, grant DESCRIBE on it",
    "driver": "Topic authorization failed; look at the credentials and the ACLs",
    "task": "Topic authorization failed; look at the credentials and the ACLs",
    "offsets": "Topic authorization failed; look at the credentials and the ACLs",
}


@pytest.fixture(scope="module")
def shown(servers) -> dict[tuple[str, str], str]:
    """What an operator reads of each client with each mistake. All wait at the same time.

    Those without rights come after the others: their requests must be answered, and handshakes cost CPU.
    """
    topic, described, port = servers.topic(), servers.topic(), servers.kafka_port
    allow(servers.admin, ResourceType.TOPIC, described, AclOperation.DESCRIBE)
    # Fewer handshakes than every hundred milliseconds.
    calm = {"reconnect.backoff.ms": "500", "reconnect.backoff.max.ms": "500"}

    def text(client: str, wrong: str) -> str:
        changes = WRONG[wrong][0] if wrong in WRONG else {}
        given = {name: value.format(certificates=servers.certificates, port=port) for name, value in changes.items()}
        # A task reads what its driver could describe.
        named = described if (client, wrong) == ("task", "rights") else topic
        try:
            CLIENTS[client](servers.database.url("shop"), servers.kafka | calm | given, named)
        except OutboxError as error:
            return str(error).replace(named, "{topic}")
        return "no error"

    without_rights = [(client, "rights") for client in NO_RIGHTS]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(REFUSED)) as pool:
        limit(patch)
        texts = [*pool.map(text, *zip(*REFUSED, strict=True))]
        texts += pool.map(text, *zip(*without_rights, strict=True))
    return dict(zip(REFUSED + without_rights, texts, strict=True))


def test_a_relay_logs_why_it_waits_until_its_certificates_are_renewed(servers, outbox_relay, request, tmp_path):
    url = servers.database.url("shop")
    write(url, [Event(f"Order-{token()}", "k", "T")])
    authority = shutil.copy(servers.certificates.stranger, tmp_path / "authority.pem")
    stranger = {"ssl.ca.location": str(authority)}
    relay = outbox_relay(
        database_url=url,
        bootstrap_servers=servers.kafka["bootstrap.servers"],
        env=settings(servers, url, **stranger) | {"OUTBOX_NAME": f"outbox-{token()}"},
    )
    # It has ten seconds for its request. The clients of the next tests wait at the same time.
    request.getfixturevalue("shown")
    relay.wait_for_log("certificate verify failed")
    shutil.copy(servers.certificates.authority, authority)
    relay.wait_for_log("the relay may not create it")
    assert PASSWORD not in relay.log()
    relay.kill()
    with psycopg.connect(url) as connection:
        connection.execute("DELETE FROM outbox.events")


@pytest.mark.parametrize(("client", "wrong"), REFUSED)
def test_an_operator_reads_why_the_connections_fail(servers, shown, client, wrong):
    """Not only that a broker did not answer."""
    text = shown[client, wrong]
    assert WRONG[wrong][1].format(port=servers.kafka_port) in text
    assert text.count("certificate verify failed") == (wrong != "password"), text
    assert ("the certificate must also name this host" in text) == (wrong != "password")
    assert PASSWORD not in text
    assert "incorrect" not in text


@pytest.mark.parametrize("client", NO_RIGHTS)
def test_an_operator_reads_which_right_is_missing(shown, client):
    assert NO_RIGHTS[client] in shown[client, "rights"]


def test_a_reason_explains_the_failures_of_its_own_client_alone(servers):
    """Neither those of another cluster's, nor those after a request that was answered."""
    user = f"user-{token()}"
    set_password(servers.admin, user, "an older one")
    client = Admin(servers.kafka | {"sasl.username": user, "sasl.password": PASSWORD})
    other = Admin({"bootstrap.servers": "127.0.0.1:1"})

    def refused() -> bool:
        with pytest.raises(KafkaException) as caught, client.explaining():
            client.list_topics(timeout=2.0)
        return "invalid credentials" in str(caught.value)

    wait_until(refused, what="the reason")
    with pytest.raises(KafkaException, match=r'transport failure"}$'), other.explaining():
        other.list_topics(timeout=0.5)
    set_password(servers.admin, user, PASSWORD)

    def answered() -> bool:
        try:
            with client.explaining():
                return bool(client.list_topics(timeout=2.0).brokers)
        except KafkaException:
            return False

    wait_until(answered, what="an answer with the new password")
    with pytest.raises(KafkaException) as caught, client.explaining():
        client.list_topics(timeout=0.0001)
    assert "a connection failed" not in str(caught.value)


UNTRUSTED = {
    "authority": ("127.0.0.1", "stranger", "certificate verify failed"),
    "host name": ("localhost", "authority", 'does not match host name "localhost"'),
}


@pytest.mark.parametrize("wrong", UNTRUSTED)
def test_a_postgres_that_is_not_verified_gets_no_password(servers, wrong):
    host, authority, text = UNTRUSTED[wrong]
    url = servers.url("outbox", PASSWORD, host, authority)
    ways: dict[str, Callable[[], object]] = {
        "relay": Connector(url, "test"),
        "stream": lambda: Replication(url, "test"),
        "consumer": lambda: connections.connect(url, "test"),
        "migrations": lambda: db.upgrade(url),
    }
    for name, connect in ways.items():
        with pytest.raises((OutboxError, psycopg.OperationalError), match=text) as caught:
            connect()
        assert PASSWORD not in str(caught.value), name
    [found] = [each for each in examine(load(database_url=url, kafka=servers.kafka)) if each.about == "Postgres"]
    assert (found.level, text in found.found, PASSWORD in found.found) == (Level.FAILURE, True, False)


@pytest.fixture(scope="module")
def registry(servers) -> Iterator[schema_registry.SchemaRegistry]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(servers.certificates.certificate, servers.certificates.key)
    with schema_registry.running("reader", PASSWORD, tls) as running:
        running.answer("POST", "/subjects/orders/versions", {"schema": '"string"'}, running.authorization)
        yield running


@pytest.mark.parametrize("wrong", [None, "authority", "host name", "password"])
def test_what_is_read_of_a_registry_over_tls(servers, registry, wrong):
    url, options = registry.url, {"basic.auth.user.info": f"reader:{PASSWORD}", "max.retries": 0}
    authority = servers.certificates.authority
    match wrong:
        case "authority":
            authority, text = servers.certificates.stranger, "certificate verify failed: unable to get local issuer"
        case "host name":
            url = url.replace("127.0.0.1", "localhost")
            text = "certificate verify failed: Hostname mismatch, certificate is not valid for 'localhost'"
        case "password":
            options["basic.auth.user.info"], text = "reader:incorrect", "Unauthorized"
        case _:
            client = Registry(url, options | {"ssl.ca.location": str(authority)}).client()
            assert client.schema(1).text == '"string"'
            return
    with pytest.raises(ConsumerUnavailable, match=text) as caught:
        Registry(url, options | {"ssl.ca.location": str(authority)}).client().schema(1)
    assert PASSWORD not in str(caught.value)
    assert "incorrect" not in str(caught.value)
