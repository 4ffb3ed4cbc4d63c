"""Build one zip for ``--py-files`` that makes a job's modules importable on executors.

Executors import the job's effect, transform and decoder by name, so they need the modules that define them and all that
these import. Packages that are installed with pip are not included: ``requires`` lists those that executors need. The
same sources give the same bytes.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import site
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import outbox
from outbox import __version__
from outbox.consumer.errors import JobError
from spark_jobs.job import ConsumerJob, find_job
from spark_jobs.payloads.decoding import Avro, JsonSchema, Protobuf

MANIFEST: Final = "outbox-package.json"
"""The file in the zip with the job's name and the version of this package."""

EXECUTORS_NEED: Final = (
    "confluent-kafka",
    "numpy",
    "orjson",
    "pandas",
    "psycopg",
    "pyarrow",
    "sqlalchemy",
    "uuid-utils",
)
"""Distributions that our own modules import on executors, apart from pyspark, which every executor has."""

_DECODERS_NEED: Final[dict[type, str]] = {Avro: "fastavro", JsonSchema: "jsonschema", Protobuf: "protobuf"}

_OURS: Final = frozenset({"outbox", "spark_jobs", "pyspark"})
# Folders that executors do not need.
_LEFT_OUT: Final = frozenset({"sandbox", "testing", "migrations", "examples"})
_NATIVE: Final = (*importlib.machinery.EXTENSION_SUFFIXES, ".so", ".pyd", ".dylib", ".dll")
_ARCHIVES: Final = (".whl", ".zip", ".egg", ".jar")
_DATE: Final = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Package:
    """The contents of one job's zip.

    job       as MODULE:NAME.
    files     name in the zip → content, sorted by name.
    requires  distributions that must be installed on executors, sorted.
    """

    job: str
    files: dict[str, bytes]
    requires: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write the zip atomically: readers of ``path`` see the old file or the new one."""
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
                for name in sorted({*self.files, *_folders(self.files)}):
                    archive.writestr(_entry(name), self.files.get(name, b""))
            part.replace(path)
        except OSError as error:
            raise JobError(f"{path} can't be written: {error.strerror or error}") from error
        finally:
            part.unlink(missing_ok=True)


def collect(spec: str, include: Iterable[Path] = ()) -> Package:
    """Import the job ``MODULE:NAME`` and collect everything that executors need for it.

    include   further files and folders, which no import refers to; they go to the top of the zip under their own names.

    Raises JobError for a job that executors can't import, and for native code.
    """
    if spec.partition(":")[0] == "__main__":
        raise JobError(f"{spec!r}: executors can't import __main__; move the job into a module of its own")
    job = find_job(spec)
    found = _Found()
    for folder in (Path(outbox.__file__).parent, Path(__file__).parents[1]):
        found.tree(folder.name, folder, leave_out=_LEFT_OUT)
    for module in dict.fromkeys([spec.partition(":")[0], *_modules_of(job)]):
        if module == "__main__":
            raise JobError(f"{spec!r}: a function of the job is in __main__; executors can't import that: move it")
        found.module(module)
    for path in include:
        found.given(path)
    found.files[MANIFEST] = (json.dumps({"job": spec, "version": __version__}, sort_keys=True) + "\n").encode()
    requires = sorted({*EXECUTORS_NEED, *_of_decoder(job.schema), *found.distributions()})
    return Package(spec, dict(sorted(found.files.items())), tuple(requires))


class _Found:
    """Collects files, and remembers the modules that were already processed."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self._looked_up: set[str] = set()
        self._trees: set[str] = set()
        self._installed: set[str] = set()

    def module(self, dotted: str) -> None:
        """Add a local module, or its whole package, and what it imports. Remember it instead if it is installed."""
        if dotted in self._looked_up:
            return
        self._looked_up.add(dotted)
        top = dotted.partition(".")[0]
        if top in _OURS or top in sys.stdlib_module_names:
            return
        parts = dotted.split(".")
        # A folder without __init__.py may contain anything, so only the module is added and not the whole folder.
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            spec = _spec(name)
            if spec is None:
                return
            if spec.origin is None:
                continue
            origin = Path(spec.origin)
            if not origin.is_file():
                return  # built in, frozen, or already in a zip
            if not _local(origin):
                self._installed.add(top)
                return
            inside = name.replace(".", "/")
            if spec.submodule_search_locations is not None:
                self.tree(inside, origin.parent)
            else:
                self._file(inside + origin.suffix if not _is_native(origin) else origin.name, origin)
            return

    def tree(self, inside: str, folder: Path, leave_out: frozenset[str] = frozenset()) -> None:
        """Add a folder without caches, hidden files, and the folders ``leave_out`` at its top level."""
        if inside in self._trees:
            return
        self._trees.add(inside)
        for at, folders, names in os.walk(folder):
            here = Path(at)
            folders[:] = sorted(
                name
                for name in folders
                if name != "__pycache__" and not name.startswith(".") and not (here == folder and name in leave_out)
            )
            for name in sorted(names):
                if not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                    path = here / name
                    self._file("/".join([inside, *path.relative_to(folder).parts]), path)

    def given(self, path: Path) -> None:
        """Add a file or folder that the user has named."""
        whole = path.resolve()
        if whole.is_dir():
            self.tree(whole.name, whole)
        elif whole.is_file():
            if whole.name.endswith(_ARCHIVES):
                raise JobError(f"{path}: an archive inside the zip can't be imported; install it on the executors")
            self._file(whole.name, whole)
        else:
            raise JobError(f"{path}: there is no such file or folder to include")

    def distributions(self) -> set[str]:
        """Return the distributions of the modules that are not packed."""
        known = importlib.metadata.packages_distributions()
        return {re.sub(r"[-_.]+", "-", known.get(top, [top])[0]).lower() for top in self._installed}

    def _file(self, inside: str, path: Path) -> None:
        if _is_native(path):
            raise JobError(
                f"{path} is native code: Python can't load it from a zip. Install its package on the executors, or "
                "ship a whole environment with spark.archives"
            )
        content = path.read_bytes()
        if self.files.setdefault(inside, content) != content:
            raise JobError(f"{path}: the zip has another {inside} already; rename one of them")
        ours = inside.partition("/")[0] in _OURS
        if path.suffix == ".py" and not ours:
            for name in _imports(content, path, inside):
                self.module(name)


