"""How a consumer ends without its servers. At signals: test_operating.py; without its JVM: test_offsets_only.py."""

from __future__ import annotations

import threading
from urllib.parse import urlsplit

import pytest
from bench import expected
from proxy import TcpProxy

from outbox.consumer.errors import ConsumerUnavailable
from spark_jobs.driver.options import Options
from spark_jobs.driver.runner import Runner

pytestmark = pytest.mark.spark


def names(orders: int) -> list[str]:
    return [f"o{number}" for number in range(orders)]


def test_once_gives_up_without_its_sink_and_the_next_run_goes_on(bench):
    """In the middle of its rounds. Without Kafka: below."""
    seqs, orders = 40, 50
    bench.orders(names(orders), range(1, seqs + 1))
    address = urlsplit(bench.database.url)

    def applied() -> int:
        return sum(bench.positions().values())

    with TcpProxy(address.hostname, address.port) as proxy:

        def heard(text: str, _: object) -> None:
            if text == "round" and applied() >= 100:
                proxy.stop()

        through = bench.database.url.replace(f"{address.hostname}:{address.port}", proxy.address)
        options = Options(through, {"bootstrap.servers": bench.topics.bootstrap_servers}, patience=3.0, max_records=20)
        with (
            pytest.raises(ConsumerUnavailable, match=r"gave up after 3 s; nothing is lost, .*127\.0\.0\.1"),
            Runner(bench.spark, bench.job, options, heard) as runner,
        ):
            runner.once(threading.Event())
    assert 0 < applied() < seqs * orders
    bench.once()
    assert bench.totals() == expected(names(orders), seqs)
    assert bench.rows("SELECT sum(applied)::int, sum(duplicates)::int FROM consumer.offsets") == [(seqs * orders, 0)]


@pytest.mark.parametrize("silent", ["Kafka", "Postgres"])
def test_a_question_that_nobody_answers_is_a_part_of_the_patience(bench, silent):
    """A port that accepts and says nothing. By itself a request to Kafka waits for 20 s, and a connection for 10 s."""
    reports: list[str] = []
    with TcpProxy("127.0.0.1", 9) as nobody:
        nobody.blackhole()
        address = urlsplit(bench.database.url)
        kafka = nobody.address if silent == "Kafka" else bench.topics.bootstrap_servers
        url = bench.database.url
        if silent == "Postgres":
            url = url.replace(f"{address.hostname}:{address.port}", nobody.address)
        options = Options(url, {"bootstrap.servers": kafka}, patience=2.0)
        with (
            pytest.raises(ConsumerUnavailable, match="gave up after 2 s; nothing is lost"),
            Runner(bench.spark, bench.job, options, lambda text, _: reports.append(text)) as runner,
        ):
            runner.once(threading.Event())
    # The first question took all of it: there was no other one.
    assert "waiting for a server" not in reports
