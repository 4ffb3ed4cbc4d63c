"""Requests of Kafka's protocol that the client library lacks: which transactions there are, and who has them open.

ListTransactions and DescribeTransactions (KIP-664) ask the coordinators, DescribeProducers asks the partitions'
leaders. Each is one read-only request on a connection of its own; brokers answer them since 3.0. Connections use the
client's options as far as they are known here: TLS with files in PEM, SASL with PLAIN or SCRAM.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, TypeVar

from outbox._app.kafka_clients import complete
from relay.kafka.offsets import Partition
from relay.ports import BrokerUnavailable

T = TypeVar("T")

_SECONDS: Final = 10.0
_LARGEST: Final = 64 << 20
_CLIENT: Final = b"outbox-transactions"
_LIST, _DESCRIBE, _PRODUCERS, _HANDSHAKE, _AUTHENTICATE = 66, 65, 61, 17, 36
_SCRAM: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
# Options of a connection that would have to be followed, and are not.
_UNKNOWN: Final = ("ssl.keystore.", "ssl.engine.", "ssl.providers", "sasl.oauthbearer.", "sasl.kerberos.")
_ERRORS: Final = {
    29: "the topic may not be read: READ is not granted",
    31: "the cluster refuses it",
    33: "the broker does not enable this sasl.mechanism",
    35: "the broker is older than 3.0",
    53: "the transactional id may not be described: DESCRIBE is not granted",
    58: "the user name or the password is refused (sasl.username, sasl.password)",
}
_GONE: Final = 105
"""TRANSACTIONAL_ID_NOT_FOUND: it ended and was forgotten meanwhile."""

Address = tuple[str, int]


class Unsupported(BrokerUnavailable):
    """These requests can't be sent with the given options, or the broker does not answer them."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A transactional id at its coordinator."""

    transactional_id: str
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class Described:
    """A transaction as its coordinator knows it. ``started_ms`` is by the clock of the coordinator; -1 without one."""

    transactional_id: str
    state: str
    timeout_ms: int
    started_ms: int
    producer_id: int
    epoch: int
    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class OpenProducer:
    """A producer with a transaction that is open in a partition, as the partition's leader knows it."""

    partition: Partition
    producer_id: int
    epoch: int
    first_offset: int
    last_ms: int


