"""The chart, and the manifests that are rendered from it. test_kubernetes_processes.py runs them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

import custom_resources
import jsonschema
import kubernetes_validate
import pytest
import yaml
from manifests import (
    CHART,
    DOCUMENTS,
    MANIFESTS,
    MIGRATE,
    MONITORING,
    NEWEST,
    OLDEST,
    PODS,
    ROOT,
    VALUES,
    containers,
    of_kind,
    template,
    variables,
)
from typer.testing import CliRunner

from outbox._app.settings import check_environment
from relay.cli.app import app
from relay.config import load
from spark_jobs.job import find_job

# --- What the chart renders


def test_the_manifests_are_what_make_chart_wrote_of_this_chart():
    """Without helm: neither the chart nor a manifest has changed since."""
    lines = [line.split("  ") for line in (MANIFESTS / "SHA256SUMS").read_text().splitlines()]
    files = {file for file in [*CHART.rglob("*"), VALUES, *MANIFESTS.glob("*.yaml")] if file.is_file()}
    assert {name for _, name in lines} == {
        file.relative_to(ROOT).as_posix() for file in files if not file.is_symlink()
    }, "`make chart`"
    changed = [name for sum_, name in lines if hashlib.sha256((ROOT / name).read_bytes()).hexdigest() != sum_]
    assert changed == [], "`make chart`"


@cache
def helm() -> str:
    built = ROOT / ".venv-helm/bin/helm"
    found = str(built) if built.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("no helm here: `make chart` builds it")
    return found


def attempted(*options: str, release: str = "outbox") -> subprocess.CompletedProcess[str]:
    command = [helm(), "template", release, str(CHART), "--kube-version", OLDEST, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(*options: str, release: str = "outbox") -> list[dict[str, Any]]:
    done = attempted(*options, release=release)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def test_helm_finds_no_fault_in_the_chart():
    command = [helm(), "lint", "--strict", str(CHART), "--values", str(VALUES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_helm_renders_the_manifests():
    found = rendered("--values", str(VALUES))
    assert sorted(found, key=json.dumps) == sorted(DOCUMENTS, key=json.dumps)


def test_helm_renders_valid_objects_with_what_is_not_in_the_manifests():
    found = rendered(
        *("--values", str(VALUES), "--set", "monitoring.rules.enabled=true,monitoring.dashboard.enabled=true"),
        *("--set", "monitoring.rules.runbooks=https://docs.example.com/runbooks.html"),
    )
    for document in found:
        validate(document)
    by_kind = {document["kind"]: document for document in found}
    rules = json.dumps(by_kind["PrometheusRule"]["spec"])
    runbook = '"runbook_url": "https://docs.example.com/runbooks.html#'
    assert rules.count(runbook) > 20
    plain = json.loads(rules.replace(runbook, '"runbook": "runbooks.md#'))
    assert plain == yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    dashboard = json.loads(by_kind["ConfigMap"]["data"]["outbox.json"])
    assert dashboard == json.loads((MONITORING / "grafana.json").read_text())


def test_helm_names_the_job_anew_for_another_image_and_each_release_apart():
    def names(*options: str, release: str = "outbox") -> set[tuple[str, str]]:
        return {(one["kind"], one["metadata"]["name"]) for one in rendered(*options, release=release)}

    digest = f"image.digest=sha256:{'0' * 64}"
    first, second, pinned = names(), names("--set", "image.tag=0.2.0"), names("--set", digest)
    for one, other in ((first, second), (first, pinned), (second, pinned)):
        assert {kind for kind, _ in one ^ other} == {"Job"}
    assert not first & names(release="billing")
    [relay] = [one for one in rendered("--set", digest, release="billing") if one["kind"] == "Deployment"]
    [container] = template(relay)["spec"]["containers"]
    assert container["image"].endswith(f"outbox@sha256:{'0' * 64}")
    assert {"name": "OUTBOX_NAME", "value": "billing"} in container["env"]


def test_helm_renders_a_release_of_consumers_alone():
    off = "relay.enabled=false,migrate.enabled=false,migrate.consumer.enabled=true,migrate.consumer.secret=sink"
    found = rendered("--set", off, "--set", "consumer.jobs.totals.job=spark_jobs.order_totals:job")
    assert sorted(one["kind"] for one in found) == ["CronJob", "Deployment", "Job", "ServiceAccount"]
    [job] = [template(one)["spec"] for one in found if one["kind"] == "Job"]
    assert [one["name"] for one in containers(job)] == ["upgrade-consumer", "roles-consumer"]
    assert [one["secret"]["secretName"] for one in job["volumes"] if "secret" in one] == ["sink"]
    for one in found:
        validate(one)


def test_helm_shortens_the_release_for_the_longest_names():
    """Kubernetes adds 11 characters to a CronJob's name for its Jobs, and theirs may have 63."""
    jobs = "consumer.jobs.{0}.job=spark_jobs.order_totals:job,consumer.jobs.{0}.schedule=@hourly"
    options = ("--values", str(VALUES), "--set", jobs.format("c" * 22))
    documents = rendered(*options, "--set", f"consumer.jobs.{'d' * 22}.job=a:job", release="r" * 53)
    for document in documents:
        validate(document)
        assert len(document["metadata"]["name"]) <= (52 if document["kind"] == "CronJob" else 63)
    named = {one["metadata"]["name"]: one for one in documents if one["kind"] == "CronJob"}
    assert set(named) == {f"{'r' * 29}-{what}" for what in ("prune", "prune-consumer", "c" * 22)}
    [container] = template(named[f"{'r' * 29}-{'c' * 22}"])["spec"]["containers"]
    assert container["args"] == ["consume", "spark_jobs.order_totals:job", "--once", "--json"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("relay.replicas=3", "3"),
        ("relay.replicas=0", "1"),
        ("relay.replicas=5,relay.autoscaling.enabled=true,relay.autoscaling.minReplicas=3", "3"),
        ("relay.replicas=3,relay.settings.OUTBOX_RELAY__EXPECTED_RELAYS=x", "x"),
    ],
)
def test_helm_tells_the_relays_how_many_should_run(values, expected):
    [relay] = [one for one in rendered("--set", values) if one["kind"] == "Deployment"]
    [container] = template(relay)["spec"]["containers"]
    found = [one["value"] for one in container["env"] if one["name"] == "OUTBOX_RELAY__EXPECTED_RELAYS"]
    assert found == [expected]


