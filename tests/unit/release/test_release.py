"""What a release says about itself: versions, the long description, the bill of materials, which extra brings what."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import outbox
from relay.cli import _BROUGHT_BY

sys.path.append(str(Path(__file__).parents[3]))

from release import build as building
from release.build import BadRelease, Built
from release.closure import CORE, closure, extras
from release.readme import long_description
from release.sbom import NotLocked, sbom

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
LOCK = (ROOT / "requirements.lock").read_text()


@pytest.fixture(scope="module")
def project() -> ProjectMetadata:
    return ProjectMetadata(str(ROOT), PluginManager())


@pytest.fixture(scope="module")
def requires(project) -> list[str]:
    lines = list(project.core.dependencies)
    for extra, needed in project.core.optional_dependencies.items():
        lines += [f"{need}; extra == '{extra}'" for need in needed]
    return lines


# --- Versions


def test_the_version_has_one_place(project):
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project.version == outbox.__version__


def test_the_changelog_has_the_version():
    """Headings as in Keep a Changelog; what is unreleased stands above the releases, the newest first."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    assert headings[1].startswith(f"[{outbox.__version__}] - ")
    kinds = set(re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    minor = ".".join(outbox.__version__.split(".")[:2])
    assert f"| {minor} | yes |" in (ROOT / "SECURITY.md").read_text()


# --- The long description

LINKS = re.compile(r"\]\(([^)]*)\)")


def test_the_long_description_has_no_link_that_leads_nowhere(project):
    """The README as it is in the metadata now: with an address of the repository if there is one, or without links."""
    text = project.core.readme
    assert project.core.readme_content_type == "text/markdown"
    assert "## Quickstart" in text
    assert [link for link in LINKS.findall(text) if not link.startswith("https://")] == []
    assert text == long_description(README, project.core.urls.get("Source"), outbox.__version__)


@pytest.mark.parametrize(
    ("written", "with_source", "without"),
    [
        ("[a](docs/b.md#c)", "[a](https://h/r/blob/v1.2.3/docs/b.md#c)", "a"),
        ("![a](docs/b.png)", "![a](https://h/r/raw/v1.2.3/docs/b.png)", ""),
        ("[`a`](b.py), [c](d)", "[`a`](https://h/r/blob/v1.2.3/b.py), [c](https://h/r/blob/v1.2.3/d)", "`a`, c"),
        ("[a](#b)", "[a](#b)", "[a](#b)"),
        ("[a](https://x/y)", "[a](https://x/y)", "[a](https://x/y)"),
    ],
)
def test_links_in_the_long_description(written, with_source, without):
    assert long_description(written, "https://h/r/", "1.2.3") == with_source
    assert long_description(written, None, "1.2.3").partition("\n")[0] == without


# --- Extras


def test_every_module_of_an_extra_is_known_to_the_command(requires):
    """``outbox`` names the smallest extra with what it lacks, of those that bring what the command itself needs."""
    brings = {extra: closure(requires, extra).keys() for extra in extras(requires)}
    with_command = {extra: brought for extra, brought in brings.items() if "typer" in brought}
    modules = packages_distributions()
    for module, extra in _BROUGHT_BY.items():
        names = {name.lower().replace("_", "-") for name in modules[module]}
        having = [brought for brought in with_command.values() if brought & names]
        assert with_command[extra] in having, module
        assert with_command[extra] <= set.intersection(*map(set, having)), module
    named = {re.split(r"[^\w.-]", line)[0] for line in requires if "extra ==" in line and "'dev'" not in line}
    known = {name.lower().replace("_", "-") for module in _BROUGHT_BY for name in modules[module]}
    # These are read through others, which are missed first; Django is for services.
    assert named - known <= {"django", "pydantic", "psycopg-binary"}


def test_an_extra_is_what_its_markers_say():
    requires = [
        "sqlalchemy",
        "orjson; sys_platform == 'nowhere'",
        "psycopg[binary]; extra == 'x'",
        "build; extra == 'dev'",
    ]
    assert extras(requires) == [CORE, "x"]
    assert {"sqlalchemy", "typing-extensions"} <= closure(requires, CORE).keys()
    assert not {"orjson", "psycopg"} & closure(requires, CORE).keys()
    assert {"psycopg", "psycopg-binary"} <= closure(requires, "x").keys()
    assert "sqlalchemy" not in closure(requires, "x")


# --- The bill of materials


@pytest.fixture
def wheel(project, requires, tmp_path) -> Path:
    """A wheel of which only the metadata matters."""
    made = tmp_path / "outbox_kafka-0.1.0-py3-none-any.whl"
    head = ["Metadata-Version: 2.4", "Name: outbox-kafka", "Version: 0.1.0", f"Summary: {project.core.description}"]
    head += ["License-Expression: Apache-2.0", *(f"Requires-Dist: {line}" for line in requires)]
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("outbox_kafka-0.1.0.dist-info/METADATA", "\n".join([*head, "", "Version: in the text"]))
    return made


def test_the_bill_of_materials(wheel, requires):
    found = sbom(wheel, [wheel], LOCK, 1_700_000_000)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    components = {component["name"].lower().replace("_", "-"): component for component in found["components"]}
    assert components.keys() == {name for extra in extras(requires) for name in closure(requires, extra)}
    assert not {"pytest", "ruff", "mypy", "build"} & components.keys()
    required = {name for name, component in components.items() if component["scope"] == "required"}
    assert required == {"orjson", "sqlalchemy", "typing-extensions", "uuid-utils"}
    assert components["jgo"]["properties"] == [
        {"name": "outbox-kafka:extra", "value": name} for name in ("all", "sandbox")
    ]
    assert [name for name, component in components.items() if "licenses" not in component] == []
    assert components["sqlalchemy"]["licenses"] == [{"expression": "MIT"}]
    versions = re.findall(r"^sqlalchemy==(\S+)", LOCK, re.MULTILINE)
    assert components["sqlalchemy"]["purl"] == f"pkg:pypi/sqlalchemy@{versions[0]}"
    subject = found["metadata"]["component"]
    assert (subject["version"], found["metadata"]["timestamp"]) == ("0.1.0", "2023-11-14T22:13:20Z")
    # References lead to components, each of which is described once, and everything can be reached.
    wants = {entry["ref"]: entry["dependsOn"] for entry in found["dependencies"]}
    assert len(wants) == len(found["dependencies"])
    assert wants.keys() == {subject["bom-ref"], *(component["bom-ref"] for component in found["components"])}
    reached, waiting = set[str](), [subject["bom-ref"]]
    while waiting:
        reached.add(ref := waiting.pop())
        waiting += [each for each in wants[ref] if each not in reached]
    assert reached == wants.keys()


def test_another_version_than_the_locks_is_refused(wheel):
    with pytest.raises(NotLocked, match=r"sqlalchemy .*make install"):
        sbom(wheel, [], re.sub(r"^sqlalchemy==\S+", "sqlalchemy==1.0", LOCK, flags=re.MULTILINE), 0)


# --- What is checked of the files


@pytest.fixture
def built(tmp_path) -> Built:
    """A small release as it should be, of the repository's files in NAMES."""
    wheel, sdist = tmp_path / "p-1-py3-none-any.whl", tmp_path / "p-1.tar.gz"
    info = ["METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("outbox/a.py", "outbox/migrations/env.py", *(f"p-1.dist-info/{name}" for name in info)):
            archive.writestr(name, "")
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("outbox/a.py", "migrations/env.py", "LICENSE", "PKG-INFO"):
            archive.addfile(tarfile.TarInfo(f"p-1/{name}"))
    return Built(wheel, sdist)


NAMES = ["outbox/a.py", "migrations/env.py", "LICENSE", "tests/test_a.py", "Makefile"]


def test_a_file_that_is_missing_or_foreign_is_found(built):
    building.check(built, NAMES)
    with pytest.raises(BadRelease, match=r"\.whl: missing \['outbox/b\.html'\], not expected \[\]"):
        building.check(built, [*NAMES, "outbox/b.html"])
    with pytest.raises(BadRelease, match=r"\.whl: missing \[\], not expected \['outbox/migrations/env\.py'\]"):
        building.check(built, ["outbox/a.py", "LICENSE"])
    with pytest.raises(BadRelease, match=r"\.tar\.gz: missing \['docs/index\.md'\]"):
        building.check(built, [*NAMES, "docs/index.md"])
    with zipfile.ZipFile(built.wheel, "a") as archive:
        archive.writestr("outbox/__pycache__/a.pyc", "")
    with pytest.raises(BadRelease, match=r"not expected \['outbox/__pycache__/a\.pyc'\]"):
        building.check(built, NAMES)


def test_what_is_not_committed_is_no_release(tmp_path):
    building._git(tmp_path, "init", "--quiet")
    building.require_committed(tmp_path)
    (tmp_path / "outbox.py").touch()
    with pytest.raises(BadRelease, match=r"outbox\.py"):
        building.require_committed(tmp_path)
