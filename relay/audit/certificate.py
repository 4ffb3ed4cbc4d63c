"""A file of an audit's sums, from which anyone with access to the same servers can repeat it.

One JSON object a line: first what was audited and with which key, then each window with its counts and sums, at last
the result. Each line has the SHA-256 of the line before it, so none can be changed, added or left out without changing
the last one. Windows that were open are not in it, nor those of which it is not known what was committed.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from outbox import __version__
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError, OperationRefused
from relay.audit.findings import DIFFERENT, EQUAL, EXPIRED, OPEN, Audit, Scope, WindowAudit
from relay.audit.sums import MODULUS
from relay.config import Settings

_BEGIN: Final = "0" * 64


def _with_zone(text: str) -> str:
    if dt.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


_Sum = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Time = Annotated[str, AfterValidator(_with_zone)]


class _Head(BaseModel):
    format: Literal[1]
    since: _Time
    until: _Time
    topics: list[str] | None
    group: str | None
    partial: list[str]
    key: Annotated[str, Field(pattern="^([0-9a-f]{2}){16,}$")]


class _Group(BaseModel):
    applied: int | None
    sum: _Sum


class _Window(BaseModel):
    topic: str
    start: str
    committed: int
    kafka: int
    sums: dict[str, _Sum]
    failed: _Sum
    groups: dict[str, _Group]


class _End(BaseModel):
    windows: int
    differences: Literal[0]


@dataclass(slots=True)
class Repeated:
    """What an audit has found of a certificate's windows.

    texts     in what they differ now; ``retried``: what retries of dead letters have added to them.
    compared  how many windows could be compared; ``groups``: in how many of them each group could be, and in how many
              the certificate has it.
    """

    texts: list[str] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)
    compared: int = 0
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)


def write(path: Path, found: Audit, scope: Scope, settings: Settings) -> str:
    """Write a certificate, and return the hash of its last line.

    Raises OperationRefused if there are differences, and if there is nothing to be certified; ConfigurationError if the
    file can't be written.
    """
    if found.differs:
        raise OperationRefused("no certificate was written: the audit found differences")
    lines = list(_lines(found, scope, settings))
    if len(lines) < 3:
        raise OperationRefused("no certificate was written: no minute is known to be equal; the audit's notes say why")
    _replace(path, b"".join(line + b"\n" for line in lines))
    return hashlib.sha256(lines[-1]).hexdigest()


def require_writable(path: Path) -> None:
    """Raise ConfigurationError if no file can be written there, as far as its directory shows."""
    directory = path.resolve().parent
    if path.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        what = "it is a directory" if path.is_dir() else f"{directory} is no directory, or is not writable"
        raise ConfigurationError(f"no certificate can be written to {path}: {what}")


def _replace(path: Path, contents: bytes) -> None:
    """Write a file as a whole: an error leaves the one that was there."""
    target = path.resolve()
    # What is no file, such as a pipe, can't be replaced.
    written = target.with_name(f".{target.name}.{os.getpid()}") if target.is_file() or not target.exists() else target
    try:
        written.write_bytes(contents)
        if written != target:
            written.replace(target)
    except OSError as error:
        if written != target:
            with suppress(OSError):
                written.unlink()
        raise ConfigurationError(f"no certificate was written to {path}: {error.strerror}") from error


def read(path: Path, digest: str | None = None) -> tuple[list[dict[str, Any]], str]:
    """Return a certificate's lines, and the hash of the last one, which must be ``digest`` if that is given.

    Raises ConfigurationError for a file that is none, that has no window, or that was changed.
    """
    try:
        raw = path.read_bytes().splitlines()
        lines = [orjson.loads(line) for line in raw]
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: this is no certificate: not each line is a JSON object: {error}") from error
    before = _BEGIN
    for number, (line, values) in enumerate(zip(raw, lines, strict=True), 1):
        if not isinstance(values, dict) or values.get("previous") != before:
            raise ConfigurationError(f"{path}: line {number} does not follow the line before it: the file was changed")
        before = hashlib.sha256(line).hexdigest()
    if len(lines) < 3 or lines[-1].get("windows") != len(lines) - 2:
        raise ConfigurationError(f"{path}: this is no certificate, or its end is missing")
    try:
        _Head.model_validate(lines[0])
        for line in lines[1:-1]:
            _Window.model_validate(line)
        _End.model_validate(lines[-1])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{path}: this is no certificate: {where}: {first['msg']}") from error
    if digest is not None and digest.lower() != before:
        raise ConfigurationError(f"{path}: its last line has the SHA-256 {before}, not {digest}: the file was changed")
    return lines, before


def scope_of(lines: list[dict[str, Any]]) -> Scope:
    """Return what to audit, to repeat a certificate's sums."""
    head = lines[0]
    since, until = (dt.datetime.fromisoformat(head[name]) for name in ("since", "until"))
    return Scope(
        since, until, head.get("topics"), head.get("group"), head.get("partial", ()), bytes.fromhex(head["key"])
    )


