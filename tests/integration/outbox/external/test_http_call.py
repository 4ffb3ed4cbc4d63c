"""The ready HTTP client against a real server: what each kind of answer, and of silence, is taken for."""

from __future__ import annotations

import contextlib
import email.utils
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from provider import Provider

from outbox.consumer.errors import JobError
from outbox.external import Call, Done, OutcomeUnknown, Refused, TryLater
from outbox.external.http_call import HttpAsk, HttpCall, _retry_after
from outbox.sandbox._process import patience


@pytest.fixture
def provider(tmp_path):
    with Provider(tmp_path / "book.sqlite") as started:
        yield started


def call(order: str, timeout: float = 20.0) -> Call:
    key = str(uuid.uuid5(uuid.NAMESPACE_OID, order))
    return Call(key, key, uuid.UUID(key), {"order": order}, 1, timeout, "t", 0, 0)


@pytest.mark.parametrize(
    ("order", "kind", "text", "retry_after"),
    [
        ("refuse", Refused, "HTTP 402", None),
        ("404", Refused, "HTTP 404", None),
        ("401:3", TryLater, "HTTP 401", 3.0),
        ("429:7", TryLater, "HTTP 429", 7.0),
        *((str(status), TryLater, f"HTTP {status}", None) for status in (403, 421, 423, 425, 426, 428, 431)),
        ("307", TryLater, "HTTP 307", None),
        *((str(status), OutcomeUnknown, f"HTTP {status}", None) for status in (301, 302, 303)),
        ("308", TryLater, "HTTP 308", None),
        ("409:1", OutcomeUnknown, "HTTP 409", 1.0),
        ("503:soon", OutcomeUnknown, "HTTP 503", None),
        ("drop", OutcomeUnknown, "no answer", None),
        ("done-half", OutcomeUnknown, "ended after|IncompleteRead", None),
    ],
)
def test_what_an_answer_is_taken_for(provider, order, kind, text, retry_after):
    provider.tell("o", order)
    with pytest.raises(kind, match=text) as caught:
        HttpCall(f"{provider.url}/charges")(call("o"))
    assert getattr(caught.value, "retry_after", None) == retry_after
    assert HttpCall(f"{provider.url}/charges")(call("o")) == {"charge": 1}


def test_a_provider_can_mean_a_refusal_with_other_statuses(provider):
    client = HttpCall(f"{provider.url}/charges", refusals={403, 409})
    provider.tell("o", "403", "409", "402", "401")
    for kind in (Refused, Refused, Refused, TryLater):
        with pytest.raises(kind):
            client(call("o"))
    for wrong in ({200}, {500}, "403"):
        with pytest.raises(JobError, match="refusals"):
            HttpCall(provider.url, refusals=wrong)


@pytest.mark.parametrize("status", [400, 402, 403, 405, 406, 414, 422, 451])
def test_a_refused_lookup_says_nothing_about_the_call(provider, status):
    provider.tell(f"look {call('o').key}", str(status))
    ask = HttpAsk(lambda one: f"{provider.url}/charges/{one.call_key}", hosts=["127.0.0.1"])
    with pytest.raises(TryLater, match=f"HTTP {status}"):
        ask(call("o"))
    assert ask(call("o")) is None


@pytest.mark.parametrize("order", ["stall", "trickle"])
def test_the_whole_request_keeps_its_time(provider, order):
    """However the server spins it out: a byte now and then does not count as an answer."""
    provider.tell("o", order)
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown):
        HttpCall(f"{provider.url}/charges")(call("o", timeout=0.5))
    assert 0.5 <= time.monotonic() - began < 15 * patience()


