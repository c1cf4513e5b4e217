"""The documents name only what exists: linked pages and headings, modules that are run, files and tests."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "llms.txt", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
PAGES.remove(ROOT / "CHANGELOG.md")  # it may name what a later version has removed
LONGEST = 30 * 1024  # bytes of a page of the site
ROOMS = "|".join(path.name for path in (ROOT / "jaxserve").iterdir() if path.is_dir())


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for link in re.findall(r"\]\(((?!https?:)[^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def missing(text: str) -> Iterator[str]:
    """Modules of the repository that are run, and files and tests that are named, but do not exist."""
    for module in re.findall(r"python -m ((?:jaxserve|benchmarks|docgen|examples|tests)\.[\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            yield module
    for path in re.findall(r"`((?:jaxserve|tests|benchmarks|examples|docgen|configs|deploy)/[\w/.]+)", text):
        if not (ROOT / path).exists():
            yield path
    for path in re.findall(rf"`((?:{ROOMS})/[\w/.]+\.py)`", text):
        if not (ROOT / "jaxserve" / path).exists():
            yield path
    for path, name in re.findall(r"`(tests/[\w/.]+)::(\w+)`", text):
        if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"):
            yield f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [*broken_links(page, text), *missing(text)] == []


def test_no_page_of_the_site_is_long() -> None:
    assert [page.name for page in (ROOT / "docs").rglob("*.md") if page.stat().st_size > LONGEST] == []


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One title\n")
    assert list(broken_links(page, "[a](none.md) [b](#one-title) [c](#two) [d](https://e)")) == ["none.md", "#two"]
    text = "python -m benchmarks.none `jaxserve/none.py` `kv/none.py` `tests/test_documents.py::test_none`"
    assert list(missing(text)) == [
        *("benchmarks.none", "jaxserve/none.py", "kv/none.py"),
        "tests/test_documents.py::test_none",
    ]


def test_the_readme_counts_the_clients_of_the_table() -> None:
    table = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \((?:PyPI|npm)\) \| [\d.]+ \|", table, re.MULTILINE)
    readme = re.search(r"(\d+)\s+clients work unmodified", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert readme is not None and int(readme[1]) == len(rows)


def test_an_entry_of_the_changelog_is_one_short_line() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("## [Unreleased]")[2].splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in entries if not line.startswith("- ") or len(line) > 140] == []
