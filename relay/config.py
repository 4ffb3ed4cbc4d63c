"""The settings of every command: from the environment (``OUTBOX_…``), then a TOML file, then these defaults.

Nested names take two underscores: ``OUTBOX_RELAY__BATCH_SIZE`` or ``[relay] batch_size``. Kafka's own options pass
through to librdkafka: ``OUTBOX_KAFKA__LINGER_MS`` or ``[kafka] "linger.ms"``. Those that would break the promise of
the chosen delivery are refused. The file is ``outbox.toml`` in the working directory, or what OUTBOX_CONFIG names.
A name that is not known is an error in the environment and in the file: a misspelt setting must not become a default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    TomlConfigSettingsSource,
)

from outbox._app import environment
from outbox._app.settings import ADDRESS, SharedSettings, config_file, file_content, read
from outbox._app.settings_errors import conflict
from outbox.errors import ConfigurationError
from relay.kafka.headers import HeaderSet
from relay.kafka.routing import DEFAULT_TEMPLATE, STATE_SUFFIX, OnFailure, topic_problem


class Delivery(StrEnum):
    """What a reader of the topics may count on."""

    AT_MOST_ONCE = "at-most-once"
    AT_LEAST_ONCE = "at-least-once"
    EXACTLY_ONCE = "exactly-once"


class SourceKind(StrEnum):
    """Where the relay reads events."""

    POLLING = "polling"
    WAL = "wal"


class RelaySettings(BaseModel):
    """How one relay process works. All times are in seconds."""

    model_config = ConfigDict(extra="forbid")

    instance: str | None = Field(None, min_length=1, max_length=200)
    """The relay's name in ``outbox.relays`` and in logs. Unique among running relays; host, process id and a random
    part when not given."""
    batch_size: int = Field(2000, ge=1, le=50_000)
    """Events of one lane in a turn. A turn of many lanes has four times as many, shared by those that have events, and
    16 MiB of payloads."""
    lease_seconds: float = Field(15.0, ge=1.0, le=3600)
    """After a kill -9 its lanes are taken over when this has passed."""
    max_idle_seconds: float = Field(0.1, ge=0.001, le=60)
    """An idle worker asks at least this often."""
    watch_seconds: float = Field(0.003, ge=0, le=1)
    """How often an idle worker's statement looks, inside Postgres, whether anything was committed. 0: the relay asks by
    itself, more and more rarely up to ``max_idle_seconds``; so it is behind a pooler in any case."""
    max_backoff_seconds: float = Field(5.0, ge=0.1, le=300)
    """Longest wait between tries while Postgres or Kafka is away."""
    shutdown_seconds: float = Field(25.0, ge=0.1, le=3600)
    """After SIGTERM: how long the batches in flight may take. A second signal ends the relay at once."""
    metrics_address: str | None = Field(None, pattern=r"^\S+:\d{1,5}$", description=ADDRESS)
    """Answer Prometheus and ``/readyz`` there. Not at all, if not given. With ``--workers`` the next ports are the
    other workers'."""
    archive_days: int = Field(0, ge=0, le=3650)
    """Keep published events in ``published`` for so many days; 0 deletes them at once."""


class WalSettings(BaseModel):
    """The WAL as the source."""

    model_config = ConfigDict(extra="forbid")

    slot: str = Field(
        "outbox_relay", pattern=r"^[a-z0-9_]{1,63}$", description="1 to 63 of the characters a-z, 0-9 and _"
    )
    """Unique on the server, over all its databases."""
    publication: str = Field("outbox_relay", min_length=1, max_length=63)
    """Unique in the database."""
    heartbeat_seconds: float = Field(10.0, ge=0.1, le=3600)
    """At rest: how often the slot is moved on behind what others write."""
    retained_limit_bytes: int = Field(1 << 30, ge=1 << 20)
    """More WAL than this kept for the slot is an alert."""
    messages: bool = False
    """Publish events that are messages in the WAL (``Outbox(transport="message")``). Off unless set: Postgres lets
    every role of the database write messages, so grant that to the writers alone first (``outbox db roles``). A relay
    does not start without this setting where messages were published before: with false they become dead letters."""