def test_what_was_never_sent_did_not_happen(provider):
    with socket.socket() as silent:
        # Bound, so that nobody else gets the port; and not listening.
        silent.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        for url in (nobody, provider.url.replace("http", "https")):
            with pytest.raises(TryLater, match="nothing was sent"):
                HttpCall(url)(call("o"))

    def broken(_: Call) -> Any:
        raise KeyError("customer")

    for client in (
        HttpCall(f"{provider.url}/charges", broken),
        HttpCall(f"{provider.url}/charges", lambda _: object()),
        HttpCall(lambda _: "ftp://x", hosts=["x"]),
    ):
        with pytest.raises(TryLater, match="can't be made"):
            client(call("o"))
    assert provider.requests() == []


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("{provider}/a b?secret", {}),
        ("{provider}/é?secret", {}),
        ("{provider}/x", {"Authorization": "secret €"}),
        ("{provider}/x", {"Authorization": "secret\nX-Other: 1"}),
        ("{provider}/x", {"A\nname": "secret"}),
        ("http://a b/?secret", {}),
        ("http://a..b/?secret", {}),
        ("https://.localhost/?secret", {}),
        ("http://é..b/?secret", {}),
    ],
)
def test_a_request_that_http_does_not_allow_is_not_sent(provider, url, headers):
    with pytest.raises(TryLater, match="nothing was sent") as caught:
        HttpCall(url.format(provider=provider.url), headers=headers)(call("o"))
    assert "secret" not in str(caught.value)
    assert provider.requests() == []


