"""Events as messages: what is encoded comes back, and nothing else is taken for an event."""

from __future__ import annotations

import enum
import json
import string
import time
import tracemalloc
import uuid
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import Event, EventTooLarge, Outbox
from outbox._message import EventMessage, decode, encode, message_prefix
from outbox.errors import MessageError, OutboxError
from outbox.event import RESERVED_HEADERS, TRACEPARENT, TRACESTATE, identified

writer = Outbox(transport="message")
ID = "0198a7c4-5d3e-7b21-9c55-2f6d8e1a4b70"
HEAD: dict[str, Any] = {
    "version": 1,
    "event_id": ID,
    "aggregate_type": "Order",
    "aggregate_id": "4711",
    "event_type": "OrderPlaced",
    "payload": "json",
}


def content(body: bytes = b"{}", /, without: str = "", **fields: Any) -> bytes:
    head = {name: value for name, value in (HEAD | fields).items() if name != without}
    return orjson.dumps(head) + b"\n" + body


def test_the_content_is_one_line_and_the_payload():
    given_headers = {"tenant": "acme", "content-type": "application/vnd.shop+json"}
    message = EventMessage(ID, "Order", "4711", "OrderPlaced", given_headers, b'{"total":"42.00"}', json=True)
    assert encode(message) == (
        b'{"version":1,"event_id":"0198a7c4-5d3e-7b21-9c55-2f6d8e1a4b70","aggregate_type":"Order","aggregate_id":"4711",'
        b'"event_type":"OrderPlaced","headers":{"tenant":"acme","content-type":"application/vnd.shop+json"},'
        b'"payload":"json"}\n{"total":"42.00"}'
    )
    assert decode(encode(message)) == message


def test_bytes_and_tombstones():
    raw = EventMessage(ID, "A", "1", "T", None, b"\x00\n\xff", json=False)
    assert encode(raw).endswith(b',"payload":"bytes"}\n\x00\n\xff')
    assert b"headers" not in encode(raw)
    empty = EventMessage(ID, "A", "1", "T", None, b"", json=False)
    tombstone = EventMessage(ID, "A", "1", "T", None, None, json=False)
    assert encode(tombstone).endswith(b',"payload":"none"}\n')
    assert [decode(encode(message)) for message in (raw, empty, tombstone)] == [raw, empty, tombstone]


def test_names_from_an_enum():
    class Kind(enum.StrEnum):
        ORDER = "Order"

    message = EventMessage(ID, Kind.ORDER, Kind.ORDER, Kind.ORDER, {Kind.ORDER: Kind.ORDER}, None, json=False)
    found = decode(encode(message))
    assert found == (ID, "Order", "Order", "Order", {"Order": "Order"}, None, False)
    assert type(found.aggregate_type) is str


def test_the_prefix_names_the_schema():
    assert message_prefix("outbox") == "outbox.outbox"
    assert message_prefix("tenant_1") == "outbox.tenant_1"


def text(longest: int, shortest: int = 1) -> st.SearchStrategy[str]:
    return st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=shortest, max_size=longest
    )


names = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=100).filter(
    lambda name: (
        name.lower() not in {*RESERVED_HEADERS, "content-type", TRACEPARENT, TRACESTATE}
        and not name.lower().startswith(("ce_", "outbox-"))
    )
)
headers = st.none() | st.builds(
    lambda own, kind: own if kind is None else own | {"content-type": kind},
    st.dictionaries(names, text(20, 0), max_size=4),
    st.none() | text(200),
)
payloads = st.one_of(
    st.just((None, False)),
    st.binary(max_size=100).map(lambda raw: (raw, False)),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | text(5, 0),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text(5, 0), inner, max_size=3),
    )
    .filter(lambda value: isinstance(value, dict | list))
    .map(lambda value: (orjson.dumps(value), True)),
)
messages = st.builds(
    lambda event_id, kind, key, event, own, body: EventMessage(str(event_id), kind, key, event, own, *body),
    *(st.uuids(), text(200), text(1000), text(200), headers, payloads),
)


@given(messages)
def test_what_is_encoded_comes_back(message):
    assert decode(encode(message)) == message


@given(messages, st.booleans())
def test_what_a_writer_writes_can_be_read(message, with_type):
    """Whatever Event and the writer let pass, the relay takes; and it is the same."""
    own = {name: value for name, value in (message.headers or {}).items() if name != "content-type"}
    kind = ("application/vnd.x+json" if message.json else "a/b") if with_type else None
    payload = orjson.loads(message.payload) if message.json else message.payload
    event_id = uuid.UUID(message.event_id)
    event = Event(message.aggregate_type, message.aggregate_id, message.event_type, payload, own, event_id, kind)
    if kind is None and message.payload is not None and not message.json:
        kind = "application/octet-stream"
    stored = own if kind is None else own | {"content-type": kind}
    assert decode(writer._writer._content(event, {})) == message._replace(headers=stored or None)


