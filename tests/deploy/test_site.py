"""The site of the docs: every page is in it, and links between folders become its links."""

from pathlib import Path

import yaml

from docgen.site import PAGES as SITE_PAGES
from docgen.site import site_links

ROOT = Path(__file__).parents[2]


def test_the_site_has_every_page() -> None:
    said = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [page for section in said["nav"] for group in section.values() for page in group]
    assert sorted(pages) == sorted([*(path.name for path in (ROOT / "docs").glob("*.md")), *SITE_PAGES.values()])
    assert [ROOT / hook for hook in said["hooks"]] == [ROOT / "docgen" / "site.py"]


def test_links_of_the_site() -> None:
    text = "[a](../README.md#b) [c](d.md) [e](../jaxserve/config.py) [f](#g) [h](https://i)"
    assert site_links(text, "docs", "https://r") == (
        "[a](index.md#b) [c](d.md) [e](https://r/jaxserve/config.py) [f](#g) [h](https://i)"
    )
    assert site_links("[a](docs/chat.md#b) [c](SECURITY.md)", ".", "x") == "[a](chat.md#b) [c](SECURITY.md)"
