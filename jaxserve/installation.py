"""How this package was installed, for hints that show an operator the command to type."""

from __future__ import annotations

from pathlib import Path

DISTRIBUTION = "jaxserve-llm"  # on PyPI; the name jaxserve is another project's there
_ROOT = Path(__file__).parent.parent


def install_command(extra: str, *, root: Path = _ROOT) -> str:
    """Return the command that installs an extra (cuda, tpu, otel, bench, gguf) for this copy of the package.

    A checkout is installed from its directory `root`, a wheel by its name.
    """
    if not (root / "pyproject.toml").is_file():
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"
