"""Error texts for settings: the name as the user wrote it, what is expected, and what was given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from outbox._app.environment import Variable, choices_of, fields_of, find, is_table, model_of, nearest_key
from outbox._clients.variables import variable

_OPTIONS: Final = {
    "database_url": "--database-url",
    "create_topics": "--create-topics",
    "delivery": "--delivery",
    "log_format": "--log-format",
    "spark_packages": "--packages",
}
_SECRET: Final = re.compile(r"(?i)passw|secret|token|credential|\w://\S*@")
_MAX_SHOWN: Final = 80
_CONFLICT: Final = "conflict"


def conflict(path: Sequence[str], problem: str) -> PydanticCustomError:
    """Return the error for a setting that conflicts with others: ``problem`` follows the setting's name in the text."""
    return PydanticCustomError(_CONFLICT, "{problem}", {"path": list(path), "problem": problem})


@dataclass(frozen=True, slots=True, repr=False)
class Origin:
    """Finds where a value came from: an argument, a variable or the file, in this order."""

    given: Mapping[str, Any]
    variables: Mapping[str, Variable]
    file: Path | None
    content: Mapping[str, Any]

    def name(self, path: Sequence[str]) -> str:
        """Return a setting's name as the user wrote it."""
        dotted = ".".join(path)
        if _holds(self.given, path):
            return _OPTIONS.get(dotted, dotted)
        for size in range(len(path), 0, -1):
            rest = ".".join(path[size:])
            if found := self.variables.get(variable(path[:size])):
                return f"{found.given}: {rest}" if rest else found.given
            if _holds(self.content, path[:size]):
                return f"{dotted} in {self.file}"
        return variable(path)


def explain(error: ValidationError, settings: type[BaseModel], origin: Origin) -> str:
    """Return one sentence for each mistake. Secret values are not quoted."""
    return " ".join(_sentence(problem, settings, origin) for problem in error.errors(include_url=False))


def _sentence(problem: ErrorDetails, settings: type[BaseModel], origin: Origin) -> str:
    context = problem.get("ctx", {})
    if problem["type"] == _CONFLICT:
        return f"{origin.name(context['path'])} {context['problem']}."
    path = [str(part) for part in problem["loc"]]
    name = origin.name(path)
    match problem["type"]:
        case "value_error":
            return f"{name}: {problem['msg'].removeprefix('Value error, ')}."
        case "missing":
            return f"{name} is missing."
        case "extra_forbidden":
            section = model_of(find(settings, path[:-1]))
            known = sorted(fields_of(section)) if section is not None else []
            near = nearest_key(path[-1], known)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}."
            return f"{name} is not a setting: {hint}"
    fields = [find(settings, path[:size]) for size in range(1, len(path) + 1)]
    secret = _SECRET.search(path[-1]) or any(isinstance(field, FieldInfo) and not field.repr for field in fields)
    wanted = "of another type" if fields[-1] is None else expected(fields[-1])
    return f"{name} must be {wanted}{'' if secret else _shown(problem['input'])}."


def expected(field: Any) -> str:
    """Return a description of valid values: the field's ``description``, or one derived from its type."""
    annotation, limits = field, {}
    if isinstance(field, FieldInfo):
        if field.description:
            return field.description
        annotation, limits = field.annotation, _limits(field)
    if is_table(annotation):
        return "a table of settings"
    choices = [choice for choice in choices_of(annotation) if isinstance(choice, type)]
    for choice in choices:
        if issubclass(choice, Enum):
            *others, last = (str(member.value) for member in choice)
            return f"{', '.join(others)} or {last}"
    for choice, words in _NUMBERS.items():
        if choice in choices:
            return words + _bounds(limits.get("ge"), limits.get("le"), "from ")
    if "pattern" in limits:
        return f"text that matches {limits['pattern']}"
    size = _bounds(limits.get("min_length"), limits.get("max_length"), "of ")
    return f"text{size} characters" if size else "text"


_NUMBERS: Final = {bool: "true or false", int: "a whole number", float: "a number"}


def _limits(field: FieldInfo) -> dict[str, Any]:
    names = ("ge", "le", "min_length", "max_length", "pattern")
    found = {name: getattr(each, name, None) for each in field.metadata for name in names if hasattr(each, name)}
    return {name: limit for name, limit in found.items() if limit is not None}


def _bounds(low: object, high: object, start: str) -> str:
    if low is not None and high is not None:
        return f" {start}{low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"


def _shown(value: object) -> str:
    if not isinstance(value, str | int | float):
        return f"; got a {'table' if isinstance(value, dict) else type(value).__name__}"
    text = str(value)
    if _SECRET.search(text):
        return ""
    return f"; got {(text[:_MAX_SHOWN] + '…' if len(text) > _MAX_SHOWN else text)!r}"


def _holds(values: Mapping[str, Any], path: Sequence[str]) -> bool:
    here: Any = values
    for part in path:
        same = [name for name in here if _plain(name) == _plain(part)] if isinstance(here, Mapping) else []
        if not same:
            return False
        here = here[same[0]]
    return bool(path)


def _plain(name: object) -> str:
    return str(name).lower().replace(".", "_")
