"""What the doctor says about servers that are reached without TLS, or without verifying them."""

from __future__ import annotations

import pytest

from relay.config import load
from relay.operations.doctor import check_transport

LOCAL = {"kafka": {"bootstrap.servers": "127.0.0.1:1"}, "database_url": "postgresql://u@127.0.0.1/db"}


def found(kafka: dict[str, str] | None = None, url: str | None = None) -> list[tuple[str, str, str]]:
    changes = {"kafka": kafka} if kafka else {"database_url": url}
    return [(each.about, each.found, each.do) for each in check_transport(load(**LOCAL | changes))]


@pytest.mark.parametrize(
    ("servers", "protocol", "said"),
    [
        ("kafka.example.com:9092", "SASL_PLAINTEXT", "security.protocol is sasl_plaintext: the credentials and all"),
        ("127.0.0.1:1,kafka:9092", None, "security.protocol is plaintext: all events"),
        ("10.0.0.1:9092", "PLAINTEXT", "security.protocol is plaintext: all events"),
        ("kafka:9092", "sasl_ssl", None),
        ("kafka:9092", "SSL", None),
        ("localhost:1,[::1]:2,127.0.0.3:3", "SASL_PLAINTEXT", None),
        ("kafka.example.com", None, "security.protocol is plaintext: all events"),
        ("[2001:db8::1]", None, "security.protocol is plaintext: all events"),
        ("PLAINTEXT://kafka:9092", None, "security.protocol is plaintext: all events"),
        ("localhost, 127.0.0.1,[::1]", None, None),
    ],
)
def test_kafka(servers, protocol, said):
    findings = found({"bootstrap.servers": servers} | ({"security.protocol": protocol} if protocol else {}))
    assert [about for about, _, _ in findings] == (["Kafka, TLS"] if said else [])
    if said:
        assert findings[0][1].startswith(said)
        assert ("SASL_SSL" in findings[0][2]) == (protocol == "SASL_PLAINTEXT")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://u:p@db.example.com/shop", "sslmode is not set, and libpq's default is prefer"),
        ("postgresql://u:p@127.0.0.1,db:5433/shop?sslmode=require", "sslmode is require"),
        ("host=10.0.0.1 dbname=shop sslmode=disable", "sslmode is disable"),
        ("postgresql://u:p@db.example.com/shop?sslmode=verify-full", None),
        ("postgresql://u:p@db.example.com/shop?sslmode=verify-ca", None),
        ("postgresql:///shop?host=/run/postgresql", None),
        ("postgresql://[::1]/shop", None),
        ("postgresql:///shop", None),
    ],
)
def test_postgres(url, said):
    findings = found(url=url)
    assert [about for about, _, _ in findings] == (["Postgres, TLS"] if said else [])
    assert not said or findings[0][1].startswith(said)
    of_sink = check_transport(load(**LOCAL, relay={"sink_url": url}))
    assert [each.about for each in of_sink] == (["Postgres of the sink, TLS"] if said else [])
