"""All settings of all commands: from the environment (``OUTBOX_…``), then a TOML file, then these defaults.

Nested names take two underscores: ``OUTBOX_RELAY__BATCH_SIZE`` or ``[relay] batch_size``. The file is ``outbox.toml``
in the working directory, or the one named by OUTBOX_CONFIG. An unknown name is an error in the environment and in the
file: a misspelt setting must not be ignored. What the relay derives from its settings is in relay.config.
"""

from __future__ import annotations

import grp
import ipaddress
import os
import pwd
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticKnownError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from outbox._app import environment, settings_errors
from outbox._app.choices import Delivery, HeaderSet, OnFailure, Payloads, SourceKind
from outbox._app.settings_errors import conflict
from outbox._clients import credentials
from outbox._clients.variables import PREFIX
from outbox._topics import DEFAULT_TEMPLATE, relay_topic_problem
from outbox.errors import ConfigurationError
from outbox.urls import libpq_url

_ADDRESS: Final = "host:port, such as 0.0.0.0:9100"

MAX_TRANSACTION: Final = 20_000
"""Events in one Kafka transaction: the marker names each."""

_OURS: Final = frozenset(
    {"transactional.id", "delivery.report.only.error", "dr.cb", "dr.msg.cb", "on.delivery", "error.cb", "logger"}
)


def _dotted(options: object) -> object:
    """Spell option names with dots, LINGER_MS → linger.ms, and turn every value into text."""
    if not isinstance(options, dict):
        return options
    return {
        str(name).replace("_", ".").lower() if "." not in str(name) else str(name): _text(value)
        for name, value in options.items()
    }


