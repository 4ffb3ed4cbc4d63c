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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from outbox import __version__
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError, OperationRefused
from relay.audit.findings import DIFFERENT, EQUAL, EXPIRED, OPEN, Audit, Scope, WindowAudit
from relay.audit.sums import MODULUS
from relay.config import Settings

_BEGIN: Final = "0" * 64

_Sum = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True)
    previous: str = ""


class _Head(_Line):
    format: Literal[1]
    since: AwareDatetime
    until: AwareDatetime
    topics: list[str] | None
    group: str | None
    partial: list[str]
    key: Annotated[str, Field(pattern="^([0-9a-f]{2}){16,}$")]


class _Group(BaseModel):
    applied: int | None
    sum: _Sum


class _Window(_Line):
    topic: str
    start: AwareDatetime
    committed: int
    kafka: int
    sums: dict[str, _Sum]
    failed: _Sum
    groups: dict[str, _Group]

    @classmethod
    def of(cls, one: WindowAudit) -> _Window:
        assert one.committed is not None
        return cls(
            topic=one.window.topic,
            start=one.window.start,
            committed=one.committed,
            kafka=one.kafka,
            sums={name: f"{value:032x}" for name, value in one.sums.items()},
            failed=f"{one.failed:032x}",
            groups={
                name: _Group(applied=count.applied, sum=f"{count.hashes:032x}") for name, count in one.groups.items()
            },
        )

    def figures(self) -> dict[str, object]:
        """Return what is compared, each with its name for operators."""
        found: dict[str, object] = {"committed": self.committed, "kafka": self.kafka}
        found |= {f"the sum of ids of {name}": value for name, value in sorted(self.sums.items())}
        for name, group in sorted(self.groups.items()):
            found[f"applied by group {name}"] = group.applied
            found[f"the sum of ids applied by group {name}"] = group.sum
        return found


class _End(_Line):
    windows: int
    differences: Literal[0]


class Certificate(NamedTuple):
    """A certificate that was read. ``digest`` is the hash of its last line."""

    head: _Head
    windows: Sequence[_Window]
    digest: str

    @property
    def scope(self) -> Scope:
        """What to audit, to repeat its sums."""
        one = self.head
        return Scope(one.since, one.until, one.topics, one.group, one.partial, bytes.fromhex(one.key))


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


def read(path: Path, digest: str | None = None) -> Certificate:
    """Return a certificate. The hash of its last line must be ``digest`` if that is given.

    Raises ConfigurationError for a file that is none, that has no window, or that was changed.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from error
    if len(lines) < 3:
        raise ConfigurationError(f"{path}: this is no certificate, or its end is missing")
    try:
        head = _Head.model_validate_json(lines[0])
        windows = [_Window.model_validate_json(line) for line in lines[1:-1]]
        end = _End.model_validate_json(lines[-1])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "a line"
        raise ConfigurationError(f"{path}: this is no certificate, or was changed: {where}: {first['msg']}") from error
    if end.windows != len(windows):
        raise ConfigurationError(f"{path}: it has {counted(len(windows), 'window')}, not {end.windows}: it was changed")
    before = _BEGIN
    for number, (line, values) in enumerate(zip(lines, (head, *windows, end), strict=True), 1):
        if values.previous != before:
            raise ConfigurationError(f"{path}: line {number} does not follow the line before it: the file was changed")
        before = hashlib.sha256(line).hexdigest()
    if digest is not None and digest.lower() != before:
        raise ConfigurationError(f"{path}: its last line has the SHA-256 {before}, not {digest}: the file was changed")
    return Certificate(head, windows, before)


def differences(certificate: Certificate, found: Audit) -> Repeated:
    """Return what an audit has found of a certificate's windows.

    Windows of which Kafka or the archive has deleted something since can't be compared, nor groups that have forgotten
    them or are not there.
    """
    now = {(one.window.topic, one.window.start): one for one in found.windows}
    repeated = Repeated()
    texts, retried = repeated.texts, repeated.retried
    of_groups, here = Counter[str](), Counter[str]()
    for certified in certificate.windows:
        one = now.get((certified.topic, certified.start))
        if one is None or one.state == EXPIRED or one.committed is None:
            continue
        repeated.compared += 1
        of_groups.update(certified.groups.keys())
        here.update(certified.groups.keys() & one.groups.keys())
        name = f"{certified.topic} {certified.start.isoformat()}"
        if one.state == DIFFERENT:
            # The sums are over ids: a payload, a place or an order changes none.
            counts = found.counts.get(one.window, Counter[str]())
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            texts.append(f"{name}: {kinds or 'different'}; `outbox audit` names the events")
        values = _Window.of(one)
        known = _with_retried(certified, values)
        if known is not certified:
            added = counted(one.kafka - certified.kafka, "event")
            retried.append(f"{name}: {added} more on Kafka, by a retry: dead letters then")
        figures = values.figures()
        texts += [
            f"{name}: {what} is {figures[what]}, was {before}"
            for what, before in known.figures().items()
            if figures.get(what, before) != before
        ]
    repeated.groups = {name: (here[name], count) for name, count in sorted(of_groups.items())}
    return repeated


def _with_retried(certified: _Window, values: _Window) -> _Window:
    """Return a window as a retry of dead letters has made it: the sums prove that Kafka got these, and nothing else.

    It is the window itself if there was none, or more than that.
    """
    added = _less(values.sums["kafka"], certified.sums["kafka"])
    if added == 0 or added != _less(certified.failed, values.failed):
        return certified
    groups = {
        name: values.groups[name]
        for name, before in certified.groups.items()
        if name in values.groups and _less(values.groups[name].sum, before.sum) == added
    }
    sums = certified.sums | {"kafka": values.sums["kafka"]}
    return certified.model_copy(update={"kafka": values.kafka, "sums": sums, "groups": certified.groups | groups})


def _less(one: str, other: str) -> int:
    return (int(one, 16) - int(other, 16)) % MODULUS


def _lines(found: Audit, scope: Scope, settings: Settings) -> Iterator[bytes]:
    windows = [_Window.of(one) for one in found.windows if one.state == EQUAL and one.committed is not None]
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
    before = _BEGIN
    for values in (head, *(one.model_dump() for one in windows), end):
        line = orjson.dumps({**values, "previous": before}, option=orjson.OPT_SORT_KEYS)
        before = hashlib.sha256(line).hexdigest()
        yield line
