"""The containers of the manifests as processes, in the order of a release. No cluster runs here."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
from containers import Container
from manifests import MIGRATE, PODS, ROOT, SECRETS, containers
from shown import get
from support import look_up, wait_until

from outbox import Event, Outbox
from outbox.sandbox._ports import free_ports


class Cluster:
    """Makes processes of the manifests' containers: Secrets are folders, and Kafka is one that runs here."""

    def __init__(self, folder: Path, kafka: str, secrets: Mapping[str, Mapping[str, str]]) -> None:
        self._folder = folder
        self._kafka = kafka
        for secret, keys in secrets.items():
            (folder / secret).mkdir()
            for key, value in keys.items():
                (folder / secret / key).write_text(value)

    def pod(self, name: str, instance: str = "") -> list[Container]:
        """Return a pod's containers, as processes with ports of their own."""
        return [self._container(name, one, instance or name) for one in containers(PODS[name])]

    def only(self, name: str, instance: str = "") -> Container:
        [found] = self.pod(name, instance)
        return found

    def _container(self, name: str, container: dict[str, Any], instance: str) -> Container:
        [volume] = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == SECRETS]
        [secret] = [one["secret"]["secretName"] for one in PODS[name]["volumes"] if one["name"] == volume]
        (port,) = free_ports(1)

        def value(one: dict[str, Any]) -> str:
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                assert source["fieldRef"] == {"fieldPath": "metadata.name"}
                return instance
            text = str(one["value"]).replace(SECRETS, str(self._folder / secret))
            text = text.replace("kafka-bootstrap:9092", self._kafka)
            return re.sub(r"0\.0\.0\.0:\d+", f"127.0.0.1:{port}", text)

        values = {one["name"]: value(one) for one in container["env"]}
        return Container(f"{instance}-{container['name']}", ["outbox", *container["args"]], values, self._folder)


def address(container: Container) -> str:
    [found] = [value for name, value in container.environment.items() if name.endswith("_ADDRESS")]
    return found


def answers(container: Container, name: str, kind: str) -> bool:
    """Ask what a probe of the manifests asks."""
    probe = containers(PODS[name])[0][kind]
    host, port = address(container).split(":")
    if "httpGet" in probe:
        return get(f"http://{host}:{port}{probe['httpGet']['path']}")[0] == 200
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


PROXY_SECRET = "between-the-proxy-and-the-page"


def page(container: Container, headers: Mapping[str, str]) -> tuple[int, str]:
    origin = container.environment["OUTBOX_WEB__ORIGIN"].removeprefix("https://")
    return get(f"http://{address(container)}/", {"Host": origin, **headers})


def order(number: int, seq: int) -> Event:
    payload = {"order_id": f"o{number}", "seq": seq, "customer": "c", "amount_cents": 100, "status": "placed"}
    return Event("order", f"o{number}", "OrderChanged", payload)


def test_a_release_from_an_empty_database(private_postgres, deployment_kafka, tmp_path):
    """Tables and rights, relays that are replaced, consumers, the page, pruning, and a stop while Kafka is away."""
    kafka, topics = deployment_kafka
    topics.create_topic("order-events", 2)
    server = private_postgres()

    def url(role: str) -> str:
        return server.url("postgres").replace("postgresql://postgres", f"postgresql://{role}:outbox")

    # What docs/operations/kubernetes.md asks for before the first release.
    with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
        admin.execute((ROOT / "deploy/postgres/roles.sql").read_text())
    owner = ["outbox", "db", "roles", "migrator=outbox_migrator", "consumer-migrator=outbox_migrator", "--apply"]
    Container("owner", owner, {"OUTBOX_DATABASE_URL": server.url("postgres")}, tmp_path).run()
    page_keys = {"proxy-secret": PROXY_SECRET, "sink-url": url("outbox_page")}
    here = Cluster(
        tmp_path,
        kafka.bootstrap_servers,
        {
            **{f"outbox-{role}": {"database-url": url(f"outbox_{role}")} for role in ("migrator", "relay", "consumer")},
            "outbox-page": {"database-url": url("outbox_page"), **page_keys},
        },
    )
    job = here.pod(MIGRATE)
    for step in job:
        step.run()

    def write(seq: int) -> None:
        with psycopg.connect(url("outbox_shop")) as shop:
            Outbox().add_many(shop, [order(number, seq) for number in range(20)])

    def applied(seq: int) -> bool:
        [(orders, out_of_order)] = look_up(
            server.url("postgres"),
            """
            SELECT count(*) FILTER (WHERE last_seq = %s AND events_applied = %s), coalesce(sum(out_of_order), 0)
              FROM outbox_consumer.order_totals
            """,
            seq,
            seq,
        )
        assert out_of_order == 0
        return orders == 20

    with ExitStack() as stack:
        stack.callback(kafka.resume_broker, 0)
        old, new = (here.only("outbox-relay", f"outbox-relay-{n}") for n in ("old", "new"))
        old_relay = ExitStack()
        stack.push(old_relay)
        old_relay.enter_context(old.running(PODS["outbox-relay"]["terminationGracePeriodSeconds"]))
        totals, web = here.only("outbox-order-totals"), here.only("outbox-page")
        grace = PODS["outbox-order-totals"]["terminationGracePeriodSeconds"]
        stack.enter_context(totals.running(grace, says="stopping after this round"))
        stack.enter_context(web.running(30))
        for name, container in (("outbox-relay", old), ("outbox-order-totals", totals), ("outbox-page", web)):
            for kind in ("livenessProbe", "readinessProbe"):
                wait_until(lambda a=(container, name, kind): answers(*a), 120, f"the {kind} of {name}")
        there = "SELECT to_regclass('outbox_consumer.order_totals') IS NOT NULL"
        wait_until(lambda: look_up(server.url("postgres"), there) == [(True,)], 120, "the consumer's table")
        write(1)
        wait_until(lambda: applied(1), 120, "the first events to be applied")

        # The next version: its Job while the old relays work, then relays one by one.
        for step in job:
            step.run()
        write(2)
        with new.running(PODS["outbox-relay"]["terminationGracePeriodSeconds"]):
            wait_until(lambda: answers(new, "outbox-relay", "readinessProbe"), 60, "the new relay to be ready")
            old_relay.close()
            write(3)
            wait_until(lambda: applied(3), 120, "the events behind the old relay's end to be applied")

            for name in ("outbox-prune", "outbox-prune-consumer"):
                assert "partition" in here.only(name).run()
            user = {"X-Forwarded-User": "ada"}
            assert page(web, user)[0] in {401, 403}
            status, text = page(web, {**user, "X-Outbox-Proxy-Secret": PROXY_SECRET})
            assert status == 200
            assert "<h1>Overview</h1>" in text

            # Kafka does not answer: the relay lives, and its pod ends within its time. `running` checks that.
            kafka.pause_broker(0)
            write(4)
            waits = f"http://{address(new)}/readyz?verbose"
            wait_until(lambda: "kafka_unavailable" in get(waits)[1], 60, "the relay to wait for Kafka")
            assert answers(new, "outbox-relay", "livenessProbe")
