"""The marker's record and the table of what follows from it."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.core.marker import Identity, Marker, StateLost, resume

_SYSTEM = "7300000000000000001"
_HERE = Identity(_SYSTEM, 1, "db.outbox")
_NUMBERS = st.integers(0, 2**63 - 1)
# JSON as orjson can write it, with what is likely to hurt: huge and negative numbers, texts that are no numbers.
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _markers(draw: st.DrawFn) -> Marker:
    positions = sorted(draw(st.sets(_NUMBERS, max_size=20)))
    event_ids = draw(st.lists(st.uuids(), min_size=len(positions), max_size=len(positions)))
    return Marker(
        batch=draw(_NUMBERS),
        epoch=draw(_NUMBERS),
        system_identifier=draw(st.text(st.characters(codec="utf-8"), max_size=20)),
        timeline=draw(st.integers(1, 2**31)),
        outbox=draw(st.none() | st.text(st.characters(codec="utf-8"), max_size=20)),
        positions=tuple(positions),
        event_ids=tuple(map(str, event_ids)),
    )


def _marker(batch: int, system_identifier: str = _SYSTEM) -> Marker:
    return Marker(batch, 3, system_identifier, 1, (7, 9), (str(uuid.UUID(int=7)), str(uuid.UUID(int=9))))


def _reads_or_refuses(value: bytes) -> None:
    try:
        marker = Marker.decode(value)
    except StateLost:
        return
    assert isinstance(marker, Marker)
    assert len(marker.positions) == len(marker.event_ids)


@settings(deadline=None)
@given(marker=_markers())
def test_what_was_encoded_is_decoded(marker: Marker) -> None:
    assert Marker.decode(marker.encode()) == marker


@settings(deadline=None)
@given(value=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(value: bytes) -> None:
    _reads_or_refuses(value)


@settings(deadline=None, max_examples=100)
@given(field=st.sampled_from(sorted(orjson.loads(_marker(1).encode()))), value=_JSON)
def test_a_marker_with_any_field_replaced_is_read_or_refused(field: str, value: object) -> None:
    _reads_or_refuses(orjson.dumps(orjson.loads(_marker(1).encode()) | {field: value}))


@settings(deadline=None)
@given(value=_JSON)
def test_any_json_is_read_or_refused(value: object) -> None:
    _reads_or_refuses(orjson.dumps(value))


@settings(deadline=None)
@given(marker=_markers(), data=st.data())
def test_a_marker_cut_short_is_refused(marker: Marker, data: st.DataObject) -> None:
    value = marker.encode()
    with pytest.raises(StateLost):
        Marker.decode(value[: data.draw(st.integers(0, len(value) - 1))])


@pytest.mark.parametrize("value", [None, b"", b"null", b"[]", b"1", b'{"version":1}'])
def test_what_is_no_marker_is_refused(value: bytes | None) -> None:
    with pytest.raises(StateLost, match="is no marker"):
        Marker.decode(value)


def test_a_marker_of_an_earlier_version_names_no_outbox() -> None:
    marker = replace(_marker(1), outbox="db.outbox")
    fields = orjson.loads(marker.encode())
    assert fields.pop("outbox") == "db.outbox"
    assert Marker.decode(orjson.dumps(fields)) == replace(marker, outbox=None)


def test_a_later_version_is_refused_with_its_number() -> None:
    value = orjson.dumps(orjson.loads(_marker(1).encode()) | {"version": 2})
    with pytest.raises(StateLost, match="version 2"):
        Marker.decode(value)


def test_a_marker_that_lacks_an_event_id_is_refused() -> None:
    value = orjson.dumps(orjson.loads(_marker(1).encode()) | {"positions": [7]})
    with pytest.raises(StateLost, match="1 row and 2 event ids"):
        Marker.decode(value)


@pytest.mark.parametrize(
    ("last_batch", "batch", "reason"),
    [
        pytest.param(8, None, "holds no marker", id="state topic lost"),
        pytest.param(1, None, "holds no marker", id="state topic lost after the first batch"),
        pytest.param(8, 7, "holds the marker of batch 7", id="state topic went back by one"),
        pytest.param(8, 1, "holds the marker of batch 1", id="state topic went back"),
        pytest.param(6, 8, "Postgres remembers only 6", id="Postgres went back by one"),
        pytest.param(1, 8, "Postgres remembers only 1", id="Postgres went back"),
        pytest.param(0, 2, "Postgres remembers only 0", id="Postgres went back to when the lane was added"),
        pytest.param(None, 3, "before exactly-once began", id="Postgres went back to before the first batch"),
    ],
)
def test_a_lane_stops_when_one_side_went_back(last_batch: int | None, batch: int | None, reason: str) -> None:
    with pytest.raises(StateLost, match=reason):
        resume(5, last_batch, None if batch is None else _marker(batch), _HERE)


@pytest.mark.parametrize("last_batch", [None, 7, 8, 9])
def test_a_lane_stops_at_the_marker_of_another_database(last_batch: int | None) -> None:
    with pytest.raises(StateLost, match="was written for the database 42"):
        resume(5, last_batch, _marker(8, "42"), _HERE)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_marker_of_another_outbox_of_the_server_is_not_that_of_a_lane_without_a_batch(batch: int) -> None:
    """Of one with a batch it may be: its database was renamed since."""
    marker = replace(_marker(batch), outbox="db.other")
    assert resume(5, batch, marker, _HERE) == marker
    with pytest.raises(StateLost, match=r"db\.other, this is db\.outbox.*OUTBOX_NAME: choose a new one"):
        resume(5, None, marker, _HERE)


@pytest.mark.parametrize("last_batch", [7, 8])
def test_the_primary_from_before_a_failover_does_not_go_on(last_batch: int | None) -> None:
    marker = replace(_marker(8), timeline=3)
    for timeline in (3, 4):
        assert resume(5, last_batch, marker, replace(_HERE, timeline=timeline)) == marker
    with pytest.raises(StateLost, match=r"lane 5: .*timeline 3, this server is on timeline 2.*OUTBOX_DATABASE_URL"):
        resume(5, last_batch, marker, replace(_HERE, timeline=2))


@pytest.mark.parametrize("last_batch", [None, 0, 1, 2, 8])
def test_a_lane_goes_on_only_from_a_fresh_start_the_settled_batch_or_the_next(last_batch: int | None) -> None:
    """A lane that was added has 0. Without a settled batch it may have been killed, or have lost all in a failover."""
    went_on = []
    for batch in (None, *range(1, 12)):
        marker = None if batch is None else _marker(batch)
        with suppress(StateLost):
            assert resume(0, last_batch, marker, _HERE) == marker
            went_on.append(batch)
    assert went_on == {None: [None, 1, 2], 0: [None, 1]}.get(last_batch, [last_batch, (last_batch or 0) + 1])
