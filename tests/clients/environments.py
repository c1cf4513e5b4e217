"""One environment for each client: python -m tests.clients.environments DIR (needs pip's and npm's registries)."""

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def packages() -> dict[str, list[str]]:
    """Environment -> what is installed into it."""
    lines = (HERE / "requirements.txt").read_text().splitlines()
    pairs = [line.split(":") for line in lines if line and not line.startswith("#")]
    return {name: words.split() for name, words in pairs}


def make_python(directory: Path, wanted: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True)


def make_node(directory: Path) -> None:
    directory.mkdir(parents=True)
    shutil.copy(HERE / "package.json", directory)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=directory, check=True)


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    for name, wanted in packages().items():
        if not (root / name).exists():
            make_python(root / name, wanted)
    if not (root / "node").exists():
        make_node(root / "node")


if __name__ == "__main__":
    main()