def _text(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


Options = Annotated[dict[str, str], BeforeValidator(_dotted)]
"""Options of another program by their names with dots."""


class Section(BaseModel):
    """A table of settings. Refuses unknown names."""

    model_config = ConfigDict(extra="forbid")


def _libpq(url: str | None) -> str | None:
    """Return a URL as libpq takes it."""
    try:
        return None if url is None else libpq_url(url)
    except ConfigurationError as error:
        raise ValueError(str(error)) from error


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticKnownError("greater_than", {"gt": 0})
    return value


_Count = Annotated[int, AfterValidator(_not_zero)]
"""A number of partitions or replicas, as librdkafka takes it; -1 leaves it to the broker."""


class RelaySettings(Section):
    """One relay process."""

    instance: str | None = Field(None, min_length=1, max_length=200)
    """The relay's name, unique among running relays. By default host, process id and a random part."""
    batch_size: int = Field(2000, ge=1, le=50_000)
    """Events of one lane in a turn. A turn of several lanes has up to four times as many, or four of each, and 16 MiB
    of payloads."""
    lease_seconds: float = Field(15.0, ge=1.0, le=3600)
    """How long a relay that hangs, or whose host is gone, keeps its lanes. [A killed
    one](../operations/relay.md#what-happens-when) loses them sooner."""
    max_idle_seconds: float = Field(0.1, ge=0.001, le=60)
    """An idle worker queries Postgres at least this often."""
    watch_seconds: float = Field(0.003, ge=0, le=1)
    """How often an idle worker's statement checks, inside Postgres, whether anything was committed. With 0, and behind
    a pooler, the relay polls, at intervals of up to ``max_idle_seconds``."""
    max_backoff_seconds: float = Field(5.0, ge=0.1, le=300)
    """Longest wait between attempts while Postgres or Kafka is unavailable."""
    shutdown_seconds: float = Field(25.0, ge=0.1, le=3600)
    """After SIGTERM: how long batches in flight may take; by default they end within two thirds of ``lease_seconds``. A
    second signal ends the relay at once."""
    metrics_address: str | None = Field(None, pattern=r"^\S+:\d{1,5}$", description=_ADDRESS)
    """Where to serve metrics and ``/readyz``. With ``--workers``, the other workers use the next ports."""
    expected_relays: int = Field(1, ge=1, le=10_000)
    """Relays that should run, standbys included. With fewer, ``OutboxRelaysMissing`` fires."""
    sink_url: Annotated[str | None, AfterValidator(lambda url: _libpq(url or None))] = Field(None, repr=False)
    """The consumers' database, if it is another one. A relay with ``metrics_address`` shows the lag of its groups, and
    needs the rights of ``consumer-monitor`` there. The default of each ``--sink-url``."""
    archive_days: int = Field(0, ge=0, le=3650)
    """Keep published events in ``published`` for this many days; 0 deletes them at once."""
    at_most_once_acks: int = Field(1, ge=0, le=1)
    """With at-most-once only. 1: a partition's leader acknowledges events. 0: [no broker
    does](../explanation/guarantees.md#on-kafka)."""
    idempotency_days: int = Field(30, ge=1, le=3650)
    """How long keys of ``Outbox(unique_keys=True)`` are remembered."""


class WalSettings(Section):
    """The WAL as the source."""

    slot: str = Field(
        "outbox_relay", pattern=r"^[a-z0-9_]{1,63}$", description="1 to 63 of the characters a-z, 0-9 and _"
    )
    """Unique on the server, over all its databases."""
    publication: str = Field("outbox_relay", min_length=1, max_length=63)
    """Unique in the database."""
    heartbeat_seconds: float = Field(10.0, ge=0.1, le=3600)
    """How often an idle outbox's slot is advanced past the WAL of other applications."""
    retained_limit_bytes: int = Field(1 << 30, ge=1 << 20)
    """More retained WAL than this is an alert."""


class RouteSettings(Section):
    """The route of one aggregate type: its topic, and what happens when an event fails for good."""

    topic: str
    """The topic of its events."""
    on_failure: OnFailure | None = None
    """Overrides ``failures.on_failure``."""
    dead_letter_topic: str | None = None
    """Overrides ``failures.dead_letter_topic``."""


def _with_topics(routes: object) -> object:
    """Return routes as tables, also those that are only a topic."""
    if not isinstance(routes, dict):
        return routes
    return {name: {"topic": route} if isinstance(route, str) else route for name, route in routes.items()}


class FailureSettings(Section):
    """Events that can't be published."""

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


class WebSettings(Section):
    """The operations page: ``outbox web``."""

    address: str = Field("127.0.0.1:8722", pattern=r"^\S+:\d{1,5}$", description="host:port, such as 127.0.0.1:8722")
    """Where the page is served. Other addresses than loopback need a proxy's secret."""
    proxy_secret: str | None = Field(
        None, pattern=r"^[!-~]{16,}$", repr=False, description="16 or more letters, digits or signs"
    )
    """The secret that an authenticating proxy sends in the header ``X-Outbox-Proxy-Secret``."""
    user_header: str = Field("X-Forwarded-User", pattern=r"^[A-Za-z0-9-]+$", description="the name of a header")
    """The header in which the proxy names the user, replacing any that a client sends."""
    origin: str | None = Field(
        None, pattern=r"^https://[^/\s]+$", description="https:// and a host, such as https://outbox.example.com"
    )
    """The page's public address behind the proxy. Needed with a proxy's secret."""
    payloads: Payloads = Payloads.HIDDEN
    """Whether the page shows payloads and headers."""
    read_only: bool = False
    """Offer no actions to any user."""
    refresh_seconds: float = Field(2.0, ge=0.2, le=60)
    """How often figures are read while a browser shows them."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if (self.origin is None) != (self.proxy_secret is None):
            given, missing = ("proxy_secret", "origin") if self.origin is None else ("origin", "proxy_secret")
            raise conflict(("web", given), f"needs web.{missing} too: a page behind a proxy has both")
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


class ConsumerSettings(Section):
    """One consumer process."""

    keep_days: int = Field(14, ge=1, le=3650)
    """Whole days for which ids of applied messages are remembered: longer than Kafka keeps the messages."""
    driver_records: int = Field(2_000, ge=0, le=100_000)
    """Rounds of up to this many messages run in the driver, without a Spark job; 0 runs all rounds in the executors."""
    max_bytes: int = Field(512 << 20, ge=1 << 20)
    """Size of a round, estimated from earlier rounds. Raise it on a cluster with many cores."""
    metrics_address: str | None = Field(None, pattern=r"^\S+:\d{1,5}$", description=_ADDRESS)
    """Where to serve metrics and ``/readyz``."""
    ready_seconds: float = Field(300.0, gt=0)
    """How long after its last round a consumer is ready. Longer than the longest round."""


class SparkSettings(Section):
    """Options of Spark itself."""

    conf: Options = Field(default_factory=dict, repr=False)
    """Properties of the session: ``OUTBOX_SPARK__CONF__SPARK_UI_ENABLED`` is ``spark.ui.enabled``."""


class _Environment(EnvSettingsSource):
    """The variables ``OUTBOX_…`` without their prefix, with the contents of the files that ``…_FILE`` name."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        found = environment.variables(os.environ)
        return {name.removeprefix(PREFIX).lower(): variable.value for name, variable in found.items()}


class Settings(BaseSettings):
    """All settings of all commands. Raises ConfigurationError through ``load``."""

    model_config = SettingsConfigDict(
        env_nested_delimiter="__", extra="forbid", nested_model_default_partial_update=True
    )

    database_url: Annotated[str | None, AfterValidator(_libpq)] = Field(None, repr=False)
    """``postgresql://user@host:port/database``. [Escape](../operations/secrets.md#from-files) ``/``, ``@`` and ``%`` in
    a password."""
    consumer_schema: str = Field("consumer", min_length=1, max_length=63)
    """The schema of the consumers' tables in the sink's database."""
    kafka: Options = Field(default_factory=dict, repr=False)
    """Options of librdkafka: ``OUTBOX_KAFKA__LINGER_MS`` is ``linger.ms``. ``OUTBOX_KAFKA__BOOTSTRAP_SERVERS`` is
    required."""
    spark_packages: str | None = None
    """Maven coordinates of packages that a job's transform needs."""
    credentials: str | None = None
    """``module:function`` that returns [credentials that expire](../operations/secrets.md#credentials-that-expire)."""
    log_format: str = Field("auto", pattern="^(auto|console|json)$", description="auto, console or json")
    """``auto`` is ``console`` on a terminal, else ``json``."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")
    """The least severe entries that are logged."""
    db_schema: str = Field("outbox", validation_alias="schema", min_length=1, max_length=63)
    """The schema of the outbox's tables."""
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    """The delivery guarantee for readers of the topics."""
    source: SourceKind = SourceKind.POLLING
    """Where the relay reads events. It waits while the lanes are read from the other source."""
    create_topics: bool = False
    """Create missing topics."""
    topic_partitions: _Count = Field(-1, ge=-1, le=100_000, description="-1, or 1 to 100000")
    """Partitions of topics that the relay creates; -1: the broker's default."""
    topic_replication: _Count = Field(-1, ge=-1, le=10_000, description="-1, or 1 to 10000")
    """Replication factor of topics that the relay creates; -1: the broker's default."""
    topic_template: str = DEFAULT_TEMPLATE
    """Without routes: the topic of an aggregate type, in lower case."""
    routes: Annotated[dict[str, RouteSettings] | None, BeforeValidator(_with_topics)] = None
    """Aggregate type to topic, or to a [table](#routes). If given, no other aggregate type is published."""
    name: str = Field(
        "outbox", pattern=r"^[a-zA-Z0-9._-]{1,100}$", description="1 to 100 letters, digits, dots, - and _"
    )
    """Unique among the outboxes of one Prometheus and, exactly-once, of one Kafka: the label ``outbox`` of metrics, and
    the prefix of the state topic and of transactional ids. If it is set, log entries have it too."""
    state_replication: _Count = Field(-1, ge=-1, le=10_000, description="-1, or 1 to 10000")
    """Replication factor of the state topic; -1: the broker's default."""
    ce_source: str = Field("/outbox", min_length=1)
    """CloudEvents' ``source``: the system that the events come from."""
    headers: HeaderSet = HeaderSet.BOTH
    """The [headers](message-format.md#headers): CloudEvents', Debezium's plain ones, or both. ``ce_id`` is in each."""
    relay: RelaySettings = Field(default_factory=RelaySettings)
    failures: FailureSettings = Field(default_factory=FailureSettings)
    wal: WalSettings = Field(default_factory=WalSettings)
    web: WebSettings = Field(default_factory=WebSettings)
    consumer: ConsumerSettings = Field(default_factory=ConsumerSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)

    @property
    def given_name(self) -> str | None:
        """Return the name if it was set. A consumer may read the topics of any outbox: the default means none there."""
        return self.name if "name" in self.model_fields_set else None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        for name in self.kafka:
            if name in _OURS:
                raise conflict(("kafka", name), "is set by the relay itself; remove it")
        problem = relay_topic_problem(self.name)
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
        if self.delivery is not Delivery.AT_MOST_ONCE and "at_most_once_acks" in self.relay.model_fields_set:
            raise conflict(
                ("relay", "at_most_once_acks"),
                f"is for at-most-once only: with {self.delivery} all in-sync replicas acknowledge an event; remove it",
            )
        least, most = self.failures.min_backoff_seconds, self.failures.max_backoff_seconds
        if least > most:
            raise conflict(
                ("failures", "min_backoff_seconds"),
                f"must be at most failures.max_backoff_seconds, which is {most:g}; got {least:g}",
            )
        if self.delivery is Delivery.AT_MOST_ONCE and self.source is SourceKind.WAL:
            raise conflict(("source",), "must be polling with at-most-once; got 'wal'")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources by precedence: arguments, the environment, the file."""
        return init_settings, _Environment(settings_cls), InitSettingsSource(settings_cls, _content(config_file()))

    def require_database(self, otherwise: str = "") -> str:
        """Return the database URL. Raises ConfigurationError when there is none; its text ends with ``otherwise``."""
        if self.database_url is None:
            raise ConfigurationError(
                f"no database: set OUTBOX_DATABASE_URL=postgresql://user@host:port/database{otherwise}"
            )
        return self.database_url

    def require_kafka(self) -> str:
        """Return the bootstrap servers. Raises ConfigurationError when there are none."""
        servers = self.kafka.get("bootstrap.servers")
        if not servers:
            raise ConfigurationError("no Kafka: set OUTBOX_KAFKA__BOOTSTRAP_SERVERS=host:port")
        return servers


def load(**given: Any) -> Settings:
    """Return the settings. ``given`` overrides environment and file. Raises ConfigurationError naming each mistake."""
    check_environment()
    given = {name: value for name, value in given.items() if value is not None}
    try:
        found = Settings(**given)
    except ValidationError as error:
        file = config_file()
        origin = settings_errors.Origin(given, environment.variables(os.environ), file, _content(file))
        problems = settings_errors.explain(error, Settings, origin)
    else:
        credentials.use(found.credentials)
        return found
    # Not raised in a handler: the errors above quote their input, which may be a password.
    raise ConfigurationError(problems)


def check_environment() -> None:
    """Raise ConfigurationError for a variable ``OUTBOX_…`` that nothing reads. ``load`` calls it too."""
    environment.check(os.environ, Settings)


def config_file() -> Path | None:
    """Return the settings file, if there is one. Raises ConfigurationError when OUTBOX_CONFIG does not name a file."""
    named = os.environ.get("OUTBOX_CONFIG")
    path = Path(named or "outbox.toml")
    if path.is_file():
        return path
    if named:
        raise ConfigurationError(f"OUTBOX_CONFIG names {named!r}, which is not a file")
    return None


def _content(file: Path | None) -> dict[str, Any]:
    """Return the parsed file. Raises ConfigurationError when it can't be read, or must not be."""
    if file is None:
        return {}
    try:
        with file.open("rb") as opened:
            if not os.environ.get("OUTBOX_CONFIG"):
                # Of the file that was opened: its name may lead to another one by now.
                _require_trusted(os.fstat(opened.fileno()))
            return tomllib.load(opened)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        problem = f"{file} can't be read: {error}"
    # Not raised in a handler: the errors of the parsers have the content.
    raise ConfigurationError(problem)


def _own_group(number: int) -> bool:
    """Return whether this is the group that a user has alone: it bears the user's name. Editors then let it write."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _require_trusted(status: os.stat_result) -> None:
    """Raise ConfigurationError for a file that another user wrote: commands run in shared directories, too."""
    # Root can do everything anyway, and owns the files of an image.
    if status.st_uid not in {os.geteuid(), 0}:
        problem = "it belongs to another user"
    elif status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _own_group(status.st_gid)):
        problem = "others may change it"
    else:
        return
    raise ConfigurationError(
        f"outbox.toml in the working directory is not read, as {problem}, and settings run code: chown it to yourself "
        "and chmod go-w, or name it in OUTBOX_CONFIG if you trust it"
    )


# Without enable.ssl.certificate.verification a client would not refuse what another one refuses.
_CONNECTING: Final = ("security.", "ssl.", "sasl.", "https.", "client.", "socket.", "enable.ssl.")


def client_options(settings: Settings) -> dict[str, str]:
    """Return the options that any Kafka client needs to reach the brokers: addresses and credentials, no tuning."""
    settings.require_kafka()
    return {
        name: value
        for name, value in settings.kafka.items()
        if name == "bootstrap.servers" or name.startswith(_CONNECTING)
    }
