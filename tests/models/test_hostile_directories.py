"""Model directories made to hurt: refused in one line that names the file, or read as they are."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from jaxserve.errors import MAX_LOAD_MESSAGE, ConfigError, ModelLoadError
from jaxserve.model_files import check_directory
from jaxserve.models.checkpoint.checkpoint import open_checkpoint
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.hub import resolve
from jaxserve.models.checkpoint.sentence_files import read_pooling
from jaxserve.text.renderer import Renderer
from jaxserve.text.stop import check_pattern
from jaxserve.text.tokenizer import Tokenizer
from tests.waiting import LAST_RESORT

from .hostile_directories import Mutant, copy_demo, few, many

ASKED = b'{"model":"demo","prompt":"The capital of France is","max_tokens":8,"temperature":0}'


def read(directory: Path) -> None:
    """Everything of a directory but the bytes of the weights."""
    config = read_config(resolve(directory))
    open_checkpoint(directory)
    read_pooling(ModelFiles.open(directory), config)
    tokenizer = Tokenizer.from_directory(directory)
    tokenizer.encode("hello " * 100 + "!")
    renderer = Renderer.load(tokenizer)
    if renderer is not None:
        renderer.stop()


@pytest.mark.parametrize("mutant", few(), ids=lambda mutant: mutant.name)
def test_one_of_each_kind_is_refused_in_one_line(mutant: Mutant, tmp_path: Path) -> None:
    directory = copy_demo(tmp_path / "model")
    mutant.change(directory)
    with pytest.raises(ConfigError) as caught:
        read(directory)
    line = str(caught.value)
    assert str(directory) in line and line.isprintable() and len(line) <= MAX_LOAD_MESSAGE, line[:2000]


def test_nothing_else_than_a_refusal_comes_out(tmp_path: Path) -> None:
    refused = 0
    for number, mutant in enumerate(many(120, seed=1)):
        directory = copy_demo(tmp_path / str(number))
        mutant.change(directory)
        try:
            read(directory)
        except ConfigError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) <= MAX_LOAD_MESSAGE, (mutant.name, str(error)[:2000])
        shutil.rmtree(directory)
    assert refused > 60


def test_the_hubs_own_links_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    copied = copy_demo(snapshot)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(copied.iterdir())):
        path.rename(repository / "blobs" / str(number))
        path.symlink_to(Path("..") / ".." / "blobs" / str(number))
    read(snapshot)
    (tmp_path / "secret").write_text("x")
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    (snapshot / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja is no regular file inside"):
        check_directory(snapshot)


def test_a_directory_may_itself_be_a_link(tmp_path: Path) -> None:
    copy_demo(tmp_path / "here")
    (tmp_path / "there").symlink_to("here")
    read(tmp_path / "there")


PUBLISHED = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"[\p{Han}]+|[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_patterns_of_published_tokenizers_pass(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(?:(?:[a-z]+)+)+!", "(a|aa)*b", "(a*)*", "a*a*a*b", "(a{0,1000}){0,1000}", r"(.)\1+", "(?:a+b?)+c",
     "(" * 500, "[a", "a" * 5000, "((a))|(b*)*"],
)  # fmt: skip
def test_patterns_that_may_backtrack_without_end_do_not(pattern: str) -> None:
    with pytest.raises(ValueError):
        check_pattern(pattern)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_through_a_real_start(tmp_path: Path, compile_cache: str) -> None:
    """Each is refused soon with a last line that says why, or serves the demo's own answer."""
    launch = Launch(tmp_path, compile_cache)
    expected, _, _ = launch.outcome(copy_demo(tmp_path / "whole"))
    assert expected.startswith("served")
    bad: list[str] = []
    for number, mutant in enumerate(many(200)):
        directory = copy_demo(tmp_path / f"m{number}")
        mutant.change(directory)
        found, seconds, cpu = launch.outcome(directory)
        shown = f"{number} {mutant.name} [{seconds:.1f} s, CPU {cpu:.1f} s]: {found}"
        print(shown, flush=True)
        refused = found.startswith("refused") and cpu < 10 and seconds < 60  # 10 s on a machine that is idle
        if not refused and found != expected:
            bad.append(shown)
        shutil.rmtree(directory)
    assert not bad, "\n".join(bad)


class Launch:
    """Launches of the command line on model directories, one after the other."""

    def __init__(self, tmp_path: Path, compile_cache: str) -> None:
        self._log, self._cwd = tmp_path / "log", tmp_path
        flags = "--served-model-name demo --scheduler.max-num-seqs 4 --scheduler.max-num-batched-tokens 64"
        flags += f" --model.max-model-len 256 --runtime.compile-cache {compile_cache} --store.path {tmp_path / 'store'}"
        self._words = [sys.executable, "-m", "jaxserve", "launch", *flags.split()]

    def outcome(self, directory: Path) -> tuple[str, float, float]:
        """What came of it, the seconds until that was known, and the CPU seconds of the processes until all ended."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [*self._words, "--model", str(directory), "--port", str(port)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        began, used = time.monotonic(), _children_cpu()
        with self._log.open("wb") as file, subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, cwd=self._cwd
        ) as process:  # fmt: skip
            try:
                found = _outcome(process, port, self._log)
                seconds = time.monotonic() - began
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
        return found, seconds, _children_cpu() - used


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _outcome(process: subprocess.Popen[bytes], port: int, log: Path) -> str:
    began = time.monotonic()
    while time.monotonic() - began < LAST_RESORT:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or [""]
            raw = any("Traceback" in line for line in lines)
            known = process.returncode not in (0, None) and not raw and len(lines[-1]) < 2000  # with what to do
            return f"{'refused' if known else 'RAW'} {process.returncode}: {lines[-1]}"
        try:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", ASKED, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                return f"served {json.load(response)['choices'][0]['text']}"
        except OSError:
            time.sleep(0.1)
    return "neither ready nor ended"
