"""The settings of every command: from the environment (``OUTBOX_…``), then a TOML file, then these defaults.

Nested names take two underscores: ``OUTBOX_RELAY__BATCH_SIZE`` or ``[relay] batch_size``. Kafka's own options are
passed to librdkafka: ``OUTBOX_KAFKA__LINGER_MS`` or ``[kafka] "linger.ms"``. Options that would break the guarantee of
the chosen delivery are refused. The file is ``outbox.toml`` in the working directory, or the one named by
OUTBOX_CONFIG. An unknown name is an error in the environment and in the file: a misspelt setting must not be ignored.
"""

from __future__ import annotations

import ipaddress
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
from outbox._topics import DEFAULT_TEMPLATE
from outbox.errors import ConfigurationError
from relay.kafka.headers import HeaderSet
from relay.kafka.routing import STATE_SUFFIX, OnFailure, topic_problem


class Delivery(StrEnum):
    """The delivery guarantee for readers of the topics."""

    AT_MOST_ONCE = "at-most-once"
    AT_LEAST_ONCE = "at-least-once"
    EXACTLY_ONCE = "exactly-once"


class SourceKind(StrEnum):
    """The source of the relay's events."""

    POLLING = "polling"
    WAL = "wal"


class RelaySettings(BaseModel):
    """How one relay process works. All times are in seconds."""

    model_config = ConfigDict(extra="forbid")

    instance: str | None = Field(None, min_length=1, max_length=200)
    """The relay's name in ``outbox.relays`` and in logs. Unique among running relays; host, process id and a random
    part if not given."""
    batch_size: int = Field(2000, ge=1, le=50_000)
    """Events of one lane in a turn. A turn of several lanes has up to four times as many, divided among lanes with
    events, and 16 MiB of payloads."""
    lease_seconds: float = Field(15.0, ge=1.0, le=3600)
    """How long after a kill -9 its lanes are taken over by other relays."""
    max_idle_seconds: float = Field(0.1, ge=0.001, le=60)
    """An idle worker queries Postgres at least this often."""
    watch_seconds: float = Field(0.003, ge=0, le=1)
    """How often an idle worker's statement checks, inside Postgres, whether anything was committed. 0: the relay polls
    itself, at intervals that grow up to ``max_idle_seconds``; behind a pooler it always does."""
    max_backoff_seconds: float = Field(5.0, ge=0.1, le=300)
    """Longest wait between tries while Postgres or Kafka is unavailable."""
    shutdown_seconds: float = Field(25.0, ge=0.1, le=3600)
    """After SIGTERM: how long batches in flight may take. A second signal ends the relay at once."""
    metrics_address: str | None = Field(None, pattern=r"^\S+:\d{1,5}$", description=ADDRESS)
    """Serve metrics and ``/readyz`` at this ``host:port``; neither if not given. With ``--workers``, the other workers
    use the next ports."""
    archive_days: int = Field(0, ge=0, le=3650)
    """Keep published events in ``published`` for this many days; 0 deletes them at once."""


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
    """While the outbox is idle: how often the slot is advanced past what other applications write."""
    retained_limit_bytes: int = Field(1 << 30, ge=1 << 20)
    """More retained WAL than this is an alert."""


class RouteSettings(BaseModel):
    """The route of one aggregate type: its topic, and what happens when an event fails for good."""

    model_config = ConfigDict(extra="forbid")

    topic: str
    """The topic of its events."""
    on_failure: OnFailure | None = None
    """Overrides ``failures.on_failure``."""
    dead_letter_topic: str | None = None
    """Overrides ``failures.dead_letter_topic``."""


class FailureSettings(BaseModel):
    """Events that can't be published as they are. Times are in seconds."""

    model_config = ConfigDict(extra="forbid")

    on_failure: OnFailure = OnFailure.BLOCK
    """What happens to a dead letter's key. ``block``: later events wait for an operator. ``skip``: they are
    published."""
    max_attempts: int = Field(10, ge=1, le=1000)
    """After this many attempts an event becomes a dead letter."""
    min_backoff_seconds: float = Field(1.0, ge=0.001, le=86_400)
    """The wait before the second attempt. It doubles with each further attempt."""
    max_backoff_seconds: float = Field(600.0, ge=0.001, le=86_400)
    """The longest wait between two attempts."""
    dead_letter_topic: str | None = None
    """The topic for a copy of each dead letter, with the error in its headers."""


class Payloads(StrEnum):
    """Whether the page shows payloads and headers."""

    HIDDEN = "hidden"
    SHOWN = "shown"


