"""JSON with a registered schema: validated against the schema it was written with, then read as declared."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import types as t

from spark_jobs.payloads import json_text as json_payload
from spark_jobs.payloads.framing import unframe
from spark_jobs.payloads.json_unique import linear, one_payload
from spark_jobs.payloads.reading import Policy, Problem, Reader
from spark_jobs.payloads.registry import Client, Registry, Schema


@dataclass(frozen=True, slots=True)
class Plan:
    """What an executor needs. ``declared`` None: the only column is the text, for VARIANT."""

    declared: t.StructType | None
    registry: Registry
    validate: bool
    policy: Policy

    def __call__(self) -> Reader:
        """Return the reader."""
        inner = (
            json_payload.variant_reader if self.declared is None else json_payload.reader(self.declared, self.policy)
        )
        client = self.registry.client()
        known: dict[int | uuid.UUID, Any] = {}

        def read(value: bytes, header: bytes | None) -> Sequence[Any]:
            framed = unframe(value, header, indexes=False)
            row = inner(framed.payload, None)
            if framed.schema not in known:
                known[framed.schema] = _validator(client, framed.schema)
            found = known[framed.schema]
            if isinstance(found, Problem):
                raise found
            if self.validate:
                _validate(found, framed.schema, framed.payload)
            return row

        return read


def _validator(client: Client, name: int | uuid.UUID) -> Any:
    """Return the validator of a schema, or the Problem with the schema."""
    from jsonschema import Draft7Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry as Resources

    try:
        schema = client.schema(name)
    except Problem as problem:
        return problem
    if schema.kind != "JSON":
        return Problem(f"schema {name} is {schema.kind}, not JSON")
    try:
        parsed = json.loads(schema.text)
        kind = validator_for(parsed, default=Draft7Validator)
        kind.check_schema(parsed)
        # Only the registered references: a validator must not fetch other URLs that a schema mentions.
        return linear(kind)(parsed, registry=Resources().with_resources(_resources(schema)))
    except (ValueError, SchemaError) as error:
        return Problem(f"schema {name} can't be read: {type(error).__name__}")


def _resources(schema: Schema) -> list[tuple[str, Any]]:
    from referencing import Resource
    from referencing.jsonschema import DRAFT7

    found = []
    for name, reference in schema.references:
        found.append((name, Resource.from_contents(json.loads(reference.text), default_specification=DRAFT7)))
        found += _resources(reference)
    return found


def _validate(validator: Any, name: int | uuid.UUID, payload: bytes) -> None:
    from referencing.exceptions import Unresolvable

    try:
        parsed = json.loads(payload)
        with one_payload():
            error = next(validator.iter_errors(parsed), None)
    except (Unresolvable, RecursionError, ArithmeticError) as failure:
        raise Problem(f"schema {name} can't be applied: {type(failure).__name__}") from failure
    if error is not None:
        # The path in the schema. The path in the payload may have confidential names.
        rule = "/".join(map(str, error.absolute_schema_path))
        raise Problem(f"the payload is not as schema {name} has it: {rule}")
