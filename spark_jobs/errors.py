"""The errors of Spark's consumers, in addition to those of every consumer (``outbox.consumer.errors``)."""

from __future__ import annotations

from outbox.consumer.errors import ConsumerError, ConsumerUnavailable


class BadMessage(ConsumerError):
    """A message can't be decoded, or has no usable id. The group stopped before it."""


class Reject(Exception):
    """Raised by an effect that is a function: these messages can't be applied; the others are.

    why          shown with the dead letter.
    message_ids  one or more, from the table that the effect was given.
    """

    def __init__(self, why: str, *message_ids: str) -> None:
        if not message_ids:
            raise TypeError("Reject: name the message_id of at least one message")
        super().__init__(why)
        self.why = why
        self.message_ids = message_ids


class CheckpointConflict(ConsumerError):
    """A stream's batch does not follow the sink's last one: applying it might duplicate or lose rows.

    state  what the sink has, as ``exactly_once(job, accept=…)`` and the option ``accept`` take it.
    """

    def __init__(self, text: str, state: str = "") -> None:
        super().__init__(text)
        self.state = state


class StagedRowsLost(ConsumerUnavailable):
    """Staged rows are gone: Postgres crashed, or another driver of the group dropped them.

    Nothing of the batch was applied. A round stages them again; a query of the format "outbox" must be started again.
    """


class InputCut(ConsumerError):
    """A task's rows ended early: something upstream failed. None was committed."""


class WorkerLost(ConsumerError):
    """A Python worker or an executor ended within a range, of which nothing was committed."""
