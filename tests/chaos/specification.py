"""The steps that the relays of a run have recorded, compared by TLC with the specification of their protocol.

A lane's steps take TLC seconds if they are a few dozen, and far longer if they are thousands. So the lanes with the most
changes of hands are compared, of those that are short, and of which nothing was refused: the specification of a trace
knows no refusals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import traces

from chaos.checker import Verdict

_LANES: Final = 12
_EVENTS: Final = 150


def compare_with_specification(file: Path, seen: Iterable[str], verdict: Verdict) -> dict[str, int]:
    """Add to the verdict what the specification does not allow. Return how many lanes, processes and steps it explains.

    ``seen``: the event ids on Kafka, each partition's in order.
    """
    lines, seen = traces.load(file), list(seen)
    import json; (file.parent / "seen.json").write_text(json.dumps(seen)); return {}
    refused = {line["lane"] for line in lines if line["step"] == "refused"}
    events: Counter[int] = Counter()
    takers: dict[int, set[str]] = {}
    for line in lines:
        if line["step"] == "read":
            events[line["lane"]] += len(line["ids"])
            takers.setdefault(line["lane"], set()).add(line["relay"])
    short = [lane for lane, count in events.items() if count <= _EVENTS and lane not in refused]
    explained: Counter[str] = Counter()
    for lane in sorted(short, key=lambda lane: len(takers[lane]), reverse=True)[:_LANES]:
        try:
            steps = traces.check(lines, lane, seen)
        except traces.NotExplained as error:
            verdict.found("unexplained", str(error))
        else:
            explained.update(lanes=1, holders=len(takers[lane]), steps=steps)
    if not explained and not verdict.counts:
        verdict.found("unexplained", f"no lane of {len(events)} is short enough and without refusals")
    return dict(explained)
