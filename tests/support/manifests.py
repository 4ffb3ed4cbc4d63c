"""The manifests of deploy/kubernetes, and what their containers find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/chart"
MANIFESTS = ROOT / "deploy/kubernetes"
VALUES = ROOT / "deploy/kubernetes.values.yaml"
MONITORING = ROOT / "docs/operations/monitoring"
SECRETS = "/run/secrets/outbox"
OLDEST, NEWEST = "1.31", "1.37"

DOCUMENTS: list[dict[str, Any]] = [
    document
    for file in sorted(MANIFESTS.glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
    if document
]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [document for document in DOCUMENTS if document["kind"] in kinds]


def template(document: dict[str, Any]) -> dict[str, Any]:
    """Return the pods that a Deployment, a Job or a CronJob makes."""
    spec = document["spec"]
    found: dict[str, Any] = spec.get("jobTemplate", {}).get("spec", spec)["template"]
    return found


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a pod's containers in the order in which they begin."""
    return [*pod.get("initContainers", ()), *pod["containers"]]


PODS = {
    document["metadata"]["name"]: template(document)["spec"] for document in of_kind("Deployment", "Job", "CronJob")
}
[MIGRATE] = [name for name in PODS if name.startswith("outbox-migrate")]


def variables(container: dict[str, Any], secrets: Path) -> dict[str, str]:
    """Return a container's environment, with its Secret in a folder."""
    values = {one["name"]: one.get("value", "x") for one in container["env"]}
    return {name: value.replace(SECRETS, str(secrets)) for name, value in values.items()}
