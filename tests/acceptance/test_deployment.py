"""The files for Docker and Kubernetes. No engine runs here: their commands run as processes, in their environments."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import nursery
import psycopg
import pytest
import yaml
from support import look_up, wait_until
from typer.testing import CliRunner

from outbox._app.settings import check_environment
from outbox.sandbox._ports import free_ports
from relay.cli.app import app
from relay.config import load

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
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
        self._running: dict[str, subprocess.Popen[bytes]] = {}
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

    def command(self, service: str) -> list[str]:
        """Return what a service runs: `outbox`, the images' entry point, unless it has its own."""
        entry = SERVICES[service].get("entrypoint", ["outbox"])
        words = [sys.executable if word == "python" else word for word in entry] + SERVICES[service]["command"]
        if words[0] == "outbox":
            words = [sys.executable, "-m", "relay.cli", *words[1:]]
        return [self.here(service, word) for word in words]

    def environment(self, service: str) -> dict[str, str]:
        """Return the environment of a service: its own variables, and what a process here needs to start at all."""
        kept = {
            name: os.environ[name]
            for name in ("PATH", "JAVA_HOME", "JDK_JAVA_OPTIONS", "OUTBOX_PATIENCE", "OUTBOX_PG_BIN", "OUTBOX_CACHE")
            if name in os.environ
        }
        own = SERVICES[service].get("environment", {})
        home = {"HOME": str(self._folder), "PYTHONPATH": str(ROOT), "OUTBOX_CACHE": str(self._folder / "cache")}
        if service == "page":
            home["OUTBOX_WEB__ADDRESS"] = self.here(service, "127.0.0.1:9100")
        return kept | {name: self.here(service, value) for name, value in own.items()} | home

    def run(self, service: str) -> None:
        """Run a service that ends by itself."""
        done = nursery.run(self.command(service)[1:], self.environment(service))
        assert done.returncode == 0, (service, done.stdout, done.stderr)

    @contextmanager
    def running(self, service: str) -> Iterator[Path]:
        """Run a service until the block ends, then stop it as an engine does. Yields its log."""
        log = self._folder / f"{service}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(service), env=self.environment(service), stdout=file, stderr=file, cwd=self._folder
            )
        try:
            yield log
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            try:
                status = process.wait(120)
            finally:
                process.kill()
        assert status in {0, -15}, (service, status, log.read_text())

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


def test_the_pipeline_of_docker_compose(private_postgres, private_kafka, tmp_path):
    """From two empty servers to the sink's rows, with the roles of the file and the page beside."""
    given = SERVICES["postgres"]["command"]
    settings = dict(word.split("=", 1) for flag, word in pairwise(given) if flag == "-c")
    assert settings["wal_level"] == "logical"
    server = private_postgres(settings)
    cluster = private_kafka()
    url = server.url("postgres")
    with psycopg.connect(url, autocommit=True) as admin:
        [(name,)] = admin.execute("SELECT current_database()").fetchall()
        assert name == "postgres"
        admin.execute((ROOT / "deploy/postgres/roles.sql").read_text())
    address = re.search(r"@([^/]+)/", url)
    assert address is not None
    here = Processes(address[1], cluster.bootstrap_servers, tmp_path)
    once = [name for name in order() if "restart" not in SERVICES[name] and name != "shop"]
    assert once == ["owner", "migrate", "migrate-consumer", "rights"]
    for name in [*once, *once]:
        here.run(name)
    with ExitStack() as stack:
        log = {name: stack.enter_context(here.running(name)) for name in ("relay", "shop", "consumer", "page")}
        applied = "SELECT count(*), coalesce(sum(out_of_order), 0) FROM outbox_consumer.order_totals"
        there = "SELECT to_regclass('outbox_consumer.order_totals') IS NOT NULL"
        wait_until(lambda: look_up(url, there) == [(True,)], 120, "the consumer's table")
        wait_until(lambda: look_up(url, applied)[0][0] > 20, 120, "orders to be applied")
        assert look_up(url, applied)[0][1] == 0
        # A process for each look: not before they are.
        for name in ("relay", "consumer"):
            wait_until(lambda name=name: here.healthy(name), 120, f"{name} to be healthy")
        owners = "SELECT usename FROM pg_stat_activity WHERE application_name LIKE 'outbox%' AND usename = 'postgres'"
        assert look_up(url, owners) == []
        link = wait_until(lambda: re.search(r"http://127\.0\.0\.1:\d+/\S*", log["page"].read_text()), 60, "the link")
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        browser.open(link[0], timeout=30).close()
        with browser.open(link[0].partition("?")[0].partition("/enter")[0], timeout=30) as answer:
            assert "Backlog" in answer.read().decode()


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


def documents() -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in MANIFESTS:
        for document in yaml.safe_load_all(file.read_text()):
            yield file, document


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each manifest's pod."""
    for file, document in documents():
        spec = document.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if "template" in spec:
            yield file.name, spec["template"]["spec"]


def environment(file: str, container: dict[str, Any]) -> dict[str, str]:
    values: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        name = source["configMapRef"]["name"]
        [found] = [
            d for f, d in documents() if f.name == file and (d["kind"], d["metadata"]["name"]) == ("ConfigMap", name)
        ]
        values |= found["data"]
    return values | {one["name"]: one.get("value", "x") for one in container.get("env", ())}


PODS = dict(pods())


def test_every_manifest_is_looked_at():
    assert {file.name for file in MANIFESTS} - set(PODS) == {"podmonitor.yaml"}


@pytest.mark.parametrize("file", PODS)
def test_a_manifests_pod(file, monkeypatch, tmp_path):
    pod = PODS[file]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]

    # The settings are ones that are read, and the command is one that there is.
    values = environment(file, container)
    secret = tmp_path / "database-url"
    secret.write_text("postgresql://relay@postgres/outbox")
    for name, value in values.items():
        monkeypatch.setenv(name, str(secret) if name.endswith("_FILE") else value)
    check_environment()
    settings = load()
    assert settings.database_url == secret.read_text()
    result = CliRunner().invoke(app, [*container["args"], "--help"])
    assert result.exit_code == 0, result.output
    options = {word for word in container["args"] if word.startswith("--")}
    assert options <= set(re.findall(r"--[a-z-]+", result.output))

    # Probes ask where the metrics are served, and who ends a pod waits for as long as it may take.
    served = {value.rpartition(":")[2] for name, value in values.items() if name.endswith("METRICS_ADDRESS")}
    assert served == {str(port["containerPort"]) for port in container.get("ports", ())}
    probes = {kind: container[kind]["httpGet"] for kind in container if kind.endswith("Probe")}
    assert {probe["port"] for probe in probes.values()} <= {port["name"] for port in container.get("ports", ())}
    if probes:
        assert (probes["livenessProbe"]["path"], probes["readinessProbe"]["path"]) == ("/livez", "/readyz")
    if container["args"][:2] == ["relay", "run"]:
        assert pod["terminationGracePeriodSeconds"] > settings.relay.shutdown_seconds + 10
        assert settings.relay.instance


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
