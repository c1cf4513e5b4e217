"""Faults at the start, induced in the real command: each ends it with exit code 2 and one line with cause and fix."""

import json
import os
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


Faults = dict[str, tuple[Callable[[Given], tuple[str, ...]], tuple[str, ...]]]

# name: (the words of the command, what the line says). The first ones end before jax is imported.
EARLY: Faults = {
    "wrong path": (lambda g: (str(g.root / "none"),), ("none does not exist", "check the path")),
    "path is a file": (lambda g: (g.written("weights.bin", ""),), ("weights.bin is a file", "config.json")),
    "no config.json": (lambda g: (without(g, "config.json"),), ("config.json does not exist", "checkpoint")),
    "two models": (lambda g: ("a/b", "c/d"), ("two models are given, a/b and c/d", "leave one out")),
    "unknown flag": (lambda g: ("--prot", "1"), ("unknown flag --prot", "--port")),
    "wrong dtype": (lambda g: ("--dtype", "float9"), ("model.dtype", "float32")),
    "wrong number": (lambda g: ("--max-num-seqs", "many"), ("scheduler.max_num_seqs", "many")),
    "no configuration": (lambda g: ("--config", str(g.root / "x.yaml")), ("x.yaml", "No such file")),
    "bad YAML": (lambda g: ("--config", g.written("x.yaml", "a: [1")), ("x.yaml is not YAML", "line 1")),
    "unknown key": (
        lambda g: ("--config", g.written("x.yaml", "server: {prot: 1}")),
        ("server.prot", "port", "x.yaml"),
    ),
    "port taken": (lambda g: ("--port", str(g.taken)), ("cannot listen on 127.0.0.1", "another --port")),
    "no such address": (lambda g: ("--host", "203.0.113.1"), ("cannot listen on 203.0.113.1", "another --host")),
    "no certificate": (lambda g: ("--ssl-certfile", str(g.root / "x.pem")), ("x.pem", "No such file", "PEM")),
    "unwritable store": (
        lambda g: ("--store.path", g.written("store", "")),
        ("Not a directory", "--store.path"),
    ),
    "unknown parser": (lambda g: ("--tool-call-parser", "nope"), ("nope", "hermes")),
}
LATE: Faults = {
    "unknown architecture": (
        lambda g: (changed(g, architectures=["MambaForCausalLM"]),),
        ("MambaForCausalLM", "LlamaForCausalLM"),
    ),
    "damaged config.json": (lambda g: (cut(g, "config.json"),), ("config.json",)),
    "no tokenizer": (lambda g: (without(g, "tokenizer.json"),), ("tokenizer", "model.tokenizer")),
    "damaged weights": (lambda g: (cut(g, "model.safetensors"),), ("model.safetensors",)),
    "damaged GGUF": (lambda g: (damaged_gguf(g),), ("m.gguf is no GGUF file", "download")),
    "wrong weights": (lambda g: (changed(g, intermediate_size=8),), ("mlp",)),
    "open cache": (
        lambda g: ("--runtime.compile_cache", open_cache(g)),
        ("runtime.compile_cache", "other users can write", "another directory"),
    ),
    "no memory": (
        lambda g: ("--cache.num_pages", "1000000000"),
        ("cache.num_pages is 1000000000, which", "at most"),
    ),
    "too few devices": (lambda g: ("--tensor", "64"), ("mesh asks for 64 devices", "mesh.tensor")),
    "no GPU": (lambda g: ("--mesh.device", "gpu"), ("gpu", "cuda")),
    "context too long": (lambda g: ("--max-model-len", "9999999"), ("model.max_model_len is 9999999", "at most")),
    "no hub": (lambda g: ("someone/some-model",), ("someone/some-model is not cached", "local directory")),
    "wrong numbers": (
        lambda g: ("--runtime.attention", wrong_compiler(g)),
        ("this machine computes wrong numbers with jax", "attention native", "jaxserve doctor"),
    ),
}


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


def check(name: str, code: int, stderr: str, said: tuple[str, ...]) -> list[str]:
    """What is wrong with the end of a launch."""
    line = (stderr.strip().splitlines() or [""])[-1]
    problems = [f"{part!r} is not said" for part in said if part not in line]
    problems += [f"exit code {code}"] * (code != 2) + ["a traceback"] * ("Traceback" in stderr)
    problems += ["no cause"] * (not line.startswith("jaxserve: "))
    return [f"{name}: {', '.join(problems)}: {stderr[-1500:]}"] if problems else []


@pytest.mark.parametrize("table", [EARLY, LATE], ids=["before jax", "in the engine"])
def test_each_fault_is_one_line(table: Faults, tmp_path: Path, compile_cache: str) -> None:
    def problems(name: str) -> list[str]:
        make, said = table[name]
        given = Given(tmp_path / name.replace(" ", "-"), port)
        given.root.mkdir()
        code, stderr = ended(given, make(given), compile_cache)
        print(name, "|", (stderr.strip().splitlines() or [""])[-1])
        return check(name, code, stderr, said)

    with a_taken_port() as port, ThreadPoolExecutor(2) as pool:
        found = [problem for several in pool.map(problems, table) for problem in several]
    assert not found, "\n\n".join(found)
