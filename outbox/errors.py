"""The errors of this project; each derives from OutboxError.

The message says what happened, to what, and what to do about it; the attributes carry the same facts for programs.
"""

from __future__ import annotations


class OutboxError(Exception):
    """The base of all errors raised by outbox, relay and spark_jobs."""


class ConfigurationError(OutboxError):
    """A setting is missing, malformed, or incompatible with the chosen delivery."""


class MissingExtra(ConfigurationError):
    """An optional package is not installed. ``extra`` names the extra that installs it."""

    def __init__(self, extra: str, package: str, problem: str = "is not installed") -> None:
        super().__init__(f"{package} {problem}; run: pip install 'outbox-kafka[{extra}]'")
        self.extra = extra
        self.package = package


class EventError(OutboxError):
    """An event can't be written as it is. Nothing was sent to the database.

    ``field`` names the invalid part, as the caller spells it (``payload``, ``headers['x']`` …).
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PayloadError(EventError):
    """The payload can't be encoded as the bytes of a Kafka message."""


class SchemaMismatch(PayloadError):
    """The payload does not fit its schema. ``field`` names the place inside it, ``subject`` the schema's subject."""

    def __init__(self, field: str, problem: str, subject: str) -> None:
        super().__init__(field, f"{problem} (schema of {subject})")
        self.subject = subject


class SchemaRefused(EventError):
    """The schema registry does not have the event's schema, or refuses it. ``subject`` is the schema's subject."""

    def __init__(self, subject: str, problem: str) -> None:
        super().__init__("payload", f"subject {subject}: {problem}")
        self.subject = subject


class EventTooLarge(EventError):
    """Payload, key and headers together exceed the limit. ``size`` and ``limit`` are in bytes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            "payload",
            f"the event takes {size:,} bytes with its key and headers, the limit is {limit:,}; "
            "store the large part elsewhere and send a reference to it",
        )
        self.size = size
        self.limit = limit


class IdempotencyKeyReused(EventError):
    """The idempotency key is that of another event of this aggregate type.

    Nothing of the call was written, unless another transaction committed the key meanwhile: then roll back.
    """

    def __init__(self, key: str, kind: str, first: tuple[str, str], event_id: object) -> None:
        aggregate_id, event_type = first
        super().__init__(
            "idempotency_key",
            f"{key!r} of {kind} is the key of another event, {event_type} of {aggregate_id!r} ({event_id}): "
            "a key names one event; put into it what tells the two apart",
        )


class SchemaRegistryUnavailable(OutboxError):
    """The schema registry was unavailable or returned an error. Nothing was written; retry."""


class TargetError(OutboxError):
    """The session or connection given to ``add`` is of no known kind, in no transaction, or returns text as bytes."""


class SchemaError(OutboxError):
    """The outbox's tables are missing or differ from what this version needs."""

    @classmethod
    def refused(cls, text: str, *, denied: bool, options: str = "") -> SchemaError:
        """Return the error of a statement that met missing tables or, if ``denied``, missing rights.

        options  of the command that creates the tables: " --consumer" for those of the consumers.
        """
        if denied:
            return cls(f"{text}; grant it: `outbox db roles` prints the rights of each kind of role")
        return cls(f"{text}; run `outbox db upgrade{options}` (`outbox db check{options}` shows what is missing)")


class TablesInUse(SchemaError):
    """Others' transactions kept the tables locked for as long as a change may wait; nothing was changed."""


class NotFound(OutboxError):
    """The object that an operator named does not exist, or its state does not allow the operation."""


class OperationRefused(OutboxError):
    """The operation is not possible now, or would lose something.

    Nothing was changed. The text says what to do first.
    """
