"""Which messages wait behind a dead letter of their key, with ``keep_order``."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.consumer.letters import BEHIND, DeadLetter
from outbox.consumer.model import MessageRef, RejectedRecord

if TYPE_CHECKING:
    from spark_jobs.task.incoming import Incoming, Messages

KeysToLetters = Mapping[str, Mapping[bytes, MessageRef | None]]
"""Topic → key → dead letter. Behind it are the later messages of its partition, and all messages of the key in other
partitions. None stands for a dead letter of an earlier round: all messages of the key are behind it."""


def offsets_behind(keys: KeysToLetters, messages: Messages) -> list[int]:
    """Return the offsets of the messages that come after a dead letter of their key."""
    dead = keys.get(messages.topic, {})
    found = []
    for offset, key in zip(messages.offsets, messages.keys, strict=True):
        if key is not None and key in dead:
            letter = dead[key]
            if letter is None or messages.part != letter[1] or offset > letter[2]:
                found.append(offset)
    return found


@dataclass(frozen=True, slots=True)
class Behind:
    """Which messages wait behind a dead letter of an earlier round.

    The task finds them as it reads, and puts them aside in the transaction that applies the others, so the range is
    read only once. A task may put ``share`` messages aside by itself; in sum, the shares are what ``max_dead`` still
    allows. A range with more is not applied: its messages are rejected, and the driver counts those of all
    partitions.

    keys   the keys of the dead letters, by topic.
    share  how many messages of each range the task may put aside by itself.
    """

    keys: Mapping[str, AbstractSet[bytes]]
    share: int

    def divided(self, messages: Messages, most: int, incoming: Incoming) -> tuple[Messages, list[DeadLetter]]:
        """Return the messages that are not behind a dead letter, and at most ``most`` of those that are."""
        keys = self.keys.get(messages.topic, frozenset())
        behind = [number for number, key in enumerate(messages.keys) if key in keys]
        if not behind:
            return messages, []
        others = [number for number, key in enumerate(messages.keys) if key not in keys]
        letters = incoming.letters(messages.only(behind[:most]), lambda ref: RejectedRecord(ref, "behind", BEHIND))
        return messages.only(others), letters