class Brokers:
    """Sends requests to single brokers. ``options`` are those of librdkafka's clients. Raises BrokerUnavailable.

    Raises ConfigurationError for an option that would turn off the verification of the brokers.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = complete(options)

    def list_transactions(
        self, address: Address, states: Collection[str] = (), producer_ids: Collection[int] = ()
    ) -> list[Listed]:
        """Return the transactional ids at a coordinator, those in these states or with these producer ids."""
        body = _array([_text(state) for state in states])
        body += _array([struct.pack(">q", number) for number in producer_ids]) + _NO_TAGS
        answer = self._ask(address, _LIST, body)
        answer.int32()
        _check(answer.int16(), address)
        answer.array(answer.text)
        return answer.array(lambda: answer.tagged(Listed(answer.text(), answer.int64(), answer.text())))

    def describe_transactions(self, address: Address, ids: Collection[str]) -> list[Described]:
        """Return the transactions of these ids, of which this broker is the coordinator."""
        if not ids:
            return []
        answer = self._ask(address, _DESCRIBE, _array([_text(each) for each in ids]) + _NO_TAGS)
        answer.int32()

        def transaction() -> Described | None:
            error, id_, state = answer.int16(), answer.text(), answer.text()
            numbers = answer.int32(), answer.int64(), answer.int64(), answer.int16()
            topics = answer.array(lambda: answer.tagged((answer.text(), answer.array(answer.int32))))
            answer.tags()
            if error == _GONE:
                return None
            _check(error, address)
            partitions = [Partition(topic, number) for topic, those in topics for number in those]
            return Described(id_, state, *numbers, partitions)

        return [found for found in answer.array(transaction) if found is not None]

    def open_producers(
        self, address: Address, partitions: Collection[Partition], refused: Callable[[Partition, str], None]
    ) -> list[OpenProducer]:
        """Return who has a transaction open in these partitions, of which this broker is the leader.

        ``refused`` is called with a partition that may not be read, or has another leader by now, and the reason.
        """
        topics: dict[str, list[int]] = {}
        for partition in partitions:
            topics.setdefault(partition.topic, []).append(partition.number)
        if not topics:
            return []
        parts = [
            _text(topic) + _array([struct.pack(">i", number) for number in numbers]) + _NO_TAGS
            for topic, numbers in topics.items()
        ]
        answer = self._ask(address, _PRODUCERS, _array(parts) + _NO_TAGS)
        answer.int32()
        found: list[OpenProducer] = []

        def producer(partition: Partition) -> None:
            id_, epoch, _, last_ms, _, first = (
                answer.int64(),
                answer.int32(),
                answer.int32(),
                answer.int64(),
                answer.int32(),
                answer.int64(),
            )
            answer.tags()
            if first >= 0:
                found.append(OpenProducer(partition, id_, epoch, first, last_ms))

        def of_topic() -> None:
            topic = answer.text()

            def of_partition() -> None:
                partition = Partition(topic, answer.int32())
                if error := answer.int16():
                    refused(partition, _ERRORS.get(error, f"error {error}"))
                answer.text()
                answer.array(lambda: producer(partition))
                answer.tags()

            answer.array(of_partition)
            answer.tags()

        answer.array(of_topic)
        return found

    def _ask(self, address: Address, key: int, body: bytes) -> _Answer:
        """Send a request of version 0, which is a flexible one of all three."""
        where = f"Kafka at {address[0]}:{address[1]}"
        try:
            with closing(self._connect(address)) as connection:
                self._authenticate(connection, address)
                head = struct.pack(">hhih", key, 0, 1, len(_CLIENT)) + _CLIENT + _NO_TAGS
                answer = _Answer(_call(connection, head + body))
                answer.int32()
                answer.tags()
                return answer
        except ssl.SSLCertVerificationError as error:
            raise BrokerUnavailable(
                f"{where}, asking for transactions: TLS: certificate verify failed: {error.verify_message}"
            ) from error
        except ssl.SSLError as error:
            raise BrokerUnavailable(f"{where}, asking for transactions: TLS: {error.reason or error}") from error
        except ConnectionResetError as error:
            raise Unsupported(
                f"{where}, asking for transactions: the broker closed the connection; it is older than 3.0, or wants "
                "other options"
            ) from error
        except OSError as error:
            raise BrokerUnavailable(f"{where}, asking for transactions: {error}") from error

    def _connect(self, address: Address) -> socket.socket:
        protocol = self._options.get("security.protocol", "plaintext").upper()
        unknown = [name for name in self._options if name.startswith(_UNKNOWN)]
        if protocol not in {"PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"} or unknown:
            raise Unsupported(f"transactions can't be asked for with {unknown[0] if unknown else protocol}")
        connection = socket.create_connection(address, _SECONDS)
        if not protocol.endswith("SSL"):
            return connection
        try:
            return self._tls().wrap_socket(connection, server_hostname=address[0])
        except BaseException:
            connection.close()
            raise

    def _tls(self) -> ssl.SSLContext:
        options = self._options
        context = ssl.create_default_context(cafile=options.get("ssl.ca.location"), cadata=options.get("ssl.ca.pem"))
        if (certificate := options.get("ssl.certificate.location")) is not None:
            context.load_cert_chain(certificate, options.get("ssl.key.location"), options.get("ssl.key.password"))
        return context

    def _authenticate(self, connection: socket.socket, address: Address) -> None:
        if not self._options.get("security.protocol", "").upper().startswith("SASL"):
            return
        mechanism = self._options.get("sasl.mechanism", self._options.get("sasl.mechanisms", "GSSAPI"))
        name, password = self._options.get("sasl.username", ""), self._options.get("sasl.password", "")
        if mechanism != "PLAIN" and mechanism not in _SCRAM:
            raise Unsupported(f"transactions can't be asked for with sasl.mechanism={mechanism}")
        answer = _Answer(_call(connection, _plain_head(_HANDSHAKE) + _short(mechanism.encode())))
        answer.int32()
        _check(answer.int16(), address)

        def exchange(data: bytes) -> bytes:
            answer = _Answer(_call(connection, _plain_head(_AUTHENTICATE) + struct.pack(">i", len(data)) + data))
            answer.int32()
            error = answer.int16()
            answer.raw(max(answer.int16(), 0))
            _check(error, address)
            return answer.raw(max(answer.int32(), 0))

        if mechanism == "PLAIN":
            exchange(b"\0" + name.encode() + b"\0" + password.encode())
        else:
            _scram(exchange, _SCRAM[mechanism], name, password)


def _scram(exchange: Callable[[bytes], bytes], algorithm: str, name: str, password: str) -> None:
    """Authenticate as RFC 5802 says, and check that the broker knows the password, too."""
    nonce = secrets.token_urlsafe(18)
    escaped = name.replace("=", "=3D").replace(",", "=2C")
    first = f"n={escaped},r={nonce}"
    challenge = exchange(b"n,," + first.encode()).decode()
    values = dict(part.split("=", 1) for part in challenge.split(","))
    if not values["r"].startswith(nonce):
        raise BrokerUnavailable("Kafka: the broker's answer to SCRAM is not one to this client")
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode(), base64.b64decode(values["s"]), int(values["i"]))

    def keyed(key: bytes, text: str) -> bytes:
        return hmac.new(key, text.encode(), algorithm).digest()

    client = keyed(salted, "Client Key")
    final = f"c=biws,r={values['r']}"
    signed = f"{first},{challenge},{final}"
    signature = keyed(hashlib.new(algorithm, client).digest(), signed)
    proof = bytes(a ^ b for a, b in zip(client, signature, strict=True))
    answer = exchange(f"{final},p={base64.b64encode(proof).decode()}".encode())
    expected = b"v=" + base64.b64encode(keyed(keyed(salted, "Server Key"), signed))
    if not hmac.compare_digest(answer, expected):
        raise BrokerUnavailable("Kafka: the broker does not know this user's password")


def _check(error: int, address: Address) -> None:
    if error:
        text = _ERRORS.get(error, f"error {error}")
        raise Unsupported(f"Kafka at {address[0]}:{address[1]}, asking for transactions: {text}")


# Bytes


_NO_TAGS: Final = b"\0"


class _Answer:
    """Reads the values of an answer one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def raw(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) < size:
            raise BrokerUnavailable("Kafka: the broker's answer is cut off")
        self._at += size
        return part

    def int16(self) -> int:
        return int.from_bytes(self.raw(2), signed=True)

    def int32(self) -> int:
        return int.from_bytes(self.raw(4), signed=True)

    def int64(self) -> int:
        return int.from_bytes(self.raw(8), signed=True)

    def varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.raw(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    def text(self) -> str:
        return self.raw(max(self.varint() - 1, 0)).decode(errors="replace")

    def array(self, item: Callable[[], T]) -> list[T]:
        return [item() for _ in range(self.varint() - 1)]

    def tags(self) -> None:
        for _ in range(self.varint()):
            self.varint()
            self.raw(self.varint())

    def tagged(self, value: T) -> T:
        """Return a structure that was just read, and skip its tags."""
        self.tags()
        return value


def _call(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(struct.pack(">i", len(request)) + request)
    size = int.from_bytes(_exactly(connection, 4))
    if size > _LARGEST:
        raise BrokerUnavailable(f"Kafka: an answer of {size} bytes; is this a broker's port?")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("closed by the broker")
        parts += part
    return bytes(parts)


def _plain_head(key: int) -> bytes:
    """Return the head of a request of version 1 that is not a flexible one."""
    return struct.pack(">hhi", key, 1, 1) + _short(_CLIENT)


def _short(value: bytes) -> bytes:
    return struct.pack(">h", len(value)) + value


def _array(items: Sequence[bytes]) -> bytes:
    return _varint(len(items) + 1) + b"".join(items)


def _text(value: str) -> bytes:
    data = value.encode()
    return _varint(len(data) + 1) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
