"""JSON Schema. The payload is the JSON that an outbox without a serializer would write, after the schema's id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from outbox import _payload
from outbox.errors import ConfigurationError, MissingExtra, SchemaMismatch
from outbox.registry.client import Definition
from outbox.registry.schema import member


@dataclass(frozen=True)
class JsonSchema:
    """A JSON Schema of a subject.

    subject  usually ``<topic>-value``.
    schema   JSON text, or the same as a dict. ``$ref`` leads to places inside of it; nothing is fetched. A schema
             without ``$schema`` is of draft 7, as for other clients of the registry.
    """

    subject: str
    schema: str | Mapping[str, Any]

    content_type = "application/vnd.confluent.json"

    @cached_property
    def definition(self) -> Definition:
        return Definition("JSON", self.schema if isinstance(self.schema, str) else json.dumps(self.schema))

    def encode(self, payload: object) -> bytes:
        """Return the payload as JSON. Raises SchemaMismatch, and PayloadError for what has no form in JSON."""
        validator = self._validator
        from jsonschema.exceptions import best_match
        from referencing.exceptions import Unresolvable

        text = _payload.to_json(payload)
        try:
            error = best_match(validator.iter_errors(orjson.loads(text)))
        except Unresolvable as failure:
            raise ConfigurationError(
                f"the JSON Schema of {self.subject} refers to {failure.ref!r}, which is not in it"
            ) from failure
        except (RecursionError, ArithmeticError) as failure:
            raise SchemaMismatch(
                "payload", f"can't be checked against the schema: {type(failure).__name__}", self.subject
            ) from failure
        if error is not None:
            path = "payload"
            for step in error.absolute_path:
                path = f"{path}[{step}]" if isinstance(step, int) else member(path, step)
            rule = "/".join(map(str, error.absolute_schema_path))
            raise SchemaMismatch(path, f"violates the schema's rule {rule}", self.subject)
        return text

    @cached_property
    def _validator(self) -> Any:
        try:
            from jsonschema import Draft7Validator, validators
            from jsonschema.exceptions import SchemaError
            from referencing import Registry
        except ImportError as error:
            raise MissingExtra("registry", error.name or "jsonschema") from error
        try:
            schema = json.loads(self.definition.text)
            kind = validators.validator_for(schema, default=Draft7Validator)
            kind.check_schema(schema)
        except (ValueError, SchemaError) as error:
            raise ConfigurationError(f"the JSON Schema of {self.subject} can't be read: {error}") from error
        # An empty registry: a $ref that leads elsewhere is not fetched.
        return kind(schema, registry=Registry())
