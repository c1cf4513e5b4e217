"""The site of the docs: every page is in it, links between folders become its links, and it is built."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from docgen.site import PAGES as SITE_PAGES
from docgen.site import site_links

ROOT = Path(__file__).parents[2]


def test_the_site_has_every_page() -> None:
    said = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [page for section in said["nav"] for group in section.values() for page in group]
    docs = ROOT / "docs"
    found = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(pages) == sorted([*found, *SITE_PAGES.values()])
    assert [docs / style for style in said["extra_css"]] == [docs / "site.css"] and (docs / "site.css").is_file()
    assert [ROOT / hook for hook in said["hooks"]] == [ROOT / "docgen" / "site.py"]


def test_links_of_the_site() -> None:
    text = "[a](../README.md#b) [c](d.md) [e](../jaxserve/config.py) [f](#g) [h](https://i)"
    assert site_links(text, "docs", "https://r") == (
        "[a](index.md#b) [c](d.md) [e](https://r/jaxserve/config.py) [f](#g) [h](https://i)"
    )
    assert site_links("[a](../../README.md) [b](../chat.md) [c](d.md)", "docs/e", "x") == (
        "[a](../index.md) [b](../chat.md) [c](d.md)"
    )
    assert site_links("[a](docs/chat.md#b) [c](SECURITY.md)", ".", "x") == "[a](chat.md#b) [c](SECURITY.md)"


@pytest.mark.skipif(find_spec("material") is None, reason="needs mkdocs-material, of the extra test")
def test_the_site_is_built_and_its_links_hold(tmp_path: Path) -> None:
    """With --quiet, --strict would count no warning."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "jaxserve doctor" in (tmp_path / "site" / "doctor" / "index.html").read_text(encoding="utf-8")