def differences(lines: list[dict[str, Any]], found: Audit) -> Repeated:
    """Return what an audit has found of a certificate's windows.

    Windows of which Kafka or the archive has deleted something since can't be compared, nor groups that have forgotten
    them or are not there.
    """
    now = {(one.window.topic, one.window.start.isoformat()): one for one in found.windows}
    repeated = Repeated()
    texts, retried = repeated.texts, repeated.retried
    of_groups, here = Counter[str](), Counter[str]()
    for line in lines[1:-1]:
        one = now.get((line["topic"], line["start"]))
        if one is None or one.state == EXPIRED or one.committed is None:
            continue
        repeated.compared += 1
        of_groups.update(line["groups"].keys())
        here.update(line["groups"].keys() & one.groups.keys())
        if one.state == DIFFERENT:
            # The sums are over ids: a payload, a place or an order changes none.
            counts = found.counts.get(one.window, Counter[str]())
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            texts.append(f"{line['topic']} {line['start']}: {kinds or 'different'}; `outbox audit` names the events")
        values = _window(one)
        known = _with_retried(line, values)
        if known is not line:
            added = counted(one.kafka - line["kafka"], "event")
            retried.append(f"{line['topic']} {line['start']}: {added} more on Kafka, by a retry: dead letters then")
        pairs = [(name, known[name], values[name]) for name in ("committed", "kafka")]
        pairs += [
            (f"the sum of ids of {name}", known["sums"][name], values["sums"][name])
            for name in sorted(known["sums"].keys() & values["sums"].keys())
        ]
        for name in sorted(known["groups"].keys() & values["groups"].keys()):
            before, after = known["groups"][name], values["groups"][name]
            pairs.append((f"applied by group {name}", before["applied"], after["applied"]))
            pairs.append((f"the sum of ids applied by group {name}", before["sum"], after["sum"]))
        texts += [
            f"{line['topic']} {line['start']}: {name} is {after}, was {before}"
            for name, before, after in pairs
            if before != after
        ]
    repeated.groups = {name: (here[name], count) for name, count in sorted(of_groups.items())}
    return repeated


def _with_retried(line: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line as a retry of dead letters has made it: the sums prove that Kafka has got these, and nothing else.

    It is the line itself if there was none, or more than that.
    """
    added = _less(values["sums"]["kafka"], line["sums"]["kafka"])
    if added == 0 or added != _less(line["failed"], values["failed"]):
        return line
    groups = {
        name: values["groups"][name]
        for name, before in line["groups"].items()
        if name in values["groups"] and _less(values["groups"][name]["sum"], before["sum"]) == added
    }
    sums = line["sums"] | {"kafka": values["sums"]["kafka"]}
    return {**line, "kafka": values["kafka"], "sums": sums, "groups": line["groups"] | groups}


def _less(one: str, other: str) -> int:
    return (int(one, 16) - int(other, 16)) % MODULUS


def _lines(found: Audit, scope: Scope, settings: Settings) -> Iterator[bytes]:
    windows = [one for one in found.windows if one.state == EQUAL and one.committed is not None]
    before = _BEGIN
    head = {
        "format": 1,
        "outbox": settings.name,
        "version": __version__,
        "since": found.since,
        "until": found.until,
        "topics": None if scope.topics is None else sorted(scope.topics),
        "group": scope.group,
        "partial": sorted(scope.partial),
        "key": found.key.hex(),
        "delivery": str(settings.delivery),
        "written_at": dt.datetime.now(dt.UTC),
    }
    end = {"windows": len(windows), "open": sum(one.state == OPEN for one in found.windows), "differences": 0}
    for values in (head, *map(_window, windows), end):
        line = orjson.dumps({**values, "previous": before}, option=orjson.OPT_SORT_KEYS)
        before = hashlib.sha256(line).hexdigest()
        yield line


def _window(one: WindowAudit) -> Mapping[str, Any]:
    return {
        "topic": one.window.topic,
        "start": one.window.start.isoformat(),
        "committed": one.committed,
        "kafka": one.kafka,
        "sums": {name: f"{value:032x}" for name, value in one.sums.items()},
        "failed": f"{one.failed:032x}",
        "groups": {
            name: {"applied": count.applied, "sum": f"{count.hashes:032x}"} for name, count in one.groups.items()
        },
    }
