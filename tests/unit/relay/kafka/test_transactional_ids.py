"""The transactional ids that a relay goes on under when a broker does not lend the ones it had."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from relay import wiring
from relay.config import load
from relay.core.ports import IdBusy
from relay.parts import build_topics


def test_the_ids_that_are_remembered_do_not_grow_with_the_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, set[str]]] = []

    def publisher(*_: Any, base_id: str, takeover: Any, **__: Any) -> Any:
        known = takeover._own_bases
        if made and base_id == made[-1][0]:
            raise IdBusy("its last transaction can't be ended yet")
        made.append((base_id, known))
        return SimpleNamespace()

    monkeypatch.setattr(wiring, "TransactionalPublisher", publisher)
    settings = load(delivery="exactly-once", kafka={"bootstrap.servers": "127.0.0.1:1"})
    new = wiring._publisher(settings, build_topics(settings))
    source: Any = SimpleNamespace(store=SimpleNamespace(lane_count=lambda: 4))
    for _ in range(1000):
        new(source)
    assert len({base for base, _ in made}) == 1000
    # The one before needs no fence, and neither do the last few.
    assert all(before[0] in known for before, (_, known) in pairwise(made))
    assert max(len(known) for _, known in made) <= 16
