"""The messages of strangers in ``make chaos``: what is to become of each is what the members of the run make of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from chaos.history import STRANGER
from chaos.member import _checked
from chaos.strangers import _marked
from hostile_messages import MESSAGES, HostileMessage


class Received:
    """A message as a member gets it."""

    def __init__(self, message: HostileMessage) -> None:
        self._message = message

    def value(self) -> bytes | None:
        return self._message.value

    def headers(self) -> Sequence[tuple[str, bytes | None]]:
        return [(name.decode(), value) for name, value in self._message.headers.items()]


FIT = [each for each in MESSAGES if each.undecodable is None]


@pytest.mark.parametrize("message", FIT, ids=[each.name for each in FIT])
def test_what_is_to_become_of_a_message(message):
    drawn = _marked(random.Random(1), message)
    try:
        _checked(Received(drawn))
    except Exception:  # noqa: BLE001 - whatever it is, the message becomes a dead letter
        outcome = b"dead"
    else:
        outcome = b"applied"
    assert drawn.headers[STRANGER.encode()] == outcome