def test_a_consumer_has_no_name_of_the_charts_own_parts():
    """Two objects of a kind would have one name."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    names = schema["properties"]["consumer"]["properties"]["jobs"]["propertyNames"]
    own = {one["metadata"]["name"] for one in of_kind("Deployment", "CronJob")} - {"outbox-order-totals"}
    assert {f"outbox-{name}" for name in names["not"]["enum"]} == own


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("relay.replicaas=3", "replicaas"),
        ("settings.OUTBOX_X=3", "string"),
        ("page.enabled=true", "page.origin"),
        ("consumer.jobs.relay.job=spark_jobs.order_totals:job", "invalid propertyName 'relay'"),
    ],
)
def test_helm_refuses_values_that_are_wrong(values, said):
    done = attempted("--set", values)
    assert done.returncode != 0
    assert said in done.stderr


def test_the_chart_has_the_rules_and_the_dashboard_of_the_documentation():
    files = {file.name: file for file in (CHART / "files").iterdir()}
    assert set(files) == {"alerts.yaml", "grafana.json"}
    for name, file in files.items():
        assert file.resolve() == MONITORING / name
        assert f'"files/{name}"' in (CHART / "templates/monitoring.yaml").read_text()


# --- Values


def test_values_fit_their_schema_which_knows_no_others():
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(defaults, schema)
    jsonschema.validate(yaml.safe_load(VALUES.read_text()), schema)

    def same(part: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
        while "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        if "properties" in part and part.get("additionalProperties") is False and values:
            assert set(part["properties"]) - {"global"} == set(values), where
            for name, value in values.items():
                if isinstance(value, dict):
                    same(part["properties"][name], value, f"{where}.{name}")

    same(schema, defaults, "values")


def test_the_chart_has_the_version_of_the_package():
    from outbox import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


# --- The manifests


def validate(document: dict[str, Any]) -> None:
    if document["kind"] in custom_resources.SCHEMAS:
        custom_resources.validate(document)
    else:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_a_manifest_is_valid(document):
    validate(document)


def test_an_unknown_field_is_not_valid():
    with pytest.raises(kubernetes_validate.ValidationError, match="portz"):
        validate({**of_kind("Service")[0], "spec": {"portz": []}})
    [scaled] = of_kind("ScaledObject")
    [trigger] = scaled["spec"]["triggers"]
    for wrong in ({**trigger, "metadata": {**trigger["metadata"], "ignoreNullValues": False}}, {**trigger, "typ": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            validate({**scaled, "spec": {**scaled["spec"], "triggers": [wrong]}})


def test_the_rules_are_valid_in_a_prometheus_rule():
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    custom_resources.validate(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "outbox"},
            "spec": rules,
        }
    )


def test_selectors_find_their_pods():
    documents = of_kind("Deployment", "Job", "CronJob")
    labels = {one["metadata"]["name"]: template(one)["metadata"]["labels"] for one in documents}

    def found(selector: dict[str, str]) -> set[str]:
        return {name for name, own in labels.items() if selector.items() <= own.items()}

    for deployment in of_kind("Deployment"):
        assert found(deployment["spec"]["selector"]["matchLabels"]) == {deployment["metadata"]["name"]}
    [service] = of_kind("Service")
    assert found(service["spec"]["selector"]) == {"outbox-page"}
    [budget] = of_kind("PodDisruptionBudget")
    assert found(budget["spec"]["selector"]["matchLabels"]) == {"outbox-relay"}
    # While Kafka is away no relay is ready, and nodes must be drained all the same.
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    [monitor] = of_kind("PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    scraped = found(monitor["spec"]["selector"]["matchLabels"])
    ports = {
        name: {port["name"] for one in containers(pod) for port in one.get("ports", ())} for name, pod in PODS.items()
    }
    assert {name for name in scraped if endpoint["port"] in ports[name]} == {"outbox-relay", "outbox-order-totals"}
    whole, job = sorted(of_kind("NetworkPolicy"), key=lambda one: len(one["spec"]["policyTypes"]), reverse=True)
    assert found(whole["spec"]["podSelector"]["matchLabels"]) == set(PODS)
    assert found(job["spec"]["podSelector"]["matchLabels"]) == {MIGRATE}
    [scaled] = of_kind("ScaledObject")
    assert scaled["spec"]["scaleTargetRef"] == {"name": "outbox-relay"}
    [relays] = [one for one in of_kind("Deployment") if one["metadata"]["name"] == "outbox-relay"]
    assert "replicas" not in relays["spec"], "an upgrade would set them anew"


def test_what_comes_before_an_upgrade_needs_nothing_that_comes_with_it():
    hooks = [one for one in DOCUMENTS if "helm.sh/hook" in one["metadata"].get("annotations", {})]
    assert {one["kind"] for one in hooks} == {"Job", "NetworkPolicy"}
    for one in hooks:
        # The one of the version before is in the way otherwise.
        assert "before-hook-creation" in one["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    made = {one["metadata"]["name"] for one in of_kind("ServiceAccount")}
    assert PODS[MIGRATE]["serviceAccountName"] not in made
    assert "configMap" not in json.dumps(PODS[MIGRATE])
    assert [one["name"] for one in containers(PODS[MIGRATE])] == [
        "upgrade",
        "roles",
        "upgrade-consumer",
        "roles-consumer",
    ]


CONTAINERS = {f"{name}/{one['name']}": (name, one) for name, pod in PODS.items() for one in containers(pod)}


@pytest.mark.parametrize(("name", "container"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container(name, container, monkeypatch, tmp_path):
    pod = PODS[name]
    users = set(re.findall(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    own = pod["securityContext"]
    assert users == {(str(own["runAsUser"]), str(own["runAsGroup"]))}
    assert own["runAsNonRoot"] is True
    assert own["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    may = container["securityContext"]
    assert (may["readOnlyRootFilesystem"], may["allowPrivilegeEscalation"]) == (True, False)
    assert may["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]

    # The settings are ones that are read, and the command is one that there is. A job is one of the image's.
    values = variables(container, tmp_path)
    (tmp_path / "database-url").write_text("postgresql://relay@postgres/outbox")
    (tmp_path / "proxy-secret").write_text("s" * 32)
    (tmp_path / "sink-url").write_text("postgresql://page@sink/outbox")
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)
    check_environment()
    settings = load()
    assert settings.database_url == "postgresql://relay@postgres/outbox"
    assert settings.relay.sink_url == ("postgresql://page@sink/outbox" if name == "outbox-page" else None)
    assert "postgresql://" not in json.dumps(container), "passwords belong into Secrets"
    words = container["args"]
    # Kubernetes would put the variable's value there, and all users of the node see a process's arguments.
    assert "$(" not in "".join(words)
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", result.output))

    if words[0] == "consume":
        assert words[1].startswith("spark_jobs."), "the wheel has no other module with a job"
        assert find_job(words[1]).group

    # Probes ask where something is served, and who ends a pod waits for as long as it may take.
    served = {value.rpartition(":")[2] for variable, value in values.items() if variable.endswith("_ADDRESS")}
    assert served == {str(port["containerPort"]) for port in container.get("ports", ())}
    probes = {kind: container[kind] for kind in container if kind.endswith("Probe")}
    assert bool(probes) == bool(served)
    named = {probe[kind]["port"] for probe in probes.values() for kind in ("httpGet", "tcpSocket") if kind in probe}
    assert named <= {port["name"] for port in container.get("ports", ())}
    if words[:2] == ["relay", "run"]:
        assert pod["terminationGracePeriodSeconds"] > settings.relay.shutdown_seconds + 10
        assert settings.relay.instance
        [scaled] = of_kind("ScaledObject")
        assert settings.relay.expected_relays == scaled["spec"]["minReplicaCount"]
        # Who restarts relays that are not ready restarts them while Kafka is away.
        assert probes["livenessProbe"]["httpGet"]["path"] == probes["startupProbe"]["httpGet"]["path"] == "/livez"
        assert probes["readinessProbe"]["httpGet"]["path"] == "/readyz"
