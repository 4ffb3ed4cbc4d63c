"""What KEDA's and Prometheus' operators accept of the fields that the chart sets, as their resource definitions say.

A field that the chart does not set is unknown here: https://keda.sh/docs/latest/reference/scaledobject-spec/ and
https://prometheus-operator.dev/docs/api-reference/api/ have them all.
"""

from __future__ import annotations

from typing import Any

import jsonschema


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def _kind(version: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _object({"name": _TEXT}, labels=_TEXTS)
    return _object({"apiVersion": {"const": version}, "kind": _TEXT, "metadata": metadata, "spec": spec})


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": r"^(\d+(ms|[smhdwy]))+$"}
_COUNT = {"type": "integer", "minimum": 0}

_RULE = {
    "oneOf": [
        _object({"alert": _TEXT, "expr": _TEXT}, **{"for": _DURATION}, labels=_TEXTS, annotations=_TEXTS),
        _object({"record": _TEXT, "expr": _TEXT}, labels=_TEXTS),
    ]
}
_TRIGGER = _object({"type": _TEXT, "metadata": _TEXTS}, metricType={"enum": ["AverageValue", "Value", "Utilization"]})

SCHEMAS = {
    "PodMonitor": _kind(
        "monitoring.coreos.com/v1",
        _object(
            {
                "selector": _object({"matchLabels": _TEXTS}),
                "podMetricsEndpoints": _list(_object({"port": _TEXT}, interval=_DURATION)),
            }
        ),
    ),
    "PrometheusRule": _kind(
        "monitoring.coreos.com/v1",
        _object({"groups": _list(_object({"name": _TEXT, "rules": _list(_RULE)}, interval=_DURATION))}),
    ),
    "ScaledObject": _kind(
        "keda.sh/v1alpha1",
        _object(
            {"scaleTargetRef": _object({"name": _TEXT}), "triggers": _list(_TRIGGER)},
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
        ),
    ),
}


def validate(document: dict[str, Any]) -> None:
    """Raise jsonschema's ValidationError if an operator would refuse an object or not know one of its fields."""
    jsonschema.validate(document, SCHEMAS[document["kind"]])
