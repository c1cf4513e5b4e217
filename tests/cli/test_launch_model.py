"""`jaxserve launch --config configs/llama.yaml --model DIR`: a directory of one's own, with and without a template."""

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jaxserve.config import Config
from jaxserve.engine.factory import locate, served_names
from jaxserve.errors import ModelLoadError
from tests.cli.test_launch import launch
from tests.transport.test_child_process import plant
from tests.waiting import LAST_RESORT

# the fewest programs: no test here sends two requests at once
FLAGS = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16")
CONFIG = Path(__file__).parent.parent.parent / "configs" / "llama.yaml"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


@pytest.fixture
def bare_model(tmp_path: Path) -> Path:
    """The demo model as a checkpoint whose tokenizer has no chat template."""
    source = Path(str(files("jaxserve") / "assets" / "demo"))
    target = tmp_path / "my-model"
    target.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


def get(url: str) -> httpx2.Response:
    return httpx2.get(url, timeout=LAST_RESORT)


def post(url: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(url, json=body, timeout=LAST_RESORT)


@contextmanager
def served(model: Path, cache: str, *flags: str, cwd: Path | None = None) -> Iterator[str]:
    """The base URL of a launched server; it is ended by SIGTERM."""
    command = ("--config", str(CONFIG), "--model", str(model), "--dtype", "float32", "--port", "0", *FLAGS, *flags)
    with launch(*command, cache=cache, cwd=cwd, JAXSERVE_STORE__PATH=str(model.parent / "store")) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "jaxserve is ready\n", process.stderr.read()
            yield process.stdout.readline()[12:].strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LAST_RESORT)


def test_without_a_template_there_is_no_chat(bare_model: Path, compile_cache: str) -> None:
    with served(bare_model, compile_cache) as url:
        assert [model["id"] for model in get(f"{url}/models").json()["data"]] == ["llama-3.1-8b", "llama"]
        chat = post(f"{url}/chat/completions", {"model": "llama", **QUESTION})
        prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        raw = post(f"{url}/completions", {"model": "llama-3.1-8b", "prompt": prompt, "temperature": 0})
    assert chat.status_code == 400
    assert "chat template" in chat.json()["error"]["message"]
    assert raw.status_code == 200, raw.text


def test_a_template_from_a_file(bare_model: Path, compile_cache: str, tmp_path: Path) -> None:
    template = tmp_path / "pirate.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\nArr! {% endif %}"
    )
    with served(bare_model, compile_cache, "--chat-template", str(template), "--served-model-name", "mine") as url:
        body = {"model": "mine", **QUESTION, "max_tokens": 8}
        reply = post(f"{url}/chat/completions", body | {"return_token_ids": True}).json()
        shown = post(
            f"{url.removesuffix('/v1')}/detokenize", {"tokens": reply["choices"][0]["prompt_token_ids"]}
        ).json()
    assert shown["prompt"].endswith("<|im_start|>assistant\nArr! ")


def test_nothing_is_imported_from_the_directory_of_the_model(
    bare_model: Path, compile_cache: str, tmp_path: Path
) -> None:
    mark = tmp_path / "imported"
    assert plant(bare_model, mark) > 300
    with served(bare_model, compile_cache, "--model", ".", cwd=bare_model) as url:
        body = {"model": "llama", "prompt": "a", "max_tokens": 2, "response_format": {"type": "json_object"}}
        assert post(f"{url}/completions", body).status_code == 200  # the grammar worker runs
    assert not mark.exists(), mark.read_text()


def test_a_directory_that_is_named_as_on_the_hub_has_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B/"):
        assert served_names(Config.of(path)) == ["Qwen3-8B", "Qwen/Qwen3-8B"]
    for path in ("./Qwen/Qwen3-8B", str(tmp_path / "Qwen" / "Qwen3-8B"), "Qwen/../Qwen/Qwen3-8B"):
        assert served_names(Config.of(path)) == ["Qwen3-8B"]
    assert served_names(Config.of("Qwen/Qwen3-0.6B")) == ["Qwen/Qwen3-0.6B"], "of the hub"


def test_the_demo_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(Config.of("demo")) == locate(Config()) and served_names(Config.of("demo")) == ["demo"]
    with pytest.raises(ModelLoadError, match="does not exist"):
        locate(Config.of("demos"))
    (tmp_path / "demo").mkdir()
    assert locate(Config.of("demo")) == Path("demo"), "a directory of this name is meant"
