"""The bill of materials of a release, in CycloneDX 1.6 (JSON): what each extra brings along, in the locked versions.

It is for the platform on which it is made, which it names: elsewhere other distributions may be needed.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import platform
import re
import uuid
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile

from packaging.utils import NormalizedName, canonicalize_name

from release.closure import CORE, PROJECT, Installed, closure, direct, extras, needs

_PINNED: Final = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


class NotLocked(Exception):
    """A distribution is installed in another version than the lock file's, or is not in it."""


def sbom(wheel: Path, files: Iterable[Path], lock: str, epoch: int) -> dict[str, Any]:
    """Return the document about a wheel. ``files``: those of the release; ``epoch``: its time, in Unix seconds."""
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    requires = metadata.get_all("Requires-Dist", [])
    by_extra = {extra: closure(requires, extra) for extra in extras(requires)}
    by_extra = {extra: found | by_extra[CORE] for extra, found in by_extra.items()}
    found = {name: one for each in by_extra.values() for name, one in each.items()}
    _check(found, lock)
    brings = {name: [extra for extra, each in by_extra.items() if name in each] for name in found}
    project = {
        "type": "library",
        "bom-ref": _purl(PROJECT, metadata["Version"]),
        "name": metadata["Name"],
        "version": metadata["Version"],
        "description": metadata["Summary"],
        "licenses": [{"expression": metadata["License-Expression"]}],
        "purl": _purl(PROJECT, metadata["Version"]),
        "components": [_file(path) for path in files],
    }
    refs = {name: _purl(name, one.version) for name, one in found.items()}
    named = set[NormalizedName]().union(*(direct(requires, extra) for extra in by_extra))
    wants = [{"ref": project["purl"], "dependsOn": sorted(refs[name] for name in named)}]
    wants += [
        {"ref": refs[name], "dependsOn": [refs[each] for each in needs(one, found)]}
        for name, one in sorted(found.items())
    ]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": dt.datetime.fromtimestamp(epoch, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": project,
            "properties": [
                {"name": "python", "value": ".".join(platform.python_version_tuple()[:2])},
                {"name": "platform", "value": f"{platform.system()} {platform.machine()}"},
            ],
        },
        "components": [_component(name, one, brings[name]) for name, one in sorted(found.items())],
        "dependencies": wants,
    }
    digest = uuid.uuid5(uuid.NAMESPACE_URL, repr(document))
    return document | {"serialNumber": digest.urn}


def _check(found: Mapping[NormalizedName, Installed], lock: str) -> None:
    # Some have more than one version there, each for other versions of Python.
    locked = {(canonicalize_name(name), version) for name, version in _PINNED.findall(lock)}
    others = [f"{name} {one.version}" for name, one in sorted(found.items()) if (name, one.version) not in locked]
    if others:
        raise NotLocked(f"not the lock file's versions: {', '.join(others)}; run `make install`")


def _component(name: NormalizedName, one: Installed, brought_by: list[str]) -> dict[str, Any]:
    purl = _purl(name, one.version)
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": one.metadata["Name"],
        "version": one.version,
        "scope": "required" if CORE in brought_by else "optional",
        "purl": purl,
        "properties": [{"name": "outbox-kafka:extra", "value": extra} for extra in brought_by if extra != CORE],
    }
    if licence := _licence(one):
        component["licenses"] = [licence]
    return component


def _licence(one: Installed) -> dict[str, Any] | None:
    """Return the licence that the metadata declares: as an expression, in a word, or as a classifier."""
    if expression := one.metadata.get("License-Expression"):
        return {"expression": expression}
    name = (one.metadata.get("License") or "").strip()
    classifiers = [line for line in one.metadata.get_all("Classifier") or () if line.startswith("License :: ")]
    if (not name or "\n" in name) and classifiers:
        name = classifiers[0].rpartition(" :: ")[2]
    return {"license": {"name": name.partition("\n")[0]}} if name else None


def _file(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"type": "file", "name": path.name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"
