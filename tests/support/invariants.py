"""The invariants of docs/explanation/protocol.tla, by which tests say what a mistake breaks."""

from __future__ import annotations

from enum import StrEnum


class Invariant(StrEnum):
    """Names of the specification. Explained in docs/explanation/protocol.md."""

    NO_DOUBLE = "NoDouble"
    ONLY_WHAT_WAS_IN_FLIGHT_TWICE = "OnlyWhatWasInFlightTwice"
    NO_LOSS = "NoLoss"
    ORDER_OF_A_KEY = "OrderOfAKey"
    NOTHING_LEFT_BEHIND = "NothingLeftBehind"
    EACH_IS_PUBLISHED = "EachIsPublished"
