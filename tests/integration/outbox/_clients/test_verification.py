"""No client of ours can be told not to verify the server that it talks to."""

from __future__ import annotations

import ssl

import pytest
from typer.testing import CliRunner

from outbox._app.settings import client_options
from outbox.consumer.errors import JobError
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.errors import ConfigurationError
from outbox.external import HttpAsk, HttpCall
from relay.cli.app import app
from relay.config import load
from relay.core.ports import BrokerUnavailable
from relay.kafka.fencing import ShortLivedProducer
from relay.kafka.offsets import Offsets
from relay.kafka.state_topic import StateTopic
from relay.kafka.topics import Topics
from relay.pipeline.topics import topics
from spark_jobs.payloads.registry import Registry
from spark_jobs.task.reader import RangeReader, ReaderSettings

OFF = [
    ("enable.ssl.certificate.verification", "FALSE"),
    ("ssl.endpoint.identification.algorithm", "None"),
    # As Java's clients are told.
    ("ssl.endpoint.identification.algorithm", ""),
]
CLIENTS = {
    "topics": lambda options: Topics(options, create=False),
    "state topic": lambda options: StateTopic(options, "state", replication=1).require(1),
    "offsets": Offsets,
    "page": lambda options: topics(load(kafka=options), []),
    "fencing": lambda options: ShortLivedProducer(options, "id"),
    "driver": KafkaAdmin,
    "task": lambda options: RangeReader(ReaderSettings(options, "g", patience_seconds=1.0)),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_of_kafka_that_would_not_verify_is_refused(client):
    for name, value in OFF:
        options = {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "SSL", name: value}
        with pytest.raises(ConfigurationError, match=f"kafka option {name}={value} would turn off the verification"):
            CLIENTS[client](options)


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [(command, *off) for command, off in zip(["relay run", "doctor", "offsets show"], OFF, strict=True)],
)
def test_a_command_says_so_in_one_line(monkeypatch, outbox_postgres, command, name, value):
    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setenv(f"OUTBOX_KAFKA__{name.replace('.', '_').upper()}", value)
    done = CliRunner().invoke(app, command.split())
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert f"{name}={value} would" in done.stderr


def test_every_client_gets_the_authorities_of_brokers_and_of_what_is_asked_over_https():
    given = {"ssl.ca.location": "a.pem", "https.ca.location": "b.pem", "linger.ms": "1", "bootstrap.servers": "h:1"}
    options = client_options(load(kafka=given))
    assert options == {name: value for name, value in given.items() if name != "linger.ms"}


@pytest.mark.parametrize("kind", [HttpCall, HttpAsk])
def test_a_provider_that_would_not_be_verified_is_refused(kind):
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    with pytest.raises(JobError, match="must verify the provider's certificate and host name"):
        kind("https://h/x", tls=unverified)
    unverified.verify_mode = ssl.CERT_NONE
    with pytest.raises(JobError, match="must verify"):
        kind("https://h/x", tls=unverified)
    kind("https://h/x", tls=ssl.create_default_context())


@pytest.mark.parametrize("value", [False, True])
def test_a_registry_that_would_not_be_verified_is_refused(value):
    with pytest.raises(JobError, match=f"ssl.ca.location={value} would turn off the verification .* name the file of"):
        Registry("https://h:1", {"ssl.ca.location": value})
    with pytest.raises(JobError, match="Unrecognized properties: verify"):
        Registry("https://h:1", {"verify": False}).client()


def test_an_authority_that_can_not_be_read_is_a_mistake_in_the_options(monkeypatch, outbox_postgres):
    """In one line, like every other."""
    with pytest.raises(JobError, match=r"a file of the options ssl\.… can't be read"):
        Registry("https://h:1", {"ssl.ca.location": "/nowhere.pem"}).client()
    options = {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "SSL", "ssl.ca.location": "/nowhere.pem"}
    for client in CLIENTS.values():
        # The state topic's client is not a relay's first: the options were accepted then.
        with pytest.raises((ConfigurationError, JobError, BrokerUnavailable), match=r"ssl\.ca\.location failed"):
            client(options)
    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)
    for name, value in options.items():
        monkeypatch.setenv(f"OUTBOX_KAFKA__{name.replace('.', '_').upper()}", value)
    done = CliRunner().invoke(app, ["offsets", "show"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert "ssl.ca.location failed" in done.stderr