@contextlib.contextmanager
def answering(content: bytes, heard: list[bytes] | None = None) -> Iterator[str]:
    """Answer one request with these bytes; yield where. ``heard``: gets the request's headers, in lower case."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def answer() -> None:
            with server.accept()[0] as connection, connection.makefile("rb") as request:
                while (line := request.readline().lower()).strip():
                    if heard is not None:
                        heard.append(line.strip())
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                request.read(length)
                connection.sendall(content)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        thread.join(60)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("HTTP/1.1 102 Processing\n\nHTTP/1.1 103 Hints\nLink: x\n\nHTTP/1.1 201 Made\nContent-Length: 1\n\n7", 7),
        ("HTTP/1.0 103 Hints\n\nHTTP/1.0 200 OK\n\n7", 7),
        ("HTTP/1.1 103 Hints\n\nHTTP/1.1 402 No\n\n7", Refused),
        # The provider may go on.
        ("HTTP/1.1 102 Processing\n\n", OutcomeUnknown),
        ("HTTP/1.1 101 Other\nUpgrade: x\n\n", OutcomeUnknown),
        *((f"HTTP/1.1 200 OK\n\n{'[' * deep}{']' * deep}", {"text": "[" * deep + "]" * deep}) for deep in (960, 5000)),
    ],
)
def test_only_the_last_answer_counts_however_deep_it_is(content, expected):
    with answering(content.replace("\n", "\r\n").encode()) as url, contextlib.ExitStack() as fails:
        if isinstance(expected, type):
            fails.enter_context(pytest.raises(expected))
        assert HttpCall(url)(call("o")) == expected


def test_a_header_is_sent_once_however_it_is_spelled():
    """Servers refuse two, join them, or take one of them: with two keys it may be the one that all calls have."""
    given = {
        "content-type": "application/vnd.api+json",
        "ACCEPT": "*/*",
        "connection": "Close",
        "idempotency-key": "mine",
        "x-Mine": "1",
    }
    heard: list[bytes] = []
    with answering(b"HTTP/1.1 204 None\r\n\r\n", heard) as url:
        assert HttpCall(url, headers=given)(call("o")) is None
    names = [line.partition(b":")[0] for line in heard[1:]]
    assert len(names) == len(set(names))
    for name, value in (given | {"idempotency-key": call("o").key}).items():
        assert f"{name}: {value}".lower().encode() in heard


def test_keys_headers_and_urls_are_what_was_declared(provider):
    client = HttpCall(
        lambda one: f"{provider.url}/charges?for={one.request['order']}",
        headers=lambda: {"Idempotency-Key": "mine"},
        hosts=["127.0.0.1"],
    )
    assert client(call("o")) == {"charge": 1}
    assert provider.requests()[0][1:3] == ("/charges?for=o", call("o").key)
    ask = HttpAsk(lambda one: f"{provider.url}/charges/{one.call_key}", hosts=["127.0.0.1"])
    assert ask(call("o")) == Done({"charge": 1})
    assert ask(call("other")) is None
    assert replace(ask, found=lambda _: False)(call("o")) is None
    provider.tell("cancel o", "404", "404")
    cancelling = {"url": f"{provider.url}/cancel", "body": lambda one: {"order": "o", "key": one.call_key}}
    with pytest.raises(Refused):
        HttpCall(**cancelling)(call("o"))
    assert HttpCall(**cancelling, gone_is_done=True)(call("o")) == {"error": "not now"}
    for url in ("provider.example", "http://user:secret@provider.example/", "http://x:y/", "file:///etc"):
        with pytest.raises(JobError, match="url") as caught:
            HttpCall(url)
        assert "secret" not in str(caught.value)


def test_a_message_does_not_choose_the_host(provider):
    def charge(one: Call) -> str:
        return str(one.request["order"])

    port = provider.url.rpartition(":")[2]
    for hosts in (["127.0.0.1"], [f"127.0.0.1:{port}"], ["other.example", "127.0.0.1"]):
        assert HttpCall(charge, hosts=hosts)(call(f"{provider.url}/charges")) == {"charge": 1}
    made = len(provider.requests())
    for hosts, url in (
        (["api.example"], f"{provider.url}/charges"),
        (["127.0.0.1:1"], f"{provider.url}/charges"),
        (["127.0.0.1"], f"http://localhost:{port}/charges"),
        (["127.0.0.1"], f"http://127.0.0.1@localhost:{port}/charges"),
        (["127.0.0.1"], f"http://127.0.0.1.example:{port}/charges"),
        (["127.0.0.1"], "file:///etc/passwd"),
    ):
        for one in (HttpCall(charge, hosts=hosts), HttpAsk(charge, hosts=hosts)):
            with pytest.raises(TryLater, match="nothing was sent"):
                one(call(url))
    assert len(provider.requests()) == made
    for wrong in ((), "127.0.0.1", ["http://127.0.0.1"], ["127.0.0.1/x"], ["u@127.0.0.1"], [""]):
        with pytest.raises(JobError, match="hosts"):
            HttpCall(charge, hosts=wrong)
        with pytest.raises(JobError, match="hosts"):
            HttpAsk(charge, hosts=wrong)


def test_retry_after_as_a_date_is_measured_by_the_servers_clock():
    def headers(**values: str) -> Any:
        message = email.message.Message()
        for name, value in values.items():
            message[name.replace("_", "-")] = value
        return message

    now = email.utils.formatdate(1_000_000_000, usegmt=True)
    later = email.utils.formatdate(1_000_000_090, usegmt=True)
    assert _retry_after(headers(Date=now, Retry_After=later)) == 90.0
    assert _retry_after(headers(Date=later, Retry_After=now)) == 0.0
    assert _retry_after(headers(Retry_After="-5")) is None
    assert _retry_after(headers(Retry_After="Wed, 99 Foo")) is None
    for huge in ("Mon, 01 Jan 2024 00:00:00 +9999999999999999999", "Mon, 01 Jan 9999999999999999999 00:00:00 GMT"):
        assert _retry_after(headers(Retry_After=huge)) is None
        assert _retry_after(headers(Retry_After=later, Date=huge)) is None
    assert _retry_after(headers()) is None


@pytest.fixture
def silent() -> Iterator[Callable[[str], int]]:
    """Return a function that makes an address not answer a SYN, as behind a firewall, and returns its port."""
    with contextlib.ExitStack() as sockets:

        def start(host: str) -> int:
            listening = sockets.enter_context(socket.socket())
            listening.bind((host, 0))
            listening.listen(0)
            port: int = listening.getsockname()[1]
            # The queue takes one more than its length; the kernel drops what comes then.
            for _ in range(3):
                waiting = sockets.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex((host, port))
            return port

        yield start


def lead_to(
    monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int], lacking: int = 0, seconds: float = 0.0
) -> None:
    """Make a name have these addresses, after some of a family that the kernel lacks; to find them takes a while."""
    families = [1_000] * lacking + [int(socket.AF_INET)] * len(addresses)
    places = [("", 0)] * lacking + list(addresses)
    found = [(family, socket.SOCK_STREAM, 6, "", place) for family, place in zip(families, places, strict=True)]
    resolve = socket.getaddrinfo

    def lookup(host: str, *rest: Any, **more: Any) -> Any:
        if host != "p.example":
            return resolve(host, *rest, **more)
        threading.Event().wait(seconds)
        return found

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


def port_of(provider: Provider) -> int:
    return int(provider.url.rpartition(":")[2])


def test_connecting_counts_too(silent, monkeypatch):
    """To several addresses, of which the last answers no TLS."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        lead_to(monkeypatch, *(("127.0.0.1", silent("127.0.0.1")) for _ in range(4)), mute.getsockname())
        for url in ("https://p.example/", "https://p.example:444/"):
            began = time.monotonic()
            with pytest.raises(TryLater, match="nothing was sent"):
                HttpCall(url)(call("o", timeout=1.0))
            # Each of the five addresses has its share, and not all of it.
            assert 0.9 <= time.monotonic() - began < 4.5