def _of_decoder(schema: object) -> Iterator[str]:
    if type(schema) in _DECODERS_NEED:
        yield _DECODERS_NEED[type(schema)]
    if getattr(schema, "registry", None) is not None:
        yield "confluent-kafka[schemaregistry]"


def _modules_of(job: ConsumerJob) -> list[str]:
    """Return the modules of the job's functions, which may differ from the job's own."""
    parts: list[object] = [job.effect, job.transform, job.schema]
    owners = [part if hasattr(part, "__qualname__") else type(part) for part in parts if part is not None]
    return [str(owner.__module__) for owner in owners]


def _imports(source: bytes, path: Path, inside: str) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, except for type checkers only."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise JobError(f"{path} can't be read by Python {sys.version.split()[0]}: {error}") from error
    package = inside.removesuffix(".py").removesuffix("/__init__").split("/")
    if not inside.endswith("/__init__.py"):
        package = package[:-1]
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            if whole:
                yield whole
            # ``from a import b``: b may be a module.
            yield from (f"{whole}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def _spec(dotted: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(dotted)
    except (ImportError, ValueError):
        return None  # an optional import, since importing the job has succeeded


def _local(path: Path) -> bool:
    """Return whether a module is the user's own rather than installed; an editable installation counts as local."""
    paths = sysconfig.get_paths()
    roots = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots |= {*site.getsitepackages(), site.getusersitepackages()}
    real = path.resolve()
    return not any(real.is_relative_to(Path(root).resolve()) for root in roots)


def _is_native(path: Path) -> bool:
    return path.name.endswith(_NATIVE)


def _folders(names: Iterable[str]) -> Iterator[str]:
    """Yield the folders of these files. Before 3.13 Python needs their entries to find namespace packages in a zip."""
    for name in names:
        parts = name.split("/")[:-1]
        yield from ("/".join(parts[: depth + 1]) + "/" for depth in range(len(parts)))


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.create_system = 3
    entry.external_attr = (0o40755 << 16 | 0x10) if name.endswith("/") else 0o100644 << 16
    return entry
