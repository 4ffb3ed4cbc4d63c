"""What the protocol's model varies: answers, deliveries, variants of the protocol that are right, and mutations."""

from __future__ import annotations

from typing import Final

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

# What a worker could get wrong.
MUTATIONS: Final = {
    "id_before_fence": "acquire writes the own id before the former one is fenced",
    "leases_before_init": "after being fenced the leases are read first; producers are made when the next turn is sent",
    "null_while_open": "a lane is released with the id NULL while a transaction with it is open",
    "read_before_fence": "the marker is read before the former ids are fenced",
    "read_before_init": "after an unclean commit the marker is read before init_transactions",
    "lso_only": "the marker is read up to the last stable offset; an undecided transaction is ignored",
    "fence_first_only": "only the first of the two former ids is fenced",
    "fence_second_only": "only the second of the two former ids is fenced",
    "fence_remembered": "a former id that was fenced before is not fenced again for a lane acquired later",
    "turn_after_unknown": "turn k + 1 begins on the other producer although turn k's outcome is unknown",
    "no_last_batch": "settling does not expect last_batch",
    "no_epoch": "no statement asks for the epoch",
    "no_epoch_in_adopt": "the statement that takes over does not ask for the epoch",
    "no_epoch_in_turn": "the statement of the turn does not ask for the epoch",
    "no_id_in_turn": "the statement of the turn does not ask for the own id",
    "own_id_not_written": "taking over leaves the former id in the row",
    "own_lane_in_turn": "a lane taken back under the own id: its marker is read while a turn is being sent",
    "alo_no_fence": "an at-least-once worker takes over without fencing",
    "alo_no_settle": "an at-least-once worker fences and does not settle the marker's rows",
    "alo_null_first": "an at-least-once worker writes NULL when it acquires",
    "commit_unconfirmed": "what was produced before the statement is committed before it as well",
    "no_flush_barrier": "the statement of the turn commits without waiting for the flush",
    "empty_commit": "a statement with nothing to settle writes no WAL, so that its commit flushes nothing",
    "unnoticed_crash": "reads, and makes durable in the next transaction, on a connection that outlives a crash",
    "settle_before_ack": "rows are deleted when they are read",
    "marker_first": "the markers are committed in a transaction of their own, before the events",
    "reuse_producer": "after an unclean commit the same producers go on",
    "trust_doubled_commit": "a commit that raised nothing is clean, though EndTxn was sent twice",
    "resend_refused": "after a refused message its producer is initialized and sends the turn in hand again",
    "resend_blind": "after a failure the turn is sent again without reading the markers",
    "adopt_without_settling": "taking over does not delete the marker's rows",
    "async_acquire": "a lane is taken with synchronous_commit=off",
}
