"""An operator has asked the provider, and says that it has nothing under a key."""

from __future__ import annotations

from collections import Counter

import pytest
from external_support import outbox_cli, payments, provider, sink

from outbox.external.reservations import Chosen, ReservationAdmin

__all__ = ["outbox_cli", "provider", "sink"]


@pytest.mark.parametrize("through", ["the method", "the command"])
def test_a_cancellation_that_the_provider_does_not_know_is_made_as_if_for_the_first_time(
    sink, provider, outbox_cli, through
):
    """The charge stands. The cancellation never came through, and waited until its key could have been forgotten."""
    external = payments(provider.url, cancel=True, key_seconds=0.001)
    provider.tell("o", "done-drop")
    provider.tell("cancel o", "drop")
    (message_id,) = sink.reserve(external, ["o"])
    assert sink.drain(external) == {"attempts": 1, "retrying": 1, "stuck": 1}
    with sink.connect() as connection:
        desk = ReservationAdmin(connection, "consumer")
        desk.cancel(Chosen(), "customer left")
        assert sink.drain(external) == {"attempts": 1, "retrying": 1, "stuck": 1}
        assert "forgotten the key of the cancellation" in desk.find(Chosen())[0]["last_error"]
        desk.retry(Chosen())
        assert sink.drain(external) == {"stuck": 1}
        assert provider.standing() == Counter(["o"])
        if through == "the method":
            desk.retry(Chosen(message_ids=[message_id]), not_done=True)
        else:
            outbox_cli("external", "retry", str(message_id), "--not-done", "--json")
    assert sink.drain(external) == {"attempts": 1, "cancelled": 1}
    assert (provider.effects(), provider.standing()) == (["o"], Counter())
    assert sink.orders() == {"o": ("cancelled", 1)}
    keys = [key for _, _, key, _ in provider.requests(path="/cancel")]
    assert keys == [f"{message_id}:cancel"] * 2
    assert len(provider.requests("o", "/charges")) == 1
