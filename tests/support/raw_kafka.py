"""Records of a transaction that the coordinator knows nothing of: what a broker leaves that lost its markers.

A few requests of Kafka's protocol, written by hand, because no client will do this. The broker must run with
``transaction.partition.verification.enable=false``, or it asks the coordinator first.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Final

UNVERIFIED: Final = {"transaction.partition.verification.enable": "false"}

_PRODUCE, _INIT_PRODUCER_ID, _FIND_COORDINATOR = 0, 22, 10
_TRANSACTIONAL: Final = 0x10

Record = tuple[bytes | None, bytes | None, Mapping[str, str] | Mapping[bytes, bytes] | Mapping[bytes, bytes | None]]
"""Key, value, headers; of these, bytes go out as they are."""


class HangingTransaction:
    """A producer that writes in a transaction which it never adds a partition to, and never ends."""

    def __init__(self, address: str, transactional_id: str) -> None:
        host, port = address.split(":")
        self._id = transactional_id
        with socket.create_connection((host, int(port)), 30) as connection:
            _call(connection, _FIND_COORDINATOR, 1, _text(transactional_id) + b"\x01")
            deadline = time.monotonic() + 60
            while True:
                answer = _call(connection, _INIT_PRODUCER_ID, 1, _text(transactional_id) + struct.pack(">i", 60_000))
                error, self._producer, self._epoch = struct.unpack(">hqh", answer[4:16])
                if not error:
                    break
                assert time.monotonic() < deadline, f"InitProducerId: error {error}"
                time.sleep(0.1)
        self._address = (host, int(port))
        self._sequences: dict[tuple[str, int], int] = {}

    def write(self, topic: str, partition: int, records: Sequence[Record], milliseconds: int | None = None) -> None:
        """Append records to a partition whose leader is this broker; of this time, and not of now."""
        sequence = self._sequences.get((topic, partition), 0)
        self._sequences[topic, partition] = sequence + len(records)
        batch = _batch(records, _TRANSACTIONAL, self._producer, self._epoch, sequence, milliseconds)
        body = _text(self._id) + _partition_of(topic, partition, batch)
        _produce(self._address, topic, body)


def produce(
    address: str, topic: str, partition: int, records: Sequence[Record], milliseconds: int | None = None
) -> None:
    """Append records to a partition whose leader is this broker, without a transaction; as they are."""
    host, port = address.split(":")
    batch = _batch(records, 0, -1, -1, -1, milliseconds)
    body = struct.pack(">h", -1) + _partition_of(topic, partition, batch)
    _produce((host, int(port)), topic, body)


def _partition_of(topic: str, partition: int, batch: bytes) -> bytes:
    head = struct.pack(">hii", -1, 30_000, 1) + _text(topic) + struct.pack(">iii", 1, partition, len(batch))
    return head + batch


def _produce(address: tuple[str, int], topic: str, body: bytes) -> None:
    with socket.create_connection(address, 30) as connection:
        answer = _call(connection, _PRODUCE, 3, body)
    [error] = struct.unpack_from(">h", answer, 4 + 2 + len(topic) + 4 + 4)
    assert error == 0, f"Produce: error {error}"


def _call(connection: socket.socket, key: int, version: int, body: bytes) -> bytes:
    request = struct.pack(">hhi", key, version, 1) + _text("test") + body
    connection.sendall(struct.pack(">i", len(request)) + request)
    [size] = struct.unpack(">i", _exactly(connection, 4))
    return _exactly(connection, size)[4:]


def _exactly(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        part = connection.recv(size - len(got))
        assert part, "the broker closed the connection"
        got += part
    return got


def _batch(
    records: Sequence[Record],
    attributes: int,
    producer: int,
    epoch: int,
    sequence: int,
    milliseconds: int | None = None,
) -> bytes:
    now = int(time.time() * 1000) if milliseconds is None else milliseconds
    body = b"".join(_record(number, record) for number, record in enumerate(records))
    last = len(records) - 1
    checked = struct.pack(">hiqqqhii", attributes, last, now, now, producer, epoch, sequence, len(records)) + body
    return struct.pack(">qiibI", 0, 9 + len(checked), -1, 2, _crc32c(checked)) + checked


def _record(number: int, record: Record) -> bytes:
    key, value, headers = record
    body = b"\x00" + _varint(0) + _varint(number) + _sized(key) + _sized(value) + _varint(len(headers))
    body += b"".join(_sized(_bytes(name)) + _sized(_bytes(text)) for name, text in headers.items())
    return _sized(body)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _sized(value: bytes | None) -> bytes:
    return b"\x01" if value is None else _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value <<= 1
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value.encode())) + value.encode()


def _of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


# Bit by bit, a message of 1 MB takes more than half a second.
_CRC32C: Final = [_of_byte(byte) for byte in range(256)]


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[crc & 0xFF ^ byte]
    return crc ^ 0xFFFFFFFF
