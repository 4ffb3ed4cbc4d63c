"""The values of settings that are one of a few words. Imports nothing, so that any part can compare with them."""

from __future__ import annotations

from enum import StrEnum


class Delivery(StrEnum):
    """The delivery guarantee for readers of the topics."""

    AT_MOST_ONCE = "at-most-once"
    AT_LEAST_ONCE = "at-least-once"
    EXACTLY_ONCE = "exactly-once"


class SourceKind(StrEnum):
    """The source of the relay's events."""

    POLLING = "polling"
    WAL = "wal"


class OnFailure(StrEnum):
    """What happens to later events of a key after a dead letter. During retries they always wait."""

    BLOCK = "block"
    """They wait until an operator retries or discards it: the order of the key is never broken."""
    SKIP = "skip"
    """They are published without it."""


class HeaderSet(StrEnum):
    """The sets of headers that a message carries in addition to its own headers and ``content-type``."""

    BOTH = "both"
    CLOUDEVENTS = "cloudevents"
    DEBEZIUM = "debezium"


class Payloads(StrEnum):
    """Whether the page shows payloads and headers."""

    HIDDEN = "hidden"
    SHOWN = "shown"
