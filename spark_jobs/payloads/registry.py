"""The schema registry. The schema of an id never changes, so it is fetched once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from outbox._clients.schema_registry import check_options, open_client
from outbox.consumer.errors import ConsumerUnavailable, JobError
from spark_jobs.payloads.reading import Problem

T = TypeVar("T")

_UNKNOWN_SCHEMA: Final = 40403
_UNKNOWN_SUBJECT: Final = frozenset({40401, 40402})
_LARGEST_ID: Final = 2**31 - 1
"""Registries read an id as an int of Java. For what is none they answer 404 as for a wrong address."""

# A task should survive a restart of the registry; and a request without a time limit could block the group forever.
_PATIENT: Final = {"timeout": 10, "max.retries": 8, "retries.wait.ms": 200, "retries.max.wait.ms": 5000}


@dataclass(frozen=True, slots=True)
class Schema:
    """A registered schema. ``kind``: AVRO, PROTOBUF or JSON. ``references``: the name that it uses → schema."""

    kind: str
    text: str
    references: tuple[tuple[str, Schema], ...] = ()


@dataclass(frozen=True, slots=True)
class Registry:
    """A schema registry.

    url      of the registry; several, separated by commas, are tried in turn.
    options  of confluent_kafka's SchemaRegistryClient: ``basic.auth.user.info`` ("user:password"),
             ``ssl.ca.location``, ``bearer.auth.*``, ``timeout`` (seconds, 10), ``max.retries`` (8), … Never shown.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_options(self.url, self.options, JobError)

    def client(self, form: str | None = None) -> Client:
        """Return this process's client of the registry. ``form``: "serialized" for Protobuf."""
        key = (self.url, form, *sorted((name, str(value)) for name, value in self.options.items()))
        if key not in _clients:
            _clients[key] = Client(self, form)
        return _clients[key]


def remembering(look: Callable[..., T]) -> Callable[..., T]:
    """Return the function with its results and its Problems remembered, for the life of a task.

    Not for longer: a schema that is missing may be registered later.
    """
    known: dict[tuple[Any, ...], T | Problem] = {}

    def found(*key: Any) -> T:
        if key not in known:
            try:
                known[key] = look(*key)
            except Problem as problem:
                known[key] = problem
        result = known[key]
        if isinstance(result, Problem):
            raise result
        return result

    return found


class Client:
    """Fetches schemas and caches them. For a single thread, as in Spark's Python workers."""

    def __init__(self, registry: Registry, form: str | None) -> None:
        self._form = form
        self._url = registry.url
        self._schemas: dict[int | uuid.UUID, Schema] = {}
        try:
            self._client = open_client(registry.url, {**_PATIENT, **registry.options}, JobError)
        except ImportError as error:
            raise JobError(
                f"registry: {error.name} is not installed; run: pip install 'outbox-kafka[schemas]'"
            ) from error

    def schema(self, name: int | uuid.UUID) -> Schema:
        """Return the schema of an id or GUID. Raises Problem when there is none, and ConsumerUnavailable."""
        if name not in self._schemas:
            missing = Problem(f"the registry has no schema {name}")
            if isinstance(name, int) and name > _LARGEST_ID:
                raise missing
            ask = partial(self._client.get_schema, name) if isinstance(name, int) else partial(self._by_guid, str(name))
            self._schemas[name] = self._asked(partial(ask, fmt=self._form), {_UNKNOWN_SCHEMA}, missing)
        return self._schemas[name]

    def _by_guid(self, guid: str, fmt: str | None) -> Any:
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            return self._client.get_schema_by_guid(guid, fmt)
        except SchemaRegistryError as error:
            if error.http_status_code == 404 and error.error_code != _UNKNOWN_SCHEMA:
                # An older registry has no GUIDs. That it is one, and its address is right, shows what each of them has.
                self._client.get_schema_types()
                error.error_code = _UNKNOWN_SCHEMA
            raise

    def latest(self, subject: str) -> Schema:
        """Return a subject's latest schema. Raises JobError when there is none, and ConsumerUnavailable."""
        missing = JobError(f"registry: there is no subject {subject}; name the subject or the schema")
        return self._asked(
            lambda: self._client.get_latest_version(subject, fmt=self._form).schema, _UNKNOWN_SUBJECT, missing
        )

    def _asked(self, ask: Callable[[], Any], unknown: Collection[int], missing: Exception) -> Schema:
        """Return what the registry answers. Raises ``missing`` for an unknown schema or subject."""
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            return self._whole(ask())
        except Exception as error:
            # Any other 404 comes from a wrong URL or from a proxy, and is no message's fault.
            if isinstance(error, SchemaRegistryError) and error.error_code in unknown:
                raise missing from error
            raise ConsumerUnavailable(
                f"the schema registry at {self._url} gave no usable answer: {type(error).__name__}: {error}; "
                "check the registry, its address and the credentials. Nothing was skipped; run the job again"
            ) from error

    def _whole(self, found: Any) -> Schema:
        references = []
        for one in found.references or ():
            version = self._client.get_version(one.subject, one.version, deleted=True, fmt=self._form)
            references.append((one.name, self._whole(version.schema)))
        return Schema(found.schema_type or "AVRO", found.schema_str, tuple(references))


_clients: dict[tuple[Any, ...], Client] = {}