class RouteSettings(BaseModel):
    """One aggregate type: its topic, and what happens when an event fails for good."""

    model_config = ConfigDict(extra="forbid")

    topic: str
    """Where its events go."""
    on_failure: OnFailure | None = None
    """Instead of ``failures.on_failure``."""
    dead_letter_topic: str | None = None
    """Instead of ``failures.dead_letter_topic``."""


class FailureSettings(BaseModel):
    """Events that can't be published as they are. Times are in seconds."""

    model_config = ConfigDict(extra="forbid")

    on_failure: OnFailure = OnFailure.BLOCK
    """What follows for a dead letter's key. ``block``: it waits until a person has looked. ``skip``: it goes on."""
    max_attempts: int = Field(10, ge=1, le=1000)
    """The attempt that makes a dead letter of it."""
    min_backoff_seconds: float = Field(1.0, ge=0.001, le=86_400)
    """The wait before the second attempt. It doubles with each further one."""
    max_backoff_seconds: float = Field(600.0, ge=0.001, le=86_400)
    """The longest wait between two attempts."""
    dead_letter_topic: str | None = None
    """Where a copy of each dead letter goes, with the error in its headers."""


class Settings(SharedSettings):
    """Everything the commands can be told. Raises ConfigurationError through ``load``."""

    db_schema: str = Field("outbox", validation_alias="OUTBOX_SCHEMA", min_length=1, max_length=63)
    """The schema of the outbox's tables."""
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    """What a reader of the topics may count on."""
    source: SourceKind = SourceKind.POLLING
    """Where the relay reads events. It waits while the lanes are read from the other source."""
    create_topics: bool = False
    """Create a topic that is missing, with the broker's defaults unless the two below say otherwise."""
    topic_partitions: int = Field(-1, ge=-1)
    """Partitions of a topic that the relay creates; -1 leaves it to the broker."""
    topic_replication: int = Field(-1, ge=-1)
    """Replication factor of a topic that the relay creates; -1 leaves it to the broker."""
    topic_template: str = DEFAULT_TEMPLATE
    """Without routes: the topic of an aggregate type. The result is in lower case."""
    routes: dict[str, RouteSettings] | None = None
    """Aggregate type to topic (or to a table with more). When given, no other aggregate type is published."""
    name: str = Field(
        "outbox", pattern=r"^[a-zA-Z0-9._-]{1,100}$", description="1 to 100 letters, digits, dots, - and _"
    )
    """Exactly-once: unique among the outboxes of one Kafka. Begins the state topic's name and each transactional.id."""
    state_replication: int = Field(-1, ge=-1)
    """Replication factor of the state topic when the relay creates it; -1 leaves it to the broker."""
    ce_source: str = Field("/outbox", min_length=1)
    """CloudEvents ``source`` of every event: which system these events come from."""
    headers: HeaderSet = HeaderSet.BOTH
    """Which headers a message carries: those of CloudEvents, the plain names of Debezium's consumers, or both. One set
    costs less than both; ``ce_id`` is in each."""
    relay: RelaySettings = Field(default_factory=RelaySettings)
    failures: FailureSettings = Field(default_factory=FailureSettings)
    wal: WalSettings = Field(default_factory=WalSettings)

    @field_validator("routes", mode="before")
    @classmethod
    def _topics(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: {"topic": route} if isinstance(route, str) else route for name, route in value.items()}

    @model_validator(mode="after")
    def _checked(self) -> Self:
        for name in self.kafka:
            if name in _OURS:
                raise conflict(("kafka", name), "is set by the relay itself; remove it")
        problem = topic_problem(self.name)
        if problem:
            raise conflict(("name",), f"begins the names of topics, and {self.name!r} can't: {problem}")
        if self.delivery is Delivery.EXACTLY_ONCE and self.relay.batch_size > MAX_TRANSACTION:
            raise conflict(
                ("relay", "batch_size"),
                f"must be at most {MAX_TRANSACTION} with exactly-once, so that the batch's marker stays below Kafka's "
                f"message size; got {self.relay.batch_size}",
            )
        if self.delivery is Delivery.AT_MOST_ONCE and self.relay.archive_days:
            raise conflict(
                ("relay", "archive_days"),
                f"must be 0 with at-most-once, which does not know what was published; got {self.relay.archive_days}",
            )
        if self.delivery is Delivery.AT_MOST_ONCE and self.source is SourceKind.WAL:
            raise conflict(("source",), "must be polling with at-most-once; got 'wal'")
        return self

    @classmethod
    def file_source(cls, settings_cls: type[BaseSettings]) -> PydanticBaseSettingsSource:
        """Return what reads the file, and refuses names that it does not know."""
        return _TomlFile(settings_cls, config_file())


