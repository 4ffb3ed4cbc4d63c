"""Schemas are made of types, as their values are written as JSON."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypedDict
from uuid import UUID, uuid4

import jsonschema
import pytest

from relay.page.api import json_of
from relay.page.schemas import Schemas


class Colour(StrEnum):
    RED = "red"


@dataclass
class Leaf:
    at: dt.datetime
    parent: Leaf | None = None

    @property
    def year(self) -> int:
        return self.at.year


class Figures(TypedDict):
    leaf: Annotated[Mapping[str, Any], Leaf]
    ids: Sequence[UUID]


class Tree:
    def as_dict(self) -> Figures:
        return {"leaf": {"at": dt.datetime.now(dt.UTC), "parent": None, "more": 1}, "ids": [uuid4()]}


def valid(kind: Any, value: object) -> bool:
    schemas = Schemas()
    schema = schemas.of(kind)
    root = {**schema, "components": {"schemas": schemas.named}}
    jsonschema.Draft202012Validator.check_schema(root)
    return jsonschema.Draft202012Validator(root).is_valid(json.loads(json_of(value)))


NOW = dt.datetime.now(dt.UTC)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Leaf, Leaf(NOW, Leaf(NOW)), {"at": "2026-01-31"}),
        (Tree, Tree(), {"leaf": {}, "ids": []}),
        (Colour, Colour.RED, "blue"),
        (tuple[int, str], (1, "a"), ("a", 1)),
        (Sequence[dt.timedelta], [dt.timedelta(1)], ["a"]),
        (Mapping[str, int | None], {"a": None}, {"a": "b"}),
        (bytes | None, b"a", 1),
        (Sequence[Mapping[str, Any]], [{"any": 1.5}], [1]),
    ],
)
def test_a_value_fits_the_schema_of_its_type(kind, good, bad):
    assert valid(kind, good)
    assert not valid(kind, bad)


def test_a_type_without_a_form_and_two_of_one_name_are_refused():
    for kind in (object, set[int], type("Bare", (), {})):
        with pytest.raises(TypeError, match="has no form in JSON"):
            Schemas().of(kind)
    schemas = Schemas()
    schemas.of(Leaf)
    with pytest.raises(TypeError, match="Leaf is the name of two classes"):
        schemas.of(dataclass(type("Leaf", (), {"__annotations__": {"a": int}})))
