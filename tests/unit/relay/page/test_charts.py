"""Charts: their scale, their times, and what is shown under the mouse."""

from __future__ import annotations

from relay.page.charts import HEIGHT, WIDTH, chart, charts
from relay.page.sampling import Latency, Sample

NOON = 1_790_000_000.0


def sample(at: float, **values: object) -> Sample:
    unknown = dict.fromkeys(("backlog", "oldest_seconds", "written", "published", "applied", "latency"))
    return Sample(**{"at": at, **unknown, "topics": {}, "lags": {}, **values})


def test_a_line_ends_at_the_newest_value_and_breaks_where_none_is_known():
    found = chart("T", [NOON, NOON + 1, NOON + 2, NOON + 4], [("a", [4.0, None, 10.0, 5.0])], str)
    assert found.top == "10.0"
    assert found.lines[0].latest == "5.0"
    assert found.lines[0].pieces == [f"0.0,{HEIGHT * 0.6:.1f}", f"300.0,0.0 {WIDTH}.0,{HEIGHT / 2}"]
    assert found.times == ["14:13:20", "14:13:22", "14:13:24"]
    assert found.columns[-1].text == "14:13:24\na 5.0"
    assert "a unknown" in found.columns[1].text


def test_of_many_samples_some_are_drawn_and_the_newest_is_one_of_them():
    count = 7_201
    found = chart("T", [NOON + at for at in range(count)], [("a", [float(at) for at in range(count)])], str)
    assert found.lines[0].latest == "7200.0"
    assert len(found.lines[0].pieces[0].split()) <= 300
    assert len(found.columns) == 60


def test_the_groups_and_topics_with_most_are_shown():
    lags = {f"g{number}": number for number in range(9)}
    samples = [
        sample(NOON, lags={"gone": 5}, topics={"orders": 3.0}),
        sample(NOON + 1, lags={**lags, "away": None}, latency=Latency(0.1, 0.2)),
    ]
    found = charts(samples)
    assert [line.name for line in found["lag"].lines] == ["g8", "g7", "g6", "g5", "g4", "g3"]
    assert [(line.name, line.latest) for line in found["topics"].lines] == [("orders", "unknown")]
    assert [line.latest for line in found["latency"].lines] == ["100 ms", "200 ms"]
