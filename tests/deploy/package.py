"""Check a built package: its files, and a server that is started from where it is installed.

    python tests/deploy/package.py FOLDER_OF_WHEEL_AND_SDIST ENVIRONMENT

Run by `.ci/package`, in the repository's root. Needs nothing but Python, and imports nothing of the repository.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.error import URLError
from urllib.request import Request, urlopen

START_SECONDS = 600.0  # timeout; a cold start takes about half a minute
QUESTION = {
    "model": "demo",
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


def check_files(folder: Path) -> None:
    """Compare the files of the wheel and of the sdist with the tracked ones."""
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    listed = subprocess.run(["git", "ls-files", "jaxserve"], capture_output=True, text=True, check=True)
    tracked = set(listed.stdout.split())
    names = set(zipfile.ZipFile(wheel).namelist())
    beside = {name.partition(".dist-info/")[2] for name in names if ".dist-info/" in name}
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == tracked, f"not the same files: {sorted(packed ^ tracked)}"
    assert {"licenses/LICENSE", "METADATA", "entry_points.txt"} <= beside, beside
    sources = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    assert tracked | {"LICENSE", "README.md", "pyproject.toml"} <= sources, sorted(tracked - sources)
    others = {name.partition("/")[0] for name in sources if "/" in name} - {"jaxserve", "jaxserve_llm.egg-info"}
    assert not others, f"the sdist has {others}"
    print(
        f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(packed)} files; {sdist.stat().st_size:,} bytes of source"
    )


def check_server(environment: Path, more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Start the server from a directory of its own, with empty caches, and ask it. more: variables of the server"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        environ = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
        environ |= {"HOME": folder, "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1", **more}
        command = [str(environment / "bin" / "jaxserve"), "launch", "--port", url.rpartition(":")[2]]
        start = time.monotonic()
        server = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
        try:
            _wait(server, url)
            seconds = time.monotonic() - start
            answer = json.loads(_get(f"{url}/v1/chat/completions", json.dumps(QUESTION).encode()))
            assert "Paris" in answer["choices"][0]["message"]["content"], answer
            assert "<script" in _get(url, accept="text/html"), "there is no page for browsers"
            server.terminate()
            assert server.wait(60) == 0
        except BaseException:
            print(Path(folder, "log").read_text(), file=sys.stderr)
            raise
        finally:
            server.kill()
        said = Path(folder, "log").read_text()
    compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    assert ("attention native" in said) == compiler, said
    print(f"the server was ready after {seconds:.0f} s and answered")


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            _get(f"{url}/health")
            return
        except (URLError, ConnectionError):  # not yet listening, or 503
            time.sleep(0.5)
    raise RuntimeError(f"the server is not ready; exit code {server.poll()}")


def _get(url: str, body: bytes | None = None, accept: str = "*/*") -> str:
    headers = {"Content-Type": "application/json", "Accept": accept}
    with urlopen(Request(url, body, headers), timeout=60) as response:
        return response.read().decode()


if __name__ == "__main__":
    check_files(Path(sys.argv[1]))
    check_server(Path(sys.argv[2]).absolute())
