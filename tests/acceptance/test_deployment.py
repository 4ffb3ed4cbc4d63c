"""The files for Docker. No engine runs here: their commands run as processes, in their environments."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from containers import Container
from manifests import MIGRATE, PODS, containers
from support import look_up, wait_until

from outbox._app.settings import RelaySettings
from outbox.sandbox._ports import free_ports

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BRINGS_A_SERVER = {"postgres", "kafka", "prometheus", "grafana"}


class Processes:
    """Runs services of docker-compose.yml as processes: the addresses in them become those of servers here."""

    def __init__(self, postgres: str, kafka: str, folder: Path) -> None:
        self._addresses = {
            "postgres:5432": postgres,
            "127.0.0.1:5432": postgres,
            "kafka:29092": kafka,
            "127.0.0.1:9092": kafka,
        }
        self._folder = folder
        self._ports: dict[str, int] = {}

    def here(self, service: str, text: str) -> str:
        """Return a text of a service with the addresses of this machine."""
        for there, address in self._addresses.items():
            text = text.replace(there, address)
        port = self._ports.setdefault(service, free_ports(1)[0])
        text = text.replace("0.0.0.0:9100", f"127.0.0.1:{port}").replace("127.0.0.1:9100", f"127.0.0.1:{port}")
        for volume in SERVICES[service].get("volumes", ()):
            source, target, *_ = volume.split(":")
            text = text.replace(target, str(ROOT / source))
        return text

    def container(self, service: str) -> Container:
        """Return what a service runs: `outbox`, the images' entry point, unless it has its own."""
        words = SERVICES[service].get("entrypoint", ["outbox"]) + SERVICES[service]["command"]
        own = SERVICES[service].get("environment", {})
        values = {name: self.here(service, value) for name, value in own.items()}
        if service == "page":
            values["OUTBOX_WEB__ADDRESS"] = self.here(service, "127.0.0.1:9100")
        return Container(service, [self.here(service, word) for word in words], values, self._folder)

    def healthy(self, service: str) -> bool:
        """Run a service's health check."""
        kind, *words = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD"
        assert words[0] == "python"
        check = [sys.executable, *(self.here(service, word) for word in words[1:])]
        return subprocess.run(check, capture_output=True, timeout=60, check=False).returncode == 0


def order() -> list[str]:
    """Return the services of the profile `app` so that each comes behind those that it waits for."""
    found: list[str] = []

    def add(name: str) -> None:
        for before in SERVICES[name].get("depends_on", {}):
            add(before)
        if name not in found and name not in BRINGS_A_SERVER:
            found.append(name)

    for name, service in SERVICES.items():
        if "app" in service.get("profiles", ()):
            add(name)
    return found


def test_the_pipeline_of_docker_compose(private_postgres, deployment_kafka, tmp_path):
    """From two empty servers to the topic, with the roles of the file and the page beside.

    What consumes is the same process with the same rights as in the manifests, which test_kubernetes_processes.py runs.
    """
    given = SERVICES["postgres"]["command"]
    settings = dict(word.split("=", 1) for flag, word in pairwise(given) if flag == "-c")
    assert settings["wal_level"] == "logical"
    server = private_postgres(settings)
    _, topics = deployment_kafka
    url = server.url("postgres")
    with psycopg.connect(url, autocommit=True) as admin:
        [(name,)] = admin.execute("SELECT current_database()").fetchall()
        assert name == "postgres"
        admin.execute((ROOT / "deploy/postgres/roles.sql").read_text())
    address = re.search(r"@([^/]+)/", url)
    assert address is not None
    here = Processes(address[1], topics.bootstrap_servers, tmp_path)
    once = [name for name in order() if "restart" not in SERVICES[name] and name != "shop"]
    assert once == ["owner", "migrate", "migrate-consumer", "rights"]
    for name in [*once, *once]:
        here.container(name).run()
    with ExitStack() as stack:
        log = {name: stack.enter_context(here.container(name).running()) for name in ("relay", "shop", "page")}
        assert len(topics.consume("order-events", 20, timeout=120)) >= 20
        # A process for each look: not before it is.
        wait_until(lambda: here.healthy("relay"), 120, "the relay to be healthy", longest=0.5)
        owners = "SELECT usename FROM pg_stat_activity WHERE application_name LIKE 'outbox%' AND usename = 'postgres'"
        assert look_up(url, owners) == []
        link = wait_until(lambda: re.search(r"http://127\.0\.0\.1:\d+/\S*", log["page"].read_text()), 60, "the link")
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        browser.open(link[0], timeout=30).close()
        with browser.open(link[0].partition("?")[0].partition("/enter")[0], timeout=30) as answer:
            assert "<h1>Overview</h1>" in answer.read().decode()


