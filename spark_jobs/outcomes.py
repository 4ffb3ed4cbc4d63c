"""How a sink says why the transaction of a range was not committed; see ``sink``."""

from __future__ import annotations

from collections.abc import Sequence

from outbox.consumer.model import RejectedRecord


class RejectedRecords(Exception):
    """Ends the transaction: the next attempt must leave these messages out. Each is listed once, whatever its rows.

    The list need not be complete: the next attempt may find others.
    """

    def __init__(self, found: Sequence[RejectedRecord]) -> None:
        self.found = list({culprit.place: culprit for culprit in reversed(found)}.values())[::-1]
        super().__init__(f"{len(self.found)} messages can't be applied; the first: {self.found[0]}")


class EffectError(Exception):
    """Ends the transaction: the effect fails, and no message is at fault."""


class CopyError(Exception):
    """Ends the transaction: a value does not fit its column. The next attempt copies text, to find out which."""


class FallbackToBatch(Exception):
    """Ends the transaction: a direct copy is not possible. The next attempt of the range goes through ``batch``."""
