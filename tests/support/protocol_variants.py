"""What the protocol's model varies: answers, deliveries, variants of the protocol that are right, and mutations."""

from __future__ import annotations

from typing import Final

from invariants import Invariant

ANSWERS: Final = ("ok", "lost", "delayed", "doubled")
EXACTLY: Final = "exactly-once"
AT_LEAST: Final = "at-least-once"
# Variants of the right protocol, in the same list as the mutations.
SPLIT_FETCH: Final = "split_fetch"  # reading and the statement are two steps, as they are in the relay
PRODUCE_FIRST: Final = "produce_first"  # the statement comes at any time between reading and EndTxn
CONCURRENT: Final = "concurrent"  # lanes are taken while a transaction is open, as by a thread of their own
RENEW: Final = "renew"  # a worker whose last transaction can't be ended goes on under a new base id
REPLACE: Final = (
    "replace"  # after a refused message only its producer is initialized again, before a later turn is read
)

# What a worker could get wrong, and the invariant that a shortest way breaks.
MUTATIONS: Final = {
    "id_before_fence": ("acquire writes the own id before the former one is fenced", Invariant.NO_DOUBLE),
    "leases_before_init": (
        "after being fenced the leases are read first; producers are made when the next turn is sent",
        Invariant.NO_DOUBLE,
    ),
    "null_while_open": ("a lane is released with the id NULL while a transaction with it is open", Invariant.NO_DOUBLE),
    "read_before_fence": ("the marker is read before the former ids are fenced", Invariant.NO_DOUBLE),
    "read_before_init": ("after an unclean commit the marker is read before init_transactions", Invariant.NEVER_STOPS),
    "lso_only": (
        "the marker is read up to the last stable offset; an undecided transaction is ignored",
        Invariant.NEVER_STOPS,
    ),
    "fence_first_only": ("only the first of the two former ids is fenced", Invariant.NO_DOUBLE),
    "fence_second_only": ("only the second of the two former ids is fenced", Invariant.NO_DOUBLE),
    "fence_remembered": (
        "a former id that was fenced before is not fenced again for a lane acquired later",
        Invariant.NO_DOUBLE,
    ),
    "turn_after_unknown": (
        "turn k + 1 begins on the other producer although turn k's outcome is unknown",
        Invariant.NO_LOSS,
    ),
    "no_last_batch": ("settling does not expect last_batch", Invariant.NO_DOUBLE),
    "no_epoch": ("no statement asks for the epoch", Invariant.NEVER_STOPS),
    "no_epoch_in_adopt": ("the statement that takes over does not ask for the epoch", Invariant.NEVER_STOPS),
    "no_epoch_in_turn": ("the statement of the turn does not ask for the epoch", Invariant.NO_DOUBLE),
    "no_id_in_turn": ("the statement of the turn does not ask for the own id", Invariant.NO_DOUBLE),
    "own_id_not_written": ("taking over leaves the former id in the row", Invariant.NO_DOUBLE),
    "own_lane_in_turn": (
        "a lane taken back under the own id: its marker is read while a turn is being sent",
        Invariant.NO_DOUBLE,
    ),
    "alo_no_fence": ("an at-least-once worker takes over without fencing", Invariant.NO_DOUBLE),
    "alo_no_settle": ("an at-least-once worker fences and does not settle the marker's rows", Invariant.NO_DOUBLE),
    "alo_null_first": ("an at-least-once worker writes NULL when it acquires", Invariant.NO_DOUBLE),
    "commit_unconfirmed": (
        "what was produced before the statement is committed before it as well",
        Invariant.NOTHING_LEFT_BEHIND,
    ),
    "no_flush_barrier": (
        "the statement of the turn commits without waiting for the flush",
        Invariant.NOTHING_LEFT_BEHIND,
    ),
    "empty_commit": (
        "a statement with nothing to settle writes no WAL, so that its commit flushes nothing",
        Invariant.NOTHING_LEFT_BEHIND,
    ),
    "unnoticed_crash": (
        "reads, and makes durable in the next transaction, on a connection that outlives a crash",
        Invariant.NOTHING_LEFT_BEHIND,
    ),
    "settle_before_ack": ("rows are deleted when they are read", Invariant.NO_LOSS),
    "marker_first": ("the markers are committed in a transaction of their own, before the events", Invariant.NO_LOSS),
    "reuse_producer": ("after an unclean commit the same producers go on", Invariant.NO_DOUBLE),
    "trust_doubled_commit": (
        "a commit that raised nothing is clean, though EndTxn was sent twice",
        Invariant.NO_DOUBLE,
    ),
    "resend_refused": (
        "after a refused message its producer is initialized and sends the turn in hand again",
        Invariant.NO_DOUBLE,
    ),
    "resend_blind": ("after a failure the turn is sent again without reading the markers", Invariant.NO_DOUBLE),
    "adopt_without_settling": ("taking over does not delete the marker's rows", Invariant.NO_DOUBLE),
    "async_acquire": ("a lane is taken with synchronous_commit=off", Invariant.NEVER_STOPS),
}
