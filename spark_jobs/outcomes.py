"""The outcomes of an attempt at a range, and the exceptions by which a sink ends its transaction; see ``sink``."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from outbox.consumer.model import RejectedRecord


class RangeOutcome(StrEnum):
    """What became of a range, as its task reports it to the driver.

    | outcome                | what follows                                                                     |
    |------------------------|----------------------------------------------------------------------------------|
    | APPLIED, ALREADY       | the range is done; ALREADY: an earlier attempt had applied it; or, of dead       |
    |                        | letters to retry, one no longer exists, and the others are tried again           |
    | EMPTY                  | no row came: the driver moves the offset                                         |
    | REJECTED               | the driver runs the range again without the messages that ``detail`` names       |
    | FALLBACK               | again, through ``batch`` instead of directly into the sink's table               |
    | COPY_ERROR             | again, in the lenient way, which names the rejected messages                     |
    | FENCED, BROKEN         | the job ends                                                                     |
    | MOVED                  | another attempt has moved the offset into the range: the round is planned again  |
    | DENIED and those below | nothing was applied; a retry may succeed, and the driver decides when            |
    """

    APPLIED = "applied"
    ALREADY = "already"
    EMPTY = "empty"
    REJECTED = "rejected"
    FALLBACK = "fallback"
    COPY_ERROR = "copy error"
    FENCED = "fenced"
    BROKEN = "broken"
    MOVED = "moved"
    DENIED = "denied"
    CORRUPT = "corrupt"
    CUT = "cut"
    INTERRUPTED = "interrupted"
    UNAVAILABLE = "unavailable"


class RejectedRecords(Exception):
    """Ends the transaction: the next attempt must leave these messages out. Each is listed once, whatever its rows.

    The list need not be complete: the next attempt may find others.
    """

    def __init__(self, found: Sequence[RejectedRecord]) -> None:
        self.found = list({record.place: record for record in reversed(found)}.values())[::-1]
        super().__init__(f"{len(self.found)} messages can't be applied; the first: {self.found[0]}")


class EffectError(Exception):
    """Ends the transaction: the effect fails, and no message is at fault."""


class CopyError(Exception):
    """Ends the transaction: a value does not fit its column. The next attempt finds out which."""


class FallbackToBatch(Exception):
    """Ends the transaction: a direct copy is not possible. The next attempt of the range goes through ``batch``."""
