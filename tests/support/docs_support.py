"""The documentation, for the tests that compare it with the code: its pages, its blocks, its generator."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
_TOP: Final = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES: Final = sorted([*_TOP, *DOCS.rglob("*.md")])

_BLOCK: Final = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is that of its first line of content."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """Return the place in the form that editors open."""
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages, or those in these languages, without the indentation of a list."""
    return [block for block in _blocks() if not languages or block.language in languages]


@functools.cache
def _blocks() -> Sequence[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            indent, language, content = match.groups()
            line = text[: match.start()].count("\n") + 2
            lines = [each.removeprefix(indent) for each in content.splitlines(keepends=True)]
            found.append(Block(page.relative_to(ROOT).as_posix(), line, language, "".join(lines)))
    return found


def anchor(heading: str) -> str:
    """Return what a link to a heading ends in, on GitHub and on the site."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def inline() -> list[tuple[str, str]]:
    """Return the code inside of sentences: the page, and the text of each span."""
    spans = []
    for page in PAGES:
        text = _BLOCK.sub("", page.read_text())
        spans += [
            (page.relative_to(ROOT).as_posix(), " ".join(span.split()))
            for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
        ]
    return spans


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference", DOCS / "reference" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


generator: Final = _generator()
"""``docs/reference/generate.py``."""
