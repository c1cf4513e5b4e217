"""`jaxserve launch --config configs/llama.yaml --model DIR`: a directory of one's own, with and without a template."""

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import httpx2
import pytest

from tests.cli.test_launch import FLAGS, launch

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


@contextmanager
def served(model: Path, cache: str, *flags: str) -> Iterator[str]:
    """The base URL of a launched server; it is ended by SIGTERM."""
    command = ("--config", str(CONFIG), "--model", str(model), "--dtype", "float32", "--port", "0", *FLAGS, *flags)
    with launch(*command, cache=cache, JAXSERVE_STORE__PATH=str(model.parent / "store")) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "jaxserve is ready\n", process.stderr.read()
            yield process.stdout.readline()[12:].strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def test_without_a_template_there_is_no_chat(bare_model: Path, compile_cache: str) -> None:
    with served(bare_model, compile_cache) as url:
        assert [model["id"] for model in httpx2.get(f"{url}/models").json()["data"]] == ["llama-3.1-8b", "llama"]
        chat = httpx2.post(f"{url}/chat/completions", json={"model": "llama", **QUESTION})
        prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        raw = httpx2.post(f"{url}/completions", json={"model": "llama-3.1-8b", "prompt": prompt, "temperature": 0})
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
        reply = httpx2.post(f"{url}/chat/completions", json=body | {"return_token_ids": True}).json()
        shown = httpx2.post(
            f"{url.removesuffix('/v1')}/detokenize", json={"tokens": reply["choices"][0]["prompt_token_ids"]}
        ).json()
    assert shown["prompt"].endswith("<|im_start|>assistant\nArr! ")