def test_what_a_writer_may_write_at_most_can_be_read():
    deep: list[Any] = []
    for _ in range(240):
        deep = [deep]
    for payload in (deep, {"n": [-(2**63), 2**64 - 1, 1e300, -0.0]}, [-0.0] * 199_990, b"x" * 999_900):
        assert decode(writer._writer._content(identified(Event("A", "1", "T", payload))[0], {})).payload
    # As it is it takes a byte more than jsonb's text of it, which has no negative zero.
    assert Outbox(max_event_bytes=6)._writer._row(Event("A", "1", "T", [0.5]), {})
    with pytest.raises(EventTooLarge, match="takes 7 bytes"):
        Outbox(max_event_bytes=6)._writer._row(Event("A", "1", "T", [-0.0]), {})


def is_an_event_or_an_error(data: bytes) -> None:
    """Whatever is taken is an event that could be written again; all else is one kind of error."""
    try:
        found = decode(data)
    except MessageError:
        return
    assert decode(encode(found)) == found


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_an_error(data):
    is_an_event_or_an_error(data)
    is_an_event_or_an_error(data + b"\n" + data)


@given(messages, st.data())
def test_damaged_messages_are_an_event_or_an_error(message, data):
    whole = encode(message)
    at = data.draw(st.integers(0, len(whole)))
    gone = data.draw(st.integers(0, 5))
    is_an_event_or_an_error(whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + gone :])
    is_an_event_or_an_error(whole[:at])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | text(3, 0),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text(3, 0), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from([*HEAD, "headers", "other"]), json_values, st.sampled_from([b"", b"{}", b"x"]))
def test_any_value_in_any_field_is_an_event_or_an_error(field, value, payload):
    is_an_event_or_an_error(content(payload, **{field: value}))


