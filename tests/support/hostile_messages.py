"""Messages that a broker takes and a reader may stumble over: one table for all readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raw_kafka import produce
from uuid_utils.compat import uuid7

TOPIC = {"message.timestamp.after.max.ms": str(2**63 - 1), "retention.ms": "-1"}
"""The settings of a topic that takes any timestamp."""

_NOW = 1_790_000_000_000


@dataclass(frozen=True, slots=True)
class HostileMessage:
    """A message as the broker gets it. ``reason``: why readers that need ids make it a dead letter; None: they don't.

    ``undecodable`` are the bytes of the first header name that is not UTF-8. ``json``: whether the value is JSON that
    readers parse; they need not parse what is nested deeply.
    """

    name: str
    headers: Mapping[bytes, bytes | None]
    key: bytes | None
    value: bytes | None = b"{}"
    milliseconds: int = _NOW
    reason: str | None = None
    undecodable: bytes | None = None
    json: bool = True


def _table() -> Sequence[HostileMessage]:
    def message(name: str, headers: Mapping[bytes, bytes | None] | None = None, **given: Any) -> HostileMessage:
        """One with an id, and with a key of its own."""
        id_ = given.pop("id", None) or str(uuid7()).encode()
        return HostileMessage(name, {b"ce_id": id_, **(headers or {})}, **{"key": name.encode(), **given})

    bad = {"reason": "undecodable"}
    return [
        message("fine"),
        message("a header name that is not UTF-8", {b"\xff\xfe": b"x"}, undecodable=b"\xff\xfe", **bad),
        message("fine behind it"),
        HostileMessage("no other header", {b"ce_id\xc3": b"1"}, key=b"no other", undecodable=b"ce_id\xc3", **bad),
        message("several such names", {b"a\xc3": b"1", b"b\xc3": None, b"c": b"3"}, undecodable=b"a\xc3", **bad),
        message("an empty header name", {b"": b"x"}),
        message("NUL in a header name", {b"a\0b": b"x"}),
        message("a header that is null", {b"tenant": None}),
        message("a header that is not UTF-8", {b"tenant": b"\xff\xfe\0", b"ce_type": b"\xff", b"ce_source": b"\xff\0"}),
        message("1,000 headers", {b"h%d" % number: b"v" for number in range(1_000)}),
        message("an id that is not UTF-8", id=b"\xff\xfe\0"),
        message("an id after the year 9999", id=b"ffffffff-ffff-7fff-bfff-ffffffffffff"),
        message("an id right after the year 9999", id=b"e677d21f-dc00-7000-8000-000000000000"),
        message("an id at the end of the year 9999", id=b"e677d21f-dbff-7000-8000-000000000000"),
        HostileMessage("no header", {}, key=b"no header", reason="no-id"),
        HostileMessage("an empty id", {b"ce_id": b""}, key=b"empty id", reason="no-id"),
        HostileMessage("a null id", {b"ce_id": None}, key=b"null id", reason="no-id"),
        message("microseconds", milliseconds=_NOW * 1_000),
        message("nanoseconds", milliseconds=_NOW * 1_000_000),
        message("no timestamp", milliseconds=-1),
        message("before 1970", milliseconds=-5_000),
        message("before year 1", milliseconds=-(2**55)),
        message("no key", key=None),
        message("an empty key", key=b""),
        message("NUL in key and value", key=b"a\0b\xff", value=b"a\0b\xff", json=False),
        message("a key of 10,000 bytes", key=b"k" * 10_000),
        message("a tombstone", value=None),
        message("an empty value", value=b"", json=False),
        message("nested, and not closed", value=b"[" * 100_000, json=False),
        message("nested, and closed", value=b"[" * 50_000 + b"]" * 50_000, json=False),
        message("nested as deeply as orjson goes", value=b"[" * 1_000 + b"]" * 1_000),
        message("1 MB", value=b"x" * 1_000_000, json=False),
        message("fine at the end"),
    ]


MESSAGES = _table()


def write(servers: str, topic: str) -> None:
    """Write the table into partition 0: the message at an offset is that of the same number in ``MESSAGES``."""
    for message in MESSAGES:
        produce(servers, topic, 0, [(message.key, message.value, message.headers)], message.milliseconds)