class WebSettings(BaseModel):
    """The operations page: ``outbox web``."""

    model_config = ConfigDict(extra="forbid")

    address: str = Field("127.0.0.1:8722", pattern=r"^\S+:\d{1,5}$", description="host:port, such as 127.0.0.1:8722")
    """Where the page is served. Any address but a loopback one needs a proxy's secret."""
    proxy_secret: str | None = Field(
        None, pattern=r"^[!-~]{16,}$", repr=False, description="16 or more letters, digits or signs"
    )
    """What a proxy sends in the header ``X-Outbox-Proxy-Secret``. Requests without it are refused; the proxy
    authenticates its users."""
    user_header: str = Field("X-Forwarded-User", pattern=r"^[A-Za-z0-9-]+$", description="the name of a header")
    """The header in which the proxy names the user. It has to replace one that a client sends."""
    origin: str | None = Field(
        None, pattern=r"^https://[^/\s]+$", description="https:// and a host, such as https://outbox.example.com"
    )
    """The address that the proxy makes the page known by. Needed with a proxy's secret."""
    payloads: Payloads = Payloads.HIDDEN
    """Whether the page shows payloads and headers of events and messages."""
    read_only: bool = False
    """Offer no actions, whoever asks."""
    refresh_seconds: float = Field(2.0, ge=0.2, le=60)
    """How often the figures are read while somebody looks at them."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if (self.origin is None) != (self.proxy_secret is None):
            given, missing = ("proxy_secret", "origin") if self.origin is None else ("origin", "proxy_secret")
            raise conflict(("web", given), f"needs web.{missing} too: the page is behind a proxy, or it is not")
        if not is_loopback(self.address) and self.proxy_secret is None:
            raise conflict(
                ("web", "address"), f"must be a loopback address unless web.proxy_secret is set; got {self.address!r}"
            )
        return self


def is_loopback(address: str) -> bool:
    """Return whether a ``host:port`` names this machine itself, by an address or as localhost."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Settings(SharedSettings):
    """All settings of all commands. Raises ConfigurationError through ``load``."""

    db_schema: str = Field("outbox", validation_alias="OUTBOX_SCHEMA", min_length=1, max_length=63)
    """The schema of the outbox's tables."""
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    """The delivery guarantee for readers of the topics."""
    source: SourceKind = SourceKind.POLLING
    """The source of the relay's events. The relay waits while the lanes are read from the other source."""
    create_topics: bool = False
    """Create missing topics, with the broker's defaults unless the next two settings are given."""
    topic_partitions: int = Field(-1, ge=-1)
    """Partitions of a topic that the relay creates; -1 leaves it to the broker."""
    topic_replication: int = Field(-1, ge=-1)
    """Replication factor of a topic that the relay creates; -1 leaves it to the broker."""
    topic_template: str = DEFAULT_TEMPLATE
    """Without routes: the topic of an aggregate type. The result is converted to lower case."""
    routes: dict[str, RouteSettings] | None = None
    """Aggregate type to topic (or to a table with more settings). If given, no other aggregate type is published."""
    name: str = Field(
        "outbox", pattern=r"^[a-zA-Z0-9._-]{1,100}$", description="1 to 100 letters, digits, dots, - and _"
    )
    """Exactly-once: unique among the outboxes of one Kafka. The prefix of the state topic and of each
    transactional.id."""
    state_replication: int = Field(-1, ge=-1)
    """Replication factor of the state topic when the relay creates it; -1 leaves it to the broker."""
    ce_source: str = Field("/outbox", min_length=1)
    """CloudEvents ``source`` of every event: the system that the events come from."""
    headers: HeaderSet = HeaderSet.BOTH
    """The headers of a message: those of CloudEvents, the plain names for Debezium's consumers, or both. One set costs
    less than both; ``ce_id`` is in each."""
    relay: RelaySettings = Field(default_factory=RelaySettings)
    failures: FailureSettings = Field(default_factory=FailureSettings)
    wal: WalSettings = Field(default_factory=WalSettings)
    web: WebSettings = Field(default_factory=WebSettings)

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
        """Return the source that reads the file and refuses unknown names."""
        return _TomlFile(settings_cls, config_file())


class _TomlFile(TomlConfigSettingsSource):
    """The settings file. Maps ``schema`` to its name in the environment, and refuses unknown names."""

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
    """Raise ConfigurationError for a variable ``OUTBOX_…`` that nothing reads. ``load`` calls it too."""
    environment.check(os.environ, Settings)


