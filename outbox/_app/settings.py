"""Settings that relay and consumers share, and the sources that settings are read from.

All settings together are in relay.config; a consumer's are in spark_jobs.settings.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from outbox._app import environment, settings_errors
from outbox._clients import credentials
from outbox.errors import ConfigurationError
from outbox.urls import libpq_url

ADDRESS: Final = "host:port, such as 0.0.0.0:9100"

Read = TypeVar("Read", bound=BaseSettings)


class ConsumerSettings(BaseModel):
    """How one consumer process works."""

    model_config = ConfigDict(extra="forbid")

    keep_days: int = Field(14, ge=1, le=3650)
    """The ids of applied messages are remembered for this many whole days: longer than Kafka keeps the messages."""
    driver_records: int = Field(2_000, ge=0, le=100_000)
    """Rounds of up to this many messages run in the driver, without a Spark job; 0 runs all rounds in the executors."""
    max_bytes: int = Field(512 << 20, ge=1 << 20)
    """A round takes at most about this many bytes over all partitions, estimated from the message sizes of earlier
    rounds. Raise it on a cluster with many cores."""
    metrics_address: str | None = Field(None, pattern=r"^\S+:\d{1,5}$", description=ADDRESS)
    """Serve metrics and ``/readyz`` at this ``host:port``; neither if not given."""
    ready_seconds: float = Field(300.0, gt=0)
    """How long after its last round a consumer is still ready. Longer than the longest round."""


class SparkSettings(BaseModel):
    """Options of Spark itself: ``conf`` holds its properties."""

    model_config = ConfigDict(extra="forbid")

    conf: dict[str, str] = Field(default_factory=dict, repr=False)
    """Properties of the session: ``OUTBOX_SPARK__CONF__SPARK_UI_ENABLED`` is ``spark.ui.enabled``."""

    @field_validator("conf", mode="before")
    @classmethod
    def _dotted(cls, value: object) -> object:
        return dotted(value)


class _Environment(EnvSettingsSource):
    """The environment, with the contents of the files that variables named ``…_FILE`` name."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): variable.value for name, variable in environment.variables(os.environ).items()}


class SharedSettings(BaseSettings):
    """The settings that every command reads. Raises ConfigurationError through ``read``."""

    model_config = SettingsConfigDict(
        env_prefix="OUTBOX_",
        env_nested_delimiter="__",
        extra="ignore",
        nested_model_default_partial_update=True,
    )

    database_url: str | None = Field(None, repr=False)
    """``postgresql://user@host:port/database``. In a password write ``/`` as ``%2F``, ``@`` as ``%40``, ``%`` as
    ``%25``."""
    consumer_schema: str = Field("consumer", min_length=1, max_length=63)
    """The schema of the consumers' tables in the sink's database."""
    kafka: dict[str, str] = Field(default_factory=dict, repr=False)
    """Options of librdkafka by their names: ``OUTBOX_KAFKA__LINGER_MS`` is ``linger.ms``. Every command that talks to
    Kafka needs ``OUTBOX_KAFKA__BOOTSTRAP_SERVERS``."""
    consumer: ConsumerSettings = Field(default_factory=ConsumerSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    spark_packages: str | None = None
    """Maven coordinates of the packages that a job's transform needs in Spark."""
    credentials: str | None = None
    """``package.module:function`` that returns short-lived passwords and tokens: see docs/operations/secrets.md."""
    log_format: str = Field("auto", pattern="^(auto|console|json)$", description="auto, console or json")
    """``auto`` is ``console`` on a terminal, else ``json``."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")
    """The least severe entries that are logged."""

    @field_validator("kafka", mode="before")
    @classmethod
    def _dotted(cls, value: object) -> object:
        return dotted(value)

    @field_validator("database_url")
    @classmethod
    def _libpq(cls, value: str | None) -> str | None:
        try:
            return None if value is None else libpq_url(value)
        except ConfigurationError as error:
            raise ValueError(str(error)) from error

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
        return (init_settings, _Environment(settings_cls), cls.file_source(settings_cls))

    @classmethod
    def file_source(cls, settings_cls: type[BaseSettings]) -> PydanticBaseSettingsSource:
        """Return the source that reads the settings file."""
        return TomlConfigSettingsSource(settings_cls, config_file())

    def require_database(self, otherwise: str = "") -> str:
        """Return the database URL. Raises ConfigurationError when there is none; its text ends with ``otherwise``."""
        if self.database_url is None:
            raise ConfigurationError(
                f"no database: set OUTBOX_DATABASE_URL=postgresql://user@host:port/database{otherwise}"
            )
        return self.database_url

    def require_kafka(self, otherwise: str = "") -> str:
        """Return the bootstrap servers. Raises ConfigurationError without any; its text ends with ``otherwise``."""
        servers = self.kafka.get("bootstrap.servers")
        if not servers:
            raise ConfigurationError(f"no Kafka: set OUTBOX_KAFKA__BOOTSTRAP_SERVERS=host:port{otherwise}")
        return servers


def config_file() -> Path | None:
    """Return the settings file, if there is one. Raises ConfigurationError when OUTBOX_CONFIG does not name a file."""
    named = os.environ.get("OUTBOX_CONFIG")
    if named:
        path = Path(named)
        if not path.is_file():
            raise ConfigurationError(f"OUTBOX_CONFIG names {named!r}, which is not a file")
        return path
    path = Path("outbox.toml")
    return path if path.is_file() else None


def read(kind: type[Read], given: Mapping[str, Any]) -> Read:
    """Return the settings. ``given`` overrides other sources. Raises ConfigurationError naming each mistake."""
    file = config_file()
    try:
        found = kind(**given)
    except ValidationError as error:
        origin = settings_errors.Origin(given, environment.variables(os.environ), file, file_content(file))
        problems = settings_errors.explain(error, kind, origin)
    except SettingsError as error:
        # This text does not quote the variable's value, but its cause does.
        problems = f"{error}: it must be a JSON object"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        problems = f"{file} can't be read: {error}"
    else:
        if isinstance(found, SharedSettings):
            credentials.use(found.credentials)
        return found
    # Not raised in a handler: the errors above quote their input, which may be a password.
    raise ConfigurationError(problems)


def dotted(options: object) -> object:
    """Spell option names with dots, LINGER_MS → linger.ms, and turn every value into text."""
    if not isinstance(options, dict):
        return options
    return {
        str(name).replace("_", ".").lower() if "." not in str(name) else str(name): _text(value)
        for name, value in options.items()
    }


# Without enable.ssl.certificate.verification a client would not refuse what another one refuses.
_CONNECTING: Final = ("security.", "ssl.", "sasl.", "https.", "client.", "socket.", "enable.ssl.")


def client_options(settings: SharedSettings) -> dict[str, str]:
    """Return the options that any Kafka client needs to reach the brokers: addresses and credentials, no tuning."""
    settings.require_kafka()
    return {
        name: value
        for name, value in settings.kafka.items()
        if name == "bootstrap.servers" or name.startswith(_CONNECTING)
    }


def file_content(file: Path | None) -> dict[str, Any]:
    """Return the parsed file. Raises ConfigurationError when it can't be read."""
    try:
        return {} if file is None else tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"{file} can't be read: {error}") from error


def _text(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value
