"""The id by which a message's event is recognized.

The same rules as those of the Spark consumers, which share the table: the header ``ce_id`` counts, or else ``id``,
which Debezium's outbox router writes too. An id that is not a UUID becomes one: a hash of it and of its source. With a
key, the header of that name counts before both, unless it has the same value: what the relay sends for an event without
an idempotency key of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from uuid import UUID

from outbox.consumer.ids import key_id, uuid8
from outbox.consumer.messages import headers_again
from outbox.event import AGGREGATE_TYPE, CE_ID, CE_SOURCE, ID
from outbox.inbox.errors import MessageIdMissing

_UUID: Final = re.compile(rb"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def message_id(message: object, key: str | None = None) -> UUID:
    """Return the id of a message's event.

    message  of confluent-kafka; any object whose ``headers``, as an attribute or a method, are a mapping or pairs of
             name and value, such as aiokafka's and FastStream's; headers themselves; or an id, as a UUID.
    key      the name of the header by which messages are recognized that have it.

    Raises MessageIdMissing.
    """
    if isinstance(message, UUID):
        return message
    headers = _named(message)
    given = headers.get(CE_ID)
    if given is None:
        given = headers.get(ID)
    raw = _bytes(given)
    own = b"" if key is None else _bytes(headers.get(key))
    if own and own != raw:
        return UUID(key_id(_bytes(headers.get(CE_SOURCE)), _bytes(headers.get(AGGREGATE_TYPE)), own))
    if not raw:
        raise MessageIdMissing(
            f"{_where(message)} has no id: neither a header ce_id nor a header id. Messages of the relay have one; for "
            "others give the id itself, a UUID"
        )
    if _UUID.fullmatch(raw):
        return UUID(raw.decode())
    # Two sources may use the same id (CloudEvents: source and id together are unique).
    return UUID(uuid8(_bytes(headers.get(CE_SOURCE)) + b"\0" + raw))


def _named(message: object) -> Mapping[str, Any]:
    """Return a message's headers by name. If several have one name, the first counts."""
    headers: Any = getattr(message, "headers", message)
    if callable(headers):
        headers = headers_again(message)
    if headers is None:
        return {}
    if isinstance(headers, Mapping):
        return headers
    if isinstance(headers, Iterable) and not isinstance(headers, str | bytes):
        return dict(reversed([(name, value) for name, value in headers]))
    raise MessageIdMissing(f"a {type(message).__name__} is no message: it has no headers")


def _bytes(value: object) -> bytes:
    match value:
        case None:
            return b""
        case str():
            return value.encode("utf-8", "surrogateescape")
        case UUID():
            return str(value).encode()
        case bytes() | bytearray() | memoryview():
            return bytes(value)
    raise MessageIdMissing(f"the id in a message's headers is a {type(value).__name__}, neither text nor bytes")


def _where(message: object) -> str:
    try:
        topic, partition, offset = (
            part() if callable(part := getattr(message, name)) else part for name in ("topic", "partition", "offset")
        )
    except AttributeError:
        return "the message"
    return f"the message {topic}-{partition} offset {offset}"