def load(**given: Any) -> Settings:
    """Return the settings. ``given`` overrides environment and file. Raises ConfigurationError naming each mistake."""
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

# Any other value of these options would lose, duplicate or reorder events, or send them to an unverified server.
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


# Options that each delivery requires. The user can't change them.
_DELIVERY: Final[dict[Delivery, dict[str, str]]] = {
    # No request is ever repeated; events that a broker does not acknowledge are lost.
    Delivery.AT_MOST_ONCE: {
        "acks": "1",
        "enable.idempotence": "false",
        "enable.gapless.guarantee": "false",
        "message.send.max.retries": "0",
    },
    # A failed message must fail those behind it too: they may have the same key. librdkafka calls the option
    # experimental; a test checks that it keeps the order.
    Delivery.AT_LEAST_ONCE: {"enable.gapless.guarantee": "true"},
    # A failed message aborts the whole transaction.
    Delivery.EXACTLY_ONCE: {
        # Long, because a commit counts as clean only if it ends before any request can have been repeated.
        "retry.backoff.ms": "1000",
        "retry.backoff.max.ms": "1000",
    },
}


def producer_options(settings: Settings) -> dict[str, str]:
    """Return librdkafka's options for the chosen delivery; the user's override ours.

    Raises ConfigurationError for an option that would break the guarantee.
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
        # The Java client's partitioner (murmur2), so that all producers of a topic agree.
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        # For large requests while a backlog is drained; at the end of a turn everything is flushed at once.
        "linger.ms": "5",
        # A turn is bounded by its bytes; more than a turn is never queued.
        "queue.buffering.max.kbytes": "65536",
        # The broker's default limit; librdkafka's own is lower than the largest event plus our headers.
        "message.max.bytes": "1048588",
        "log.connection.close": "false",
    }
    if "request.required.acks" in settings.kafka:
        del ours["acks"]
    given = {name: value for name, value in settings.kafka.items() if name not in _TIMEOUTS}
    if settings.delivery is Delivery.EXACTLY_ONCE:
        # The coordinator may abort a transaction only when its relay can't be working on it any more.
        ours["transaction.timeout.ms"] = str(max(int(delivery_seconds(settings) * 3000), 60_000))
    # 0 means never: the publisher enforces the deadline itself, see BatchProducer.drain. At-most-once nothing comes
    # again, so what a relay that slept still has is dropped: other relays may have sent what comes after it.
    once = settings.delivery is Delivery.AT_MOST_ONCE
    timeout_ms = int(delivery_seconds(settings) * 1000) if once else 0
    return ours | given | _DELIVERY[settings.delivery] | {"delivery.timeout.ms": str(timeout_ms)}


def _refuse_given(settings: Settings, names: AbstractSet[str]) -> None:
    for name in sorted(names & settings.kafka.keys()):
        raise ConfigurationError(f"kafka option {name!r} is set by the relay itself for {settings.delivery}; remove it")


def state_topic_name(settings: Settings) -> str:
    """Return the name of the topic for exactly-once markers."""
    return settings.name + STATE_SUFFIX


def delivery_seconds(settings: Settings) -> float:
    """Return how long a batch may wait for acknowledgements: ``delivery.timeout.ms``, or two thirds of the lease.

    Raises ConfigurationError unless it is shorter than the lease. At-most-once it is half the lease at most: each event
    needs that much of the lease when it is sent, and the time since its row was deleted must not eat that up.
    """
    lease = settings.relay.lease_seconds
    once = settings.delivery is Delivery.AT_MOST_ONCE
    for name in _TIMEOUTS:
        given = settings.kafka.get(name)
        if given is None:
            continue
        milliseconds = int(given) if given.isdecimal() else 0
        if once and not 0 < milliseconds <= lease * 500:
            raise ConfigurationError(
                f"kafka option {name}={given} must be above 0 and at most half the lease of {lease * 1000:.0f} ms "
                "with at-most-once: events that have less of their lease left than this are deleted and not sent. "
                f"Set it to {lease * 500:.0f} or lower, or raise OUTBOX_RELAY__LEASE_SECONDS"
            )
        if not 0 < milliseconds < lease * 1000:
            raise ConfigurationError(
                f"kafka option {name}={given} must be a number above 0 and below the lease of {lease * 1000:.0f} ms: "
                "a message still under way when the lane changes hands would be sent twice. Lower it, or raise "
                "OUTBOX_RELAY__LEASE_SECONDS"
            )
        return milliseconds / 1000
    return lease / 2 if once else lease * 2 / 3