class _TomlFile(TomlConfigSettingsSource):
    """The file, with ``schema`` spelt as in the environment, and an unknown name refused: a typo must not pass."""

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        _check_names(self.toml_file_path, self.toml_data)
        if "schema" in self.toml_data:
            values["OUTBOX_SCHEMA"] = self.toml_data["schema"]
        return values


def _check_names(file: object, content: Mapping[str, Any]) -> None:
    known = set(Settings.model_fields) - {"db_schema"} | {"schema"}
    unknown = sorted(set(content) - known)
    if unknown:
        near = environment.nearest_key(unknown[0], sorted(known))
        hint = f"did you mean {near}?" if near else f"known are {', '.join(sorted(known))}"
        raise ConfigurationError(f"{file}: {unknown[0]} is not a setting: {hint}")


def check_names() -> None:
    """Raise ConfigurationError for a name in the environment or the file that no application reads."""
    check_environment()
    file = config_file()
    if file is not None:
        _check_names(file, file_content(file))


def check_environment() -> None:
    """Raise ConfigurationError for a variable ``OUTBOX_…`` that nothing reads. ``load`` does it too."""
    environment.check(os.environ, Settings)


def load(**given: Any) -> Settings:
    """Read the settings. ``given`` wins over environment and file. Raises ConfigurationError naming each mistake."""
    check_environment()
    given = {name: value for name, value in given.items() if value is not None}
    return read(Settings, given)


_OURS: Final = frozenset(
    {
        "transactional.id",
        "delivery.report.only.error",
        "dr.cb",
        "dr.msg.cb",
        "on.delivery",
        "error.cb",
        "logger",
    }
)

MAX_TRANSACTION: Final = 20_000
"""Events in one Kafka transaction: the marker names each."""

_TIMEOUTS: Final = ("delivery.timeout.ms", "message.timeout.ms")

# Options whose every other value would lose, double or reorder events, or send them to whoever answers.
_REQUIRED: Final = {
    "acks": {"all", "-1"},
    "request.required.acks": {"all", "-1"},
    "enable.idempotence": {"true"},
    "enable.gapless.guarantee": {"true"},
    "max.in.flight.requests.per.connection": {"1", "2", "3", "4", "5"},
    "max.in.flight": {"1", "2", "3", "4", "5"},
    "partitioner": {"murmur2", "murmur2_random", "consistent", "consistent_random", "fnv1a", "fnv1a_random"},
    "enable.ssl.certificate.verification": {"true"},
    "ssl.endpoint.identification.algorithm": {"https"},
}


