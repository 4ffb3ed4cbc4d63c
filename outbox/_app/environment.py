"""The environment variables of the product: ``OUTBOX_…``. A variable that nothing reads is an error.

Most are settings, named after the fields of outbox._app.settings.Settings. The others are read where they are needed,
and are listed here.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as declared
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outbox._clients.variables import PREFIX, variable
from outbox.errors import ConfigurationError

_OF_FILE: Final = "_FILE"
# Kafka's own options that name a file.
_OPTION_WITH_FILE: Final = re.compile(
    r"OUTBOX_(SPARK__)?KAFKA__SASL_OAUTHBEARER_ASSERTION_((JWT_)?TEMPLATE_|PRIVATE_KEY_)?FILE"
)

READ_ELSEWHERE: Final[Mapping[str, str]] = {
    "OUTBOX_CACHE": "The directory for the sandbox's downloads. Default: $XDG_CACHE_HOME/outbox or ~/.cache/outbox.",
    "OUTBOX_CONFIG": "The file with settings. Default: outbox.toml in the working directory.",
    "OUTBOX_CONSUMER_TASKS": "Set by the consumer for its Python workers.",
    "OUTBOX_FAILPOINTS": "For tests: the steps at which a relay fails. See relay/failpoints.py.",
    "OUTBOX_KAFKA_VERSION": "The version of Kafka for a new sandbox and for test fixtures; see `outbox sandbox up`.",
    "OUTBOX_MAVEN_REPOSITORY": "The Maven repository for jars. Default: jgo's.",
    "OUTBOX_PATIENCE": "Multiplies the time limits of the sandbox and the test fixtures.",
    "OUTBOX_PG_BIN": "The directory with initdb and postgres. Default: the installed package's.",
    "OUTBOX_SANDBOX": "The directory for the sandbox's data. Default: in the cache directory.",
    "OUTBOX_TEST_KAFKA": "The Kafka on which test fixtures create topics. Default: they start one.",
    "OUTBOX_TEST_DATABASE_URL": "The Postgres on which test fixtures create databases. Default: they start one.",
}
"""Every variable that is not a setting, with its purpose."""

# Kubernetes sets these in every pod of a namespace that has a service named outbox, or outbox-relay and so on.
_SERVICE_LINK: Final = re.compile(
    r"OUTBOX(_[A-Z0-9]+)*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9]+)*|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_PORT: Final = re.compile(r"OUTBOX(_[A-Z0-9]+)*_PORT")
_SERVICE_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class Variable:
    """A setting in the environment: the name of its variable as given, and its value, which a file may hold."""

    given: str
    value: str = declared(repr=False)


def variables(environment: Mapping[str, str]) -> dict[str, Variable]:
    """Return the variables ``OUTBOX_…`` by their names in capitals, without those that are read elsewhere.

    ``OUTBOX_…_FILE`` names the file that holds the variable's value; a newline at its end is removed. Raises
    ConfigurationError for a file that can't be read, and for a value that is given both ways.
    """
    found: dict[str, Variable] = {}
    for given, value in sorted(environment.items()):
        name = given.upper()
        if not name.startswith(PREFIX) or name in READ_ELSEWHERE or _is_service_link(name, value):
            continue
        content = value
        if name.endswith(_OF_FILE) and not _OPTION_WITH_FILE.fullmatch(name):
            content, name = _content(given, value), name.removesuffix(_OF_FILE)
        if name in found:
            raise ConfigurationError(f"{found[name].given} and {given} are the same setting: unset one of them")
        found[name] = Variable(given, content)
    return found


def _content(given: str, path: str) -> str:
    try:
        content = Path(path).read_bytes().decode()
    except UnicodeDecodeError:
        problem = "it is not UTF-8"
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    else:
        return content.removesuffix("\n").removesuffix("\r") if content.endswith("\n") else content
    # Not raised in a handler: the error of the decoder has the content.
    raise ConfigurationError(f"{given} names the file {path!r}, which can't be read: {problem}")


def check(environment: Mapping[str, str], settings: type[BaseModel]) -> None:
    """Raise ConfigurationError if there are variables that nothing reads, or sections that are not JSON objects."""
    problems = []
    for name, found in sorted(variables(environment).items()):
        path = name.removeprefix(PREFIX).lower().split("__")
        setting = find(settings, path)
        if path[0] == "routes" and len(path) > 1:
            problems.append(
                f"{found.given} is not a setting: a variable's name has no lower case, aggregate types may: give "
                """OUTBOX_ROUTES={"Order": "orders"}"""
            )
        elif setting is None:
            near = _nearest(name, settings)
            if near and found.given.upper() != name:
                near += _OF_FILE
            hint = f"did you mean {near}?" if near else "correct its name, or unset it"
            problems.append(f"{found.given} is not a setting: {hint}")
        elif is_table(setting) and values_of(find(settings, path[:-1])) is None and not _is_json_object(found.value):
            example = '{"Order": "orders"}' if path == ["routes"] else '{"name": "value"}'
            problems.append(f"{found.given} must be a JSON object, such as {example}")
    if problems:
        raise ConfigurationError("; ".join(problems))


def setting_names(settings: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every setting that has a name of its own."""
    for name, field in fields_of(settings).items():
        yield (name,)
        model = model_of(field)
        if model is not None:
            yield from ((name, *rest) for rest in setting_names(model))


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their names as users spell them."""
    return {str(field.validation_alias or name): field for name, field in model.model_fields.items()}


def find(settings: type[BaseModel], path: Sequence[str]) -> Any:
    """Return the field at this path, or the type of its values inside a mapping with free names; None without any."""
    found: Any = settings
    for part in path:
        model, values = model_of(found), values_of(found)
        found = fields_of(model).get(part) if model is not None else values if part else None
    return found


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the known name most similar to this one, or None if none is similar."""
    return next(iter(get_close_matches(key, known, n=1, cutoff=0.6)), None)


def choices_of(setting: Any) -> tuple[Any, ...]:
    """Return the members of a field's or a type's union, or the type itself."""
    annotation = setting.annotation if isinstance(setting, FieldInfo) else setting
    return get_args(annotation) if get_origin(annotation) in {Union, types.UnionType} else (annotation,)


def model_of(setting: Any) -> type[BaseModel] | None:
    """Return the model of a field or a type that is a section, or None."""
    for choice in choices_of(setting):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def values_of(setting: Any) -> Any:
    """Return the type of the values if a field or a type is a mapping with free names, or None."""
    for choice in choices_of(setting):
        if get_origin(choice) is dict:
            return get_args(choice)[1]
    return None


def is_table(setting: Any) -> bool:
    return model_of(setting) is not None or values_of(setting) is not None


def _is_json_object(value: str) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except ValueError:
        return False


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(name) or (_SERVICE_PORT.fullmatch(name) and _SERVICE_ADDRESS.match(value)))


def _nearest(name: str, settings: type[BaseModel]) -> str | None:
    paths = list(setting_names(settings))
    flat = re.sub("_+", "_", name)
    for path in paths:
        # Options of Kafka and Spark may have any name: only the number of underscores can be wrong.
        start = variable(path).replace("__", "_") + "_"
        if values_of(find(settings, path)) is str and flat.startswith(start) and len(flat) > len(start):
            return f"{variable(path)}__{flat.removeprefix(start)}"
    known = [*map(variable, paths), *READ_ELSEWHERE, "OUTBOX_KAFKA__BOOTSTRAP_SERVERS"]
    # Without the prefix, which is the same in all of them.
    near = nearest_key(name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in known])
    return None if near is None else PREFIX + near
