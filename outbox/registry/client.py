"""The writer's client of a schema registry. A schema's id never changes, so it is looked up once per process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from outbox._clients.schema_registry import check_options, open_client
from outbox.errors import ConfigurationError, MissingExtra, SchemaRefused, SchemaRegistryUnavailable

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

_UNKNOWN_SUBJECT: Final = 40401
_UNKNOWN_SCHEMA: Final = 40403
_INCOMPATIBLE: Final = 409
_INVALID: Final = frozenset({422, 42201})

# A transaction is open meanwhile: no long waits.
_IMPATIENT: Final = {"timeout": 5, "max.retries": 1, "retries.wait.ms": 100, "retries.max.wait.ms": 500}


@dataclass(frozen=True, slots=True)
class Definition:
    """A schema to be found in the registry. ``kind``: AVRO, PROTOBUF or JSON.

    references: (name that the schema uses, subject, definition) of each schema that it needs.
    """

    kind: str
    text: str
    references: tuple[tuple[str, str, Definition], ...] = ()


class Client:
    """Finds the ids of schemas, and caches them. Safe to share among threads, and in processes that fork."""

    def __init__(self, url: str, options: Mapping[str, Any], *, auto_register: bool) -> None:
        check_options(url, options, ConfigurationError)
        self._url = url
        self._auto_register = auto_register
        self._found: dict[tuple[str, Definition], tuple[int, int | None]] = {}
        self._options = {**_IMPATIENT, **options}
        try:
            # Also says which options it does not take.
            self._opened = os.getpid(), open_client(url, self._options, ConfigurationError)
        except ImportError as error:
            raise MissingExtra("registry", error.name or "confluent-kafka") from error

    @property
    def _client(self) -> SchemaRegistryClient:
        """This process's client: forks that share a connection would read each other's answers."""
        pid, client = self._opened
        if pid != os.getpid():
            client = open_client(self._url, self._options, ConfigurationError)
            self._opened = os.getpid(), client
        return client

    def schema_id(self, subject: str, definition: Definition) -> int:
        """Return the id of a subject's schema; with ``auto_register``, register it first.

        Raises SchemaRefused for a schema that the subject does not have or take, and SchemaRegistryUnavailable.
        """
        return self._find(subject, definition)[0]

    def _find(self, subject: str, definition: Definition) -> tuple[int, int | None]:
        found = self._found.get((subject, definition))
        if found is None:
            found = self._found[subject, definition] = self._ask(subject, definition)
        return found

    def _ask(self, subject: str, definition: Definition) -> tuple[int, int | None]:
        from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryError

        references: Sequence[Any] = [
            SchemaReference(name, place, self._find(place, needed)[1]) for name, place, needed in definition.references
        ]
        schema = Schema(definition.text, definition.kind, list(references))
        try:
            if self._auto_register:
                self._client.register_schema(subject, schema)
            known = self._client.lookup_schema(subject, schema)
        except SchemaRegistryError as error:
            raise self._refused(subject, schema, error) from error
        except Exception as error:
            raise self._away(error) from error
        if known.schema_id is None:
            raise self._away(ValueError("the answer has no id"))
        # A registry may put a context in front: ":.context:subject".
        if known.subject is not None and not f":{known.subject}".endswith(f":{subject}"):
            raise self._away(ValueError(f"asked for subject {subject}, it answered for {known.subject}"))
        return known.schema_id, known.version

    def _refused(self, subject: str, schema: Any, error: Any) -> Exception:
        code, status = error.error_code, error.http_status_code
        if code == _UNKNOWN_SUBJECT:
            return SchemaRefused(subject, "the registry has no such subject; register the schema first")
        if code == _UNKNOWN_SCHEMA:
            return SchemaRefused(subject, f"the schema is not registered there, {self._compatible(subject, schema)}")
        if _INCOMPATIBLE in {code, status}:
            return SchemaRefused(subject, f"the registry calls the schema incompatible: {error.error_message}")
        if {code, status} & _INVALID:
            return SchemaRefused(subject, f"the registry calls the schema invalid: {error.error_message}")
        return self._away(error)

    def _compatible(self, subject: str, schema: Any) -> str:
        """Return whether the schema could be registered, as the end of a sentence."""
        try:
            fits = self._client.test_compatibility(subject, schema)
        except Exception:  # noqa: BLE001  only the end of a sentence about another error
            return "and the registry did not answer whether it is compatible"
        if fits:
            return "but is compatible with the latest one: register it first"
        return "and is not compatible with the latest one"

    def _away(self, error: Exception) -> SchemaRegistryUnavailable:
        return SchemaRegistryUnavailable(
            f"the schema registry at {self._url} gave no usable answer: {type(error).__name__}: {error}; nothing was "
            "written. Check the registry, its address and the credentials"
        )
