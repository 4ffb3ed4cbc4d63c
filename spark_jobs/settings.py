"""A consumer's settings, where it is not started by ``outbox consume``: from the same variables and the same file.

Names that belong to the relay are passed over here; the commands look at all of them.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from outbox._app.settings import ConsumerSettings, SparkSettings, config_file, dotted, read
from outbox.errors import ConfigurationError
from outbox.urls import libpq_url


class Settings(BaseSettings):
    """What a consumer can be told. Raises ConfigurationError through ``load``."""

    model_config = SettingsConfigDict(
        env_prefix="OUTBOX_",
        env_nested_delimiter="__",
        extra="ignore",
        nested_model_default_partial_update=True,
    )

    database_url: str | None = Field(None, repr=False)
    consumer_schema: str = Field("consumer", min_length=1, max_length=63)
    kafka: dict[str, str] = Field(default_factory=dict, repr=False)
    consumer: ConsumerSettings = Field(default_factory=ConsumerSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    spark_packages: str | None = None

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
        """Arguments first, then the environment, then the file."""
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config_file()))

    def require_database(self) -> str:
        """Return the database URL. Raises ConfigurationError when there is none."""
        if self.database_url is None:
            raise ConfigurationError("no database: set OUTBOX_DATABASE_URL, or give database_url=")
        return self.database_url

    def require_kafka(self) -> dict[str, str]:
        """Return the options of Kafka's clients. Raises ConfigurationError when they do not say where it is."""
        if not self.kafka.get("bootstrap.servers"):
            raise ConfigurationError(
                "no Kafka: set OUTBOX_KAFKA__BOOTSTRAP_SERVERS, or give kafka={'bootstrap.servers': 'host:port'}"
            )
        return self.kafka


def load(**given: Any) -> Settings:
    """Read the settings. ``given`` wins over environment and file. Raises ConfigurationError naming each mistake."""
    return read(Settings, {name: value for name, value in given.items() if value is not None})