# What each delivery needs beyond the others' options. The user can't change these.
_DELIVERY: Final[dict[Delivery, dict[str, str]]] = {
    # No request is ever repeated; what a broker does not acknowledge is lost.
    Delivery.AT_MOST_ONCE: {
        "acks": "1",
        "enable.idempotence": "false",
        "enable.gapless.guarantee": "false",
        "message.send.max.retries": "0",
    },
    # A message that failed must take the ones behind it down too: they may have the same key. librdkafka calls the
    # option experimental; what it does is what the order needs, and a test keeps watch on it.
    Delivery.AT_LEAST_ONCE: {"enable.gapless.guarantee": "true"},
    # In a transaction one failed message aborts them all.
    Delivery.EXACTLY_ONCE: {
        # Long, because only a commit that is over before anything can have been repeated counts as clean.
        "retry.backoff.ms": "1000",
        "retry.backoff.max.ms": "1000",
        "statistics.interval.ms": "1000",
    },
}


def producer_options(settings: Settings) -> dict[str, str]:
    """Return librdkafka's options for the chosen delivery: the user's over ours.

    Raises ConfigurationError for an option that would break the promise.
    """
    settings.require_kafka()
    if settings.delivery is Delivery.AT_MOST_ONCE:
        _refuse_given(settings, _DELIVERY[settings.delivery].keys() | {"request.required.acks", "retries"})
    else:
        _refuse_given(settings, _DELIVERY[settings.delivery].keys() - _REQUIRED.keys())
    for name, allowed in _REQUIRED.items():
        value = settings.kafka.get(name)
        if value is not None and value.lower() not in allowed:
            raise ConfigurationError(
                f"kafka option {name}={value} would break {settings.delivery}: "
                f"it must be {' or '.join(sorted(allowed))}"
            )
    ours = {
        "client.id": "outbox-relay",
        "acks": "all",
        "enable.idempotence": "true",
        # As the Java client places keys (murmur2), so that all producers of a topic agree.
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        # For large requests while a backlog is drained; a turn's end sends what lingers at once.
        "linger.ms": "5",
        # A turn is bounded by its bytes; more than a turn is never queued.
        "queue.buffering.max.kbytes": "65536",
        # The broker's default limit; librdkafka's own is lower than what the outbox accepts plus our headers.
        "message.max.bytes": "1048588",
        "log.connection.close": "false",
    }
    if "request.required.acks" in settings.kafka:
        del ours["acks"]
    given = {name: value for name, value in settings.kafka.items() if name not in _TIMEOUTS}
    if settings.delivery is Delivery.EXACTLY_ONCE:
        # The coordinator may end a transaction by itself only when its relay can't be at it any more.
        ours["transaction.timeout.ms"] = str(max(int(delivery_seconds(settings) * 3000), 60_000))
    # 0 is "never": the publisher keeps the time itself, see BatchProducer.drain.
    return ours | given | _DELIVERY[settings.delivery] | {"delivery.timeout.ms": "0"}


def _refuse_given(settings: Settings, names: AbstractSet[str]) -> None:
    for name in sorted(names & settings.kafka.keys()):
        raise ConfigurationError(f"kafka option {name!r} is set by the relay itself for {settings.delivery}; remove it")


def state_topic_name(settings: Settings) -> str:
    """Return the name of the topic that holds the markers of exactly-once."""
    return settings.name + STATE_SUFFIX


def delivery_seconds(settings: Settings) -> float:
    """Return how long a batch may wait for its acknowledgements: ``delivery.timeout.ms``, or two thirds of the lease.

    Raises ConfigurationError unless it is shorter than the lease.
    """
    lease = settings.relay.lease_seconds
    for name in _TIMEOUTS:
        given = settings.kafka.get(name)
        if given is None:
            continue
        if not (given.isdecimal() and 0 < int(given) < lease * 1000):
            raise ConfigurationError(
                f"kafka option {name}={given} must be a number above 0 and below the lease of {lease * 1000:.0f} ms: "
                "a message still under way when the lane changes hands would be sent twice. Lower it, or raise "
                "OUTBOX_RELAY__LEASE_SECONDS"
            )
        return int(given) / 1000
    return lease * 2 / 3