def test_an_address_that_does_not_answer_leaves_time_for_the_next_one(provider, silent, monkeypatch):
    lead_to(monkeypatch, ("127.0.0.1", silent("127.0.0.1")), ("127.0.0.1", port_of(provider)))
    assert HttpCall("http://p.example/charges")(call("o", timeout=2.0 * patience())) == {"charge": 1}


def test_an_address_whose_family_the_kernel_lacks_is_passed_over(provider, monkeypatch):
    lead_to(monkeypatch, ("127.0.0.1", port_of(provider)), lacking=2)
    assert HttpCall("http://p.example/charges")(call("o")) == {"charge": 1}


def test_if_no_address_answers_the_first_ones_error_is_shown(silent, monkeypatch):
    with socket.socket() as bound:
        # Not listening.
        bound.bind(("127.0.0.1", 0))
        lead_to(monkeypatch, bound.getsockname(), ("127.0.0.1", silent("127.0.0.1")))
        with pytest.raises(TryLater, match=r"nothing was sent.*refused"):
            HttpCall("http://p.example/charges")(call("o", timeout=2.0))


class SlowHandshake(ssl.SSLContext):
    """A handshake that ends, but not in time."""

    def wrap_socket(self, sock: socket.socket, *_: Any, **__: Any) -> Any:
        threading.Event().wait(1.5)
        return sock


@pytest.mark.parametrize(("scheme", "seconds"), [("http", 1.5), ("https", 0.0)])
def test_when_the_time_is_over_before_the_request_nothing_is_sent(monkeypatch, scheme, seconds):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        lead_to(monkeypatch, server.getsockname(), seconds=seconds)
        tls = SlowHandshake(ssl.PROTOCOL_TLS_CLIENT) if scheme == "https" else None
        with pytest.raises(TryLater, match=r"nothing was sent.*time is over"):
            HttpCall(f"{scheme}://p.example/", tls=tls)(call("o", timeout=1.0))
        server.settimeout(0.0 if tls is None else 30.0)
        if tls is None:
            with pytest.raises(BlockingIOError):
                server.accept()
        else:
            with server.accept()[0] as connection:
                assert connection.recv(1) == b""


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_the_end_of_an_ipv6_address_is_not_its_port(monkeypatch, scheme, port):
    asked: list[tuple[Any, ...]] = []

    def lookup(*place: Any, **_: Any) -> Any:
        asked.append(place)
        raise socket.gaierror("none here")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for address in ("2001:db8::5", "2001:db8::ab"):
        for end, expected in (("", port), (":8443", 8443)):
            with pytest.raises(TryLater, match=r"nothing was sent.*none here"):
                HttpCall(f"{scheme}://[{address}]{end}/charges")(call("o"))
            assert asked.pop() == (address, expected)