REFUSED = {
    "nothing": (b"", "no line ends in its 0 bytes"),
    "no line": (b'{"version":1}', "no line ends in its 13 bytes"),
    "empty line": (b"\n", "first line is no JSON: "),
    "no JSON": (b"version 1\n{}", "first line is no JSON: "),
    "a list": (b"[1]\n", "no JSON object but a list"),
    "no version": (content(without="version"), "version: is missing, or no integer"),
    "version is true": (content(version=True), "version: is missing, or no integer"),
    "version is 1.0": (content(version=1.0), "version: is missing, or no integer"),
    "a newer version": (content(version=2, more=3), "version: is 2, only 1 is known here"),
    **{f"no {name}": (content(without=name), f"{name}: is missing") for name in HEAD if name != "version"},
    "a field too many": (content(lane=3), "'lane': no field of version 1"),
    "no UUID": (content(event_id="4711"), "event_id: must be a UUID as text"),
    "UUID without hyphens": (content(event_id=uuid.UUID(ID).hex), "event_id: must be a UUID as text"),
    "UUID as URN": (content(event_id=f"urn:uuid:{ID}"), "event_id: must be a UUID as text"),
    "a number as id": (content(event_id=7), "event_id: must be a UUID as text"),
    "empty type": (content(aggregate_type=""), "aggregate_type: must not be empty"),
    "long type": (content(aggregate_type="x" * 201), "aggregate_type: has 201 characters, 200 are allowed"),
    "long key": (content(aggregate_id="x" * 1001), "aggregate_id: has 1001 characters, 1000 are allowed"),
    "key is a number": (content(aggregate_id=4711), "aggregate_id: must be text, not int"),
    "NUL in a name": (content(event_type="T\0"), "event_type: holds a NUL"),
    "long event type": (content(event_type="x" * 201), "event_type: has 201 characters, 200 are allowed"),
    "headers are a list": (content(headers=[]), "headers: must be an object, not list"),
    "headers are null": (content(headers=None), "headers: must be an object, not NoneType"),
    **{
        f"header {name}": (content(headers={name: "1"}), f"headers['{name}']: is a name the relay sets itself")
        for name in (*sorted(RESERVED_HEADERS), "ce_id", "outbox-replay", "outbox-attempts")
    },
    "header's name": (content(headers={"ü": "1"}), "headers['ü']: a header's name is"),
    "header's value": (content(headers={"a": 1}), "headers['a']: must be text, not int"),
    "NUL in a header": (content(headers={"a": "\0"}), "headers['a']: holds a NUL"),
    "content type": (content(headers={"content-type": "x" * 201}), "headers['content-type']: has 201 characters"),
    "kind of payload": (content(payload="xml"), 'payload: must be "json", "bytes" or "none"'),
    "kind is a list": (content(payload=[]), 'payload: must be "json", "bytes" or "none"'),
    "payload after none": (content(payload="none"), 'is "none", but 2 bytes follow'),
    "empty JSON": (content(b""), "payload: is no JSON"),
    "NaN": (content(b'{"a":NaN}'), "payload: is no JSON"),
    "two values": (content(b"{}{}"), "payload: is no JSON"),
    "surrogate": (content(rb'["\ud800"]'), "payload: is no JSON"),
    "NUL": (content(rb'{"a":"x\u0000"}'), "payload: holds a NUL"),
    "NUL behind a backslash": (content(rb'{"\\\u0000":1}'), "payload: holds a NUL"),
    # Within the limit as it is, and what looks like numbers with exponents has it counted level by level.
    "too deep": (content(b'{"a":' * 900 + b'"%s"' % (b"1e5" * 4000) + b"}" * 900), "payload: is nested too deeply"),
    "one byte too many": (b"x" * 1_020_001, "has 1,020,001 bytes; no event takes more than 1,020,000"),
    "one byte less": (b"x" * 1_020_000, "no line ends in its 1,020,000 bytes"),
    "spaces": (content(b"[" + b" " * 1_000_000 + b"]"), "payload: the event takes 1,000,006 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_event_says_why(case):
    data, problem = REFUSED[case]
    with pytest.raises(MessageError) as caught:
        decode(data)
    assert problem in caught.value.problem
    assert isinstance(caught.value, OutboxError)
    assert str(caught.value) == f"a message of the outbox can't be read: {caught.value.problem}"


def test_what_looks_like_trouble_and_is_none():
    assert decode(content(rb'{"a":"\\u0000"}')).payload == rb'{"a":"\\u0000"}'
    # By hand, in SQL: spaces, another order, letters in upper case, an integer of any size.
    fields = ", ".join(f'"{name}" : "{value}"' for name, value in HEAD.items() if name not in {"event_id", "version"})
    line = f'{{{fields}, "event_id" : "{ID.upper()}", "version" : 1}}\n[1{"0" * 30}]'.encode()
    assert decode(line) == (ID, "Order", "4711", "OrderPlaced", None, b"[1" + b"0" * 30 + b"]", True)


@pytest.mark.parametrize("shape", ["numbers", "deep", "line", "nul"])
def test_a_huge_message_is_refused_by_its_length_alone(shape):
    """100 MB of what is slow to read: not parsed, not searched, not copied."""
    size = 100_000_000
    data = {
        "numbers": lambda: content(b"[" + b"1e5," * (size // 4) + b"1]"),
        "deep": lambda: content(b"[" * size),
        "line": lambda: b'{"version":1,"headers":{' + b'"a":"b",' * (size // 8),
        "nul": lambda: content(b'"' + rb"\u0000" * (size // 7) + b'"'),
    }[shape]()
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(MessageError, match="no event takes more than"):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 0.05


def test_the_longest_event_in_its_longest_form_can_be_read():
    """Every character of the names as two escapes of six bytes, and a payload that leaves no room."""
    names = {
        "aggregate_type": "\U0001f600" * 200,
        "event_type": "\U0001f600" * 200,
        "aggregate_id": "\U0001f600" * 1000,
    }
    body = b"x" * (1_000_000 - 4000)
    line = json.dumps(HEAD | names | {"payload": "bytes"}).encode()
    assert decode(line + b"\n" + body)[1:4] == (names["aggregate_type"], names["aggregate_id"], names["event_type"])


def test_the_limit_is_the_tables():
    """1,000,000 bytes of payload, key and headers, where JSON counts as jsonb prints it: with spaces and all digits."""
    headers = {"a": "b"}
    room = 1_000_000 - len("4711") - len('{"a": "b"}')
    spelt_out = len('["", 10000000000000000]')
    for over in (0, 1):
        text = b'["' + b"x" * (room - spelt_out + over) + b'",1e16]'
        for data in (
            content(text, headers=headers),
            content(b"x" * (room + over), headers=headers, payload="bytes"),
        ):
            if over:
                with pytest.raises(MessageError, match=r"takes 1,000,001 bytes .* the limit is 1,000,000"):
                    decode(data)
            else:
                assert decode(data).headers == headers
