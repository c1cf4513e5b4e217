"""The files of the page for browsers. They are open: the page asks for the API key itself."""

PAGE_FILES = frozenset(
    f"{name}.js" for name in ("api", "app", "calls", "chat", "files", "live", "markdown", "page", "talks")
) | {"style.css"}
PAGE_PATHS = frozenset({"/", *(f"/web/{name}" for name in PAGE_FILES)})
