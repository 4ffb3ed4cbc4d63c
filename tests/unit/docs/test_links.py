"""Pages lead where they say: links between them, and the files that they name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from docs_support import DOCS, PAGES, ROOT, anchor

# The demo's shop is a file of the user's in the text.
FILES = re.compile(r"`((?:outbox|relay|spark_jobs|migrations|tests|examples|benchmarks|docs|deploy)/[\w./-]*)`")
BESIDE = re.compile(r"`((?:polling|wal|kafka|driver|task|postgres)/\w+\.py)`")
LINKS = re.compile(r"\]\(([^)#\s]+)?(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    missing = [name for name in FILES.findall(text) if not (ROOT / name).exists()]
    missing += [
        name
        for name in BESIDE.findall(text)
        if not any((ROOT / top / name).exists() for top in ("relay", "spark_jobs"))
    ]
    for link, heading in LINKS.findall(text):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        target = page.parent / link if link else page
        if not target.exists():
            missing.append(link)
        elif heading and target.suffix == ".md" and heading not in anchors(target):
            missing.append(f"{link}#{heading}")
    assert missing == []


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert len(pages) > 20
    assert [page for page in pages if page != "index.md" and f"]({page})" not in index] == []


def test_every_page_is_in_the_sites_navigation():
    def pages(entries):
        for entry in entries:
            for place in entry.values():
                yield from [place] if isinstance(place, str) else pages(place)

    project = tomllib.loads((DOCS / "zensical.toml").read_text())["project"]
    assert sorted(pages(project["nav"])) == sorted(page.relative_to(ROOT).as_posix() for page in PAGES)
