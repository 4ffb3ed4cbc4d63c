"""A Postgres and a Kafka behind TLS, passwords and tokens: what gets in, and what an operator reads if it does not."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import credential_provider
import psycopg
import pytest
from confluent_kafka.admin import AclOperation, AdminClient, NewTopic, ResourceType
from psycopg import sql
from secured import PASSWORD, Certificates, allow, secured_kafka, secured_postgres
from support import wait_until
from typer.testing import CliRunner

from outbox import Event, Outbox
from outbox._app import credentials
from outbox._app import migrate as db
from outbox._app.kafka_clients import complete
from outbox.credentials import Credential, CredentialRequest
from outbox.errors import OutboxError
from outbox.testing.fixtures import token
from relay.cli.app import app
from relay.database import Connector
from relay.wal.replication import Replication
from spark_jobs.driver.kafka_admin import KafkaView
from spark_jobs.model import Range
from spark_jobs.postgres import connections
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
    return Credential(credential_provider.unsigned("outbox", until), until, "outbox")


def fail(request: CredentialRequest) -> Credential:
    raise RuntimeError("the vault is sealed")


def give_text(request: CredentialRequest) -> Any:
    return "a secret that is no Credential"


@dataclass
class Servers:
    certificates: Certificates
    admin: AdminClient
    kafka: dict[str, str]
    database: Any
    port: int
    """Of Postgres with TLS."""

    def url(self, user: str, password: str | None, host: str = "127.0.0.1", authority: str = "authority") -> str:
        secret = "" if password is None else f":{quote(password, safe='')}"
        root = getattr(self.certificates, authority)
        return f"postgresql://{user}{secret}@{host}:{self.port}/shop?sslmode=verify-full&sslrootcert={root}"

    def topic(self, partitions: int = 1) -> str:
        name = f"t-{token()}"
        self.admin.create_topics([NewTopic(name, partitions)], operation_timeout=30)[name].result()
        return name


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Servers]:
    certificates = Certificates.made(tmp_path_factory.mktemp("tls"))
    with secured_postgres(certificates) as (database, port), secured_kafka(certificates) as (admin, kafka):
        url = database.create_database("shop")
        db.upgrade(url)
        db.upgrade_consumer(url)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE ROLE outbox SUPERUSER LOGIN PASSWORD {}").format(sql.Literal(PASSWORD)))
        yield Servers(certificates, admin, kafka, database, port)


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
    with psycopg.connect(servers.database.url("shop")) as connection:
        Outbox().add_many(connection, [Event(kind, f"k{number}", "T") for number in range(20)])
    relay = outbox_relay(
        database_url=environment["OUTBOX_DATABASE_URL"],
        bootstrap_servers=servers.kafka["bootstrap.servers"],
        env=environment,
    )
    waiting = "SELECT count(*) FROM outbox.events"
    with psycopg.connect(servers.database.url("shop"), autocommit=True) as connection:
        wait_until(lambda: connection.execute(waiting).fetchone() == (0,), what="the events to be published")
    relay.terminate()
    assert relay.wait() == 0
    assert PASSWORD not in relay.log()
    _, output = run(environment, "doctor", "--json")
    findings = {each["about"]: each for each in json.loads(output)["findings"]}
    assert findings["Kafka"]["level"] == "ok", output
    assert {f"topic {topic}", f"topic {name}.relay.state", "open transactions"} <= findings.keys()
    # A consumer's driver and task.
    credentials.use("credential_provider:from_environment")
    options = {key: value for key, value in (servers.kafka | by_token).items() if value is not None}
    ids, extents = KafkaView(options).look([topic])
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
