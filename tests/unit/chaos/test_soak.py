"""``make soak``: its course, what is said of its samples, and how they are drawn."""

from __future__ import annotations

import json

import pytest
from chaos import table
from chaos.course import MEMBER_FAULTS, RELAY_FAULTS, SERVER_FAULTS, Configuration
from chaos.samples import FIGURES, MEMORY, OLDEST, SIZE, UNAPPLIED, Finding, judge, load
from chaos.soak import soak_course

LONG = Configuration("wal", "exactly-once", 1, 5400.0, operators=False, consumers="both", rate=500.0)


def test_each_minute_has_a_fault_and_its_dead_letters_are_discarded():
    course = soak_course(1, LONG)
    assert course == soak_course(1, LONG)
    faults = sorted((*course.faults, *course.member_faults), key=lambda each: each.at)
    assert [each.at for each in faults] == [60.0 * minute for minute in range(1, 90)]
    assert {each.name for each in faults} == {*RELAY_FAULTS, *MEMBER_FAULTS, *SERVER_FAULTS}
    assert faults != sorted(
        (*soak_course(2, LONG).faults, *soak_course(2, LONG).member_faults), key=lambda each: each.at
    )
    assert {act.name for act in course.acts} == {"discard"}
    assert len(course.acts) == 89
    assert not any(course.failpoints)
    assert LONG.audited


def life(begin: float, minutes: float, value) -> list[tuple[float, float]]:
    """A life with a sample each five seconds; ``value`` of a second."""
    return [(begin + 5.0 * step, value(5.0 * step)) for step in range(round(12 * minutes))]


def one(lives, figure: str = MEMORY, name: str = "relay") -> Finding:
    (found,) = judge({(figure, name): {str(number): each for number, each in enumerate(lives)}})
    return found


def test_what_stays_is_flat_and_what_rises_all_the_time_grows():
    assert one([life(0, 90, lambda at: 80 + at % 50)]).verdict == "flat"
    found = one([life(0, 90, lambda at: 80 + at / 50)])
    assert (found.verdict, found.lives) == ("grows", 1)
    assert 65 < found.growth < 75
    assert found.last - found.first == pytest.approx(found.growth, abs=0.2)


def test_a_process_that_warms_up_is_flat():
    assert one([life(0, 9, lambda at: 200 * min(at, 115) / 115)]).verdict == "flat"


def test_each_life_is_compared_with_itself():
    """The last life has less than the first, and each of them grows."""
    lives = [life(1200.0 * number, 20, lambda at, number=number: 400 - 100 * number + at / 8) for number in range(4)]
    found = one(lives)
    assert (found.verdict, found.lives) == ("grows", 4)
    # The other way round: each is flat, the next one higher.
    assert (
        one([life(1200.0 * each, 20, lambda _, each=each: 100.0 + 100 * each) for each in range(4)]).verdict == "flat"
    )


def test_lives_that_are_short_do_not_count_beside_long_ones():
    short = [life(300.0 * number, 9, lambda at: at) for number in range(9)]
    assert one([*short, life(0, 30, lambda _: 80.0)]).verdict == "flat"
    assert one([*short[:3], life(0, 30, lambda at: at)]).verdict == "grows"


def test_a_peak_at_a_fault_is_no_growth():
    assert one([life(0, 90, lambda at: 500.0 if 5000 < at < 5300 else 0.5)], OLDEST, "outbox").verdict == "flat"


def test_a_backlog_that_is_worked_off_is_no_growth_and_one_that_gets_higher_is():
    """For half of the last third it is high, as other programs used the processors."""
    burst = one([life(0, 90, lambda at: 15_000 if 3600 < at < 4600 else at % 300)], UNAPPLIED, "effects")
    assert (burst.verdict, burst.lives) == ("flat", 1)
    assert one([life(0, 90, lambda at: at + 4_000 * (at % 60 < 5))], UNAPPLIED, "effects").verdict == "grows"


def test_so_little_is_no_growth():
    slack = FIGURES[MEMORY].slack
    for rise, verdict in ((slack - 1, "flat"), (slack + 1, "grows")):
        assert one([life(0, 30, lambda at, rise=rise: 80 + rise * (at > 900))]).verdict == verdict
    assert one([life(0, 30, lambda at: 1000 + 90 * (at > 900))]).verdict == "flat"


def test_what_is_sampled_too_briefly_gets_no_verdict():
    assert one([life(0, 6.5, lambda at: at)]).verdict == "too short"


def test_an_archive_grows_until_it_is_old_enough():
    assert one([life(0, 90, lambda at: at)], SIZE, "outbox.published").verdict == "kept"
    assert one([life(0, 90, lambda at: at)], SIZE, "outbox.events").verdict == "grows"


def test_samples_are_read_by_life(tmp_path):
    file = tmp_path / "samples.jsonl"
    lines = [{"at": at, "values": [[MEMORY, "relay", str(at // 10), 80 + at], [SIZE, "t", "", 1]]} for at in (5, 9, 15)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load(file) == {
        (MEMORY, "relay"): {"0": [(5, 85), (9, 89)], "1": [(15, 95)]},
        (SIZE, "t"): {"": [(5, 1), (9, 1), (15, 1)]},
    }


def test_the_page_has_a_section_for_the_last_soak(tmp_path):
    rows, page = tmp_path / "chaos.jsonl", tmp_path / "chaos.md"
    rows.write_text("")
    table.write(rows, page)
    assert "## Soak" not in page.read_text()
    finding = {"figure": MEMORY, "name": "relay", "verdict": "flat", "lives": 2, "first": 80.0, "last": 81.5}
    finding["growth"] = 1
    row = {"seconds": 5400.0, "struck": [60.0], "rate": 500.0, "events": 2500000, "source": "wal"}
    row |= {"delivery": "exactly-once", "anomalies": {}, "recovery_p50": 1.9, "recovery_max": 11.6}
    other = {**finding, "name": "inbox", "growth": 0.5}
    row["findings"] = [finding, other, {**finding, "verdict": "too short"}]
    (tmp_path / "soak.json").write_text(json.dumps(row))
    table.write(rows, page)
    text = page.read_text()
    assert "2,500,000 committed events, 1 faults, 0 anomalies" in text
    assert text.endswith("| memory | 2 | relay | 80 | 81.5 | flat |\n")
    row["findings"] = [finding, {**other, "verdict": "grows"}]
    (tmp_path / "soak.json").write_text(json.dumps(row))
    table.write(rows, page)
    assert page.read_text().endswith("| memory | 2 | inbox | 80 | 81.5 | **grows**: inbox |\n")
