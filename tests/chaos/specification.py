"""The steps that the relays of a run have recorded, compared by TLC with the specification of their protocol.

TLC takes seconds for a few dozen steps, and far longer for thousands. So those lanes are compared that changed hands
most and in which nothing was refused (the specification of a trace knows no refusals, nor what they do to the lanes of
their transaction), and of these what is short.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import traces

from chaos.checker import Verdict
from chaos.history import Place

_LANES: Final = {"at-least-once": 4, "exactly-once": 12}
"""How many lanes are compared. At-least-once, each of a lane's partitions is compared."""
_EVENTS: Final = 40


def compare_with_specification(
    file: Path, delivery: str, seen: Mapping[Place, list[str]], verdict: Verdict
) -> dict[str, int]:
    """Add to the verdict what the specification does not allow. Return how much of lanes, holders, steps it explains,
    and how many lanes were left out because of refusals.

    ``seen``: the event ids on Kafka, in order.
    """
    lines = traces.load(file)
    refused = {line["lane"] for line in lines if line["step"] == "refused"}
    holders: dict[int, set[str]] = {}
    for line in lines:
        if line["step"] == "read" and line["lane"] not in refused:
            holders.setdefault(line["lane"], set()).add(line["relay"])
    places = {event: place for place, events in seen.items() for event in events}
    explained: Counter[str] = Counter()
    for lane in sorted(holders, key=lambda lane: len(holders[lane]), reverse=True):
        if explained["lanes"] == _LANES[delivery]:
            break
        if delivery == "at-least-once":
            parts = [(part, seen[place]) for place, part in traces.partitions(lines, lane, places).items()]
        else:
            parts = [(lines, [event for events in seen.values() for event in events])]
        short = [(part, events) for part, events in parts if traces.events(part, lane) <= _EVENTS]
        for part, events in short:
            explained.update(_explain(part, lane, events, verdict))
        if short:
            explained.update(lanes=1, holders=len(holders[lane]))
    if not explained["steps"] and "unexplained" not in verdict.counts:
        verdict.found("unexplained", "nothing is short enough and without refusals")
    return dict(explained) | {"refused": len(refused)}


def _explain(part: Sequence[traces.Line], lane: int, events: Sequence[str], verdict: Verdict) -> dict[str, int]:
    """Return how many steps TLC has explained. It may take too long: then nothing is known of them."""
    try:
        return {"steps": traces.check(part, lane, events)}
    except traces.NotExplained as error:
        verdict.found("unexplained", str(error))
    except subprocess.TimeoutExpired:
        return {"given up": 1}
    return {}
