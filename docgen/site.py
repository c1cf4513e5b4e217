"""A hook of mkdocs: the pages of the repository's root join those of docs/, README.md as the first page.

Links between the two folders become links of the site; links to other files of the repository go to its web page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md"} | {
    name: name for name in ("BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
}
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]*)?\)")


def site_links(text: str, folder: str, elsewhere: str) -> str:
    """Return a page's text with the links of the site. folder: the page's; elsewhere: address of the repository."""
    inside_site = posixpath.relpath(folder, "docs") if folder.startswith("docs") else "."

    def site_link(link: re.Match[str]) -> str:
        path = (ROOT / folder / link[1]).resolve().relative_to(ROOT).as_posix()
        inside = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        target = posixpath.relpath(inside, inside_site) if inside else f"{elsewhere}/{path}"
        return f"]({target}{link[2] or ''})"

    return _LINK.sub(site_link, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages. Called by mkdocs."""
    elsewhere = f"{config.repo_url.rstrip('/')}/blob/main"
    pages = files.documentation_pages()
    for file in pages:
        file.content_string = site_links(
            file.content_string, posixpath.join("docs", posixpath.dirname(file.src_uri)).rstrip("/"), elsewhere
        )
    for name, page in PAGES.items():
        text = site_links((ROOT / name).read_text(encoding="utf-8"), ".", elsewhere)
        files.append(type(pages[0]).generated(config, page, content=text))
    return files