def test_the_consumer_is_that_of_the_manifests():
    [container] = containers(PODS["outbox-order-totals"])
    assert SERVICES["consumer"]["command"] == container["args"]
    assert SERVICES["consumer"]["healthcheck"] == SERVICES["relay"]["healthcheck"]
    # It may start before the relay has created its topic: tests/spark/test_nothing_to_do.py.
    assert SERVICES["consumer"]["restart"] == "unless-stopped"
    theirs = {one["name"]: one["value"] for one in container["env"]}
    ours = SERVICES["consumer"]["environment"]
    servers = {"OUTBOX_DATABASE_URL", "OUTBOX_KAFKA__BOOTSTRAP_SERVERS"}
    assert {name: theirs.get(name) for name in ours.keys() - servers} == {
        name: ours[name] for name in ours.keys() - servers
    }
    assert "//outbox_consumer:" in ours["OUTBOX_DATABASE_URL"]
    roles = {word for step in containers(PODS[MIGRATE]) for word in step["args"] if "=" in word}
    assert roles <= set(SERVICES["rights"]["command"])


def test_the_relay_may_take_as_long_to_end_as_it_gives_itself():
    """10 seconds behind OUTBOX_RELAY__SHUTDOWN_SECONDS it shows where a thread hangs. In a pod: test_kubernetes.py."""
    own = SERVICES["relay"]["environment"]
    given = own.get("OUTBOX_RELAY__SHUTDOWN_SECONDS", RelaySettings.model_fields["shutdown_seconds"].default)
    assert int(SERVICES["relay"]["stop_grace_period"].removesuffix("s")) > float(given) + 10


def test_what_containers_may_do():
    for name, service in SERVICES.items():
        if name in BRINGS_A_SERVER:
            continue
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["image"] == "outbox:local"
        assert "postgres:outbox@" not in json.dumps(service.get("environment", {})) or name == "owner"
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
    test = SERVICES["postgres"]["healthcheck"]["test"]
    # The server of the image's first start listens on its socket alone.
    assert test[test.index("-h") + 1] == "127.0.0.1"
    assert set(SERVICES["kafka"]["volumes"][0].split(":")[1:]) == {SERVICES["kafka"]["environment"]["KAFKA_LOG_DIRS"]}


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage of the Dockerfile."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM"):
            found[line.split()[-1]] = instructions = []
        elif not line.startswith("ARG"):
            instructions.append(line)
    return found


def test_the_images():
    found = stages()
    assert list(found)[-1] == "relay", "it is built if no stage is named"
    for name in ("relay", "consumer"):
        assert [line for line in found[name] if line.startswith("USER")] == ["USER 10001:10001"]
        assert found["base"][-2] == 'ENTRYPOINT ["outbox"]'
    installed = [line for stage in found.values() for line in stage if "pip install" in line]
    for step in (step for line in installed for step in line.split("&&") if "pip install" in step):
        assert "--require-hashes" in step or "--no-index" in step, step
    # Dependencies come before the source, so that a change of the source does not install them anew.
    build = found["build"]
    assert next(n for n, line in enumerate(build) if "relay.lock" in line and "RUN" in line) < next(
        n for n, line in enumerate(build) if line.startswith("COPY outbox")
    )
    for line in (
        line for stage in found.values() for line in stage if line.startswith("COPY") and "--from" not in line
    ):
        for source in shlex.split(line)[1:-1]:
            assert (ROOT / source).exists(), source


@pytest.mark.parametrize("name", ["build", "relay", "consumer"])
def test_images_get_the_versions_that_are_tested(name):
    """Their locks are parts of requirements.lock."""
    line = re.compile(r"^([a-z0-9._-]+(?:\[[^]]+\])?==\S+)", re.MULTILINE)
    tested = set(line.findall((ROOT / "requirements.lock").read_text()))
    locked = set(line.findall((ROOT / f"deploy/{name}.lock").read_text()))
    assert locked
    assert locked <= tested
