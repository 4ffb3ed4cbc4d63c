"""Spark's DDL as JSON Schema: which JSON values a job's columns take. Spark's own parser needs a JVM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from outbox.consumer.errors import JobError
from spark_jobs.payloads.reading import Policy

_TOKEN: Final = re.compile(
    r"--[^\n]*|/\*.*?\*/|`(?:[^`]|``)+`|'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"|\w+|\S", re.DOTALL
)
_NAME: Final = re.compile(r"`.+`|\w+")


def _json(*types: str, **limits: Any) -> dict[str, Any]:
    return {"type": list(types), **limits}


def _whole(bits: int) -> dict[str, Any]:
    return _json("integer", minimum=-(2 ** (bits - 1)), maximum=2 ** (bits - 1) - 1)


_TYPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "boolean": _json("boolean"),
    **dict.fromkeys(("tinyint", "byte"), _whole(8)),
    **dict.fromkeys(("smallint", "short"), _whole(16)),
    **dict.fromkeys(("int", "integer"), _whole(32)),
    **dict.fromkeys(("bigint", "long"), _whole(64)),
    **dict.fromkeys(("float", "real", "double"), _json("integer", "number")),
    **dict.fromkeys(("decimal", "dec", "numeric"), _json("integer", "number", "string")),
    **dict.fromkeys(("string", "binary"), _json("string")),
    "date": _json("string", format="date"),
    **dict.fromkeys(("timestamp", "timestamp_ltz", "timestamp_ntz"), _json("string", format="date-time")),
}
"""As spark_jobs.payloads.json_text reads them."""


def json_schema(ddl: str, policy: Policy) -> dict[str, Any]:
    """Return the schema of the payloads that these columns take. Its titles are the types as declared.

    Raises JobError for what is no DDL, and for a type that JSON can't be read as.
    """
    parser = _Parser(ddl, policy)
    found = parser.value() if re.match(r"\s*struct\s*<", ddl, re.IGNORECASE) else parser.struct()
    parser.expect("")
    return found


class _Parser:
    """Reads a DDL from left to right."""

    def __init__(self, ddl: str, policy: Policy) -> None:
        self._ddl, self._policy = ddl, policy
        tokens = [token for token in _TOKEN.findall(ddl) if not token.startswith(("--", "/*"))]
        self._left = ["", *reversed(tokens)]

    def struct(self) -> dict[str, Any]:
        """Read fields, up to a token that is none."""
        fields: dict[str, Any] = {}
        required = []
        more = True
        while more:
            name = self._left.pop()
            if not _NAME.fullmatch(name):
                raise self._unreadable(name)
            name = name[1:-1].replace("``", "`") if name[0] == "`" else name
            self._skip(":")
            fields[name] = self.value()
            if needed := self._skip("not"):
                self.expect("null")
            else:
                fields[name] = _nullable(fields[name])
            if needed or self._policy.missing == "dead-letter":
                required.append(name)
            if self._skip("comment") and (text := self._left.pop())[:1] not in {"'", '"'}:
                raise self._unreadable(text)
            more = self._skip(",")
        return {
            "title": "struct",
            "type": ["object"],
            "properties": fields,
            "required": required,
            "additionalProperties": self._policy.unknown == "ignore",
        }

    def value(self) -> dict[str, Any]:
        """Read a type."""
        name = self._left.pop().lower()
        if name in _TYPES:
            return {"title": name + self._arguments(), **_TYPES[name]}
        if name not in {"array", "map", "struct"}:
            raise self._unreadable(name)
        self.expect("<")
        if name == "struct":
            found = self.struct()
        elif name == "array":
            found = {"title": name, "type": ["array"], "items": _nullable(self.value())}
        else:
            self.expect("string")
            self.expect(",")
            found = {"title": name, "type": ["object"], "additionalProperties": _nullable(self.value())}
        self.expect(">")
        return found

    def expect(self, token: str) -> None:
        """Pass over the next token; the last one is empty. Raises JobError if it is another."""
        if (found := self._left.pop()).lower() != token:
            raise self._unreadable(found)

    def _skip(self, token: str) -> bool:
        if self._left[-1].lower() != token:
            return False
        self._left.pop()
        return True

    def _arguments(self) -> str:
        if not self._skip("("):
            return ""
        found = []
        while self._left[-1].isdigit() or self._left[-1] == ",":
            found.append(self._left.pop())
        self.expect(")")
        return f"({''.join(found)})"

    def _unreadable(self, token: str) -> JobError:
        where = f"at {token!r}" if token else "at its end"
        return JobError(f"schema: can't be read as DDL of what JSON has, {where}: {self._ddl!r}")


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [*schema["type"], "null"]}
