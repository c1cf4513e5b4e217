"""Faults at the start, induced in the real command: each ends it with exit code 2 and the line that the docs give."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import pytest

from tests.waiting import LAST_RESORT

DEMO = Path(str(files("jaxserve") / "assets" / "demo"))
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
SMALLEST = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16")


@dataclass
class Given:
    """A directory of the fault's own, with a copy of the demo model in `model`, and a port that is taken."""

    root: Path
    taken: int
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        target = self.root / "model"
        if not target.exists():
            target.mkdir()
            for source in DEMO.iterdir():
                shutil.copy(source, target)
        return target

    def written(self, name: str, text: str) -> str:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)


def changed(given: Given, **fields: object) -> str:
    """The demo model with other fields in its config.json."""
    path = given.model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return str(given.model)


def without(given: Given, *names: str) -> str:
    for name in names:
        (given.model / name).unlink()
    return str(given.model)


def cut(given: Given, name: str) -> str:
    """The demo model with a file that ends too early."""
    path = given.model / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return str(given.model)


def damaged_gguf(given: Given) -> str:
    """A GGUF file beside a tokenizer."""
    (given.model / "m.gguf").write_bytes(b"GGUF")
    return str(given.model / "m.gguf")


def open_cache(given: Given) -> str:
    """A cache directory that others can write to."""
    path = given.root / "cache"
    path.mkdir()
    path.chmod(0o777)
    return str(path)


# A compiler that changes a factor of the exponential function in the attention kernel.
WRONG_COMPILER = """
import subprocess, sys
from pathlib import Path
words = []
for word in sys.argv[1:]:
    if word.endswith("paged_attention.c"):
        source = Path(word).parent
        text = (source / "vectors.h").read_text()
        assert "5.0000001201e-1f" in text
        wrong = Path(__file__).parent
        (wrong / "vectors.h").write_text(text.replace("5.0000001201e-1f", "4.9e-1f"))
        (wrong / "paged_attention.c").write_text(Path(word).read_text())
        words += ["-I", str(source)]
        word = str(wrong / "paged_attention.c")
    words.append(word)
sys.exit(subprocess.call(["cc", *words]))
"""


def wrong_compiler(given: Given) -> str:
    """A C compiler with which the kernels compute wrong numbers."""
    script = given.written("compiler.py", WRONG_COMPILER)
    given.environ |= {"CC": f"{sys.executable} {script}", "XDG_CACHE_HOME": str(given.root / "home")}
    return "native"


Faults = dict[str, Callable[[Given], tuple[str, ...]]]

# The words of the command, by the name that the fault has in docs/troubleshooting.md. These end before jax is imported.
EARLY: Faults = {
    "wrong path": lambda g: (str(g.root / "none"),),
    "path is a file": lambda g: (g.written("weights.bin", ""),),
    "no config.json": lambda g: (without(g, "config.json"),),
    "two models": lambda g: ("a/b", "c/d"),
    "unknown flag": lambda g: ("--prot", "1"),
    "wrong dtype": lambda g: ("--dtype", "float9"),
    "wrong number": lambda g: ("--max-num-seqs", "many"),
    "no configuration": lambda g: ("--config", str(g.root / "x.yaml")),
    "bad YAML": lambda g: ("--config", g.written("x.yaml", "a: [1")),
    "unknown key": lambda g: ("--config", g.written("x.yaml", "server: {prot: 1}")),
    "port taken": lambda g: ("--port", str(g.taken)),
    "no such address": lambda g: ("--host", "203.0.113.1"),
    "no certificate": lambda g: ("--ssl-certfile", str(g.root / "x.pem")),
    "unwritable store": lambda g: ("--store.path", g.written("store", "")),
    "unknown parser": lambda g: ("--tool-call-parser", "nope"),
}
LATE: Faults = {
    "unknown architecture": lambda g: (changed(g, architectures=["MambaForCausalLM"]),),
    "damaged config.json": lambda g: (cut(g, "config.json"),),
    "no tokenizer": lambda g: (without(g, "tokenizer.json"),),
    "damaged weights": lambda g: (cut(g, "model.safetensors"),),
    "damaged GGUF": lambda g: (damaged_gguf(g),),
    "wrong weights": lambda g: (changed(g, intermediate_size=8),),
    "open cache": lambda g: ("--runtime.compile_cache", open_cache(g)),
    "no memory": lambda g: ("--cache.num_pages", "1000000000"),
    "too few devices": lambda g: ("--tensor", "64"),
    "no GPU": lambda g: ("--mesh.device", "gpu"),
    "context too long": lambda g: ("--max-model-len", "9999999"),
    "no hub": lambda g: ("someone/some-model",),
    "wrong numbers": lambda g: ("--runtime.attention", wrong_compiler(g)),
}


def documented() -> dict[str, re.Pattern[str]]:
    """The line of each fault in docs/troubleshooting.md; `...` stands for any text."""
    rows = re.findall(r"^\| ([^|]+) \| `(.+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: re.compile("jaxserve: " + ".*".join(map(re.escape, line.split("...")))) for name, line in rows}


@contextmanager
def a_taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def ended(given: Given, words: tuple[str, ...], cache: str) -> tuple[int, str]:
    """Exit code and stderr of the launch."""
    environ = {"HF_HUB_OFFLINE": "1", "JAXSERVE_STORE__PATH": str(given.root / "its-store")}
    if "--runtime.compile_cache" not in words:
        environ["JAXSERVE_RUNTIME__COMPILE_CACHE"] = cache
    ports = () if "--port" in words else ("--port", "0")
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "launch", *words, *ports, *SMALLEST * ("--max-num-seqs" not in words)],
        env=os.environ | environ | given.environ,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT,
        check=False,
    )
    return done.returncode, done.stderr


def check(name: str, code: int, stderr: str, said: re.Pattern[str]) -> list[str]:
    """What is wrong with the end of a launch."""
    line = (stderr.strip().splitlines() or [""])[-1]
    problems = [f"{said.pattern!r} is not said"] * (said.fullmatch(line) is None)
    problems += [f"exit code {code}"] * (code != 2) + ["a traceback"] * ("Traceback" in stderr)
    return [f"{name}: {', '.join(problems)}: {stderr[-1500:]}"] if problems else []


def test_every_fault_is_documented() -> None:
    assert documented().keys() == EARLY.keys() | LATE.keys()


@pytest.mark.parametrize("table", [EARLY, LATE], ids=["before jax", "in the engine"])
def test_each_fault_is_one_line(table: Faults, tmp_path: Path, compile_cache: str) -> None:
    lines = documented()

    def problems(name: str) -> list[str]:
        given = Given(tmp_path / name.replace(" ", "-"), port)
        given.root.mkdir()
        code, stderr = ended(given, table[name](given), compile_cache)
        return check(name, code, stderr, lines[name])

    with a_taken_port() as port, ThreadPoolExecutor(2) as pool:
        found = [problem for several in pool.map(problems, table) for problem in several]
    assert not found, "\n\n".join(found)
