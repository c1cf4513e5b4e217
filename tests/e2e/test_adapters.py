"""Adapters of a whole server: loaded by a route, known in every worker."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import launch_server
from jaxserve.config import Config
from jaxserve.library.serving import RunningServer
from tests.conftest import ONE_ROW
from tests.e2e.test_several import ADMIN as FRONT_ADMIN
from tests.e2e.test_several import Front
from tests.faults.helpers import is_engine
from tests.models.lora import Pairs, peft_config, random_pairs, write_adapter
from tests.waiting import LAST_RESORT, wait_until

ADMIN = {"authorization": "Bearer root"}
WEIGHTS = "adapter_model.safetensors"
LAYERS = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.mlp.down_proj": (256, 640)}  # the demo model's


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapters" / "sql", random_pairs(LAYERS, 4, 1), peft_config(4))
    return tmp_path / "adapters"


def statuses(server: RunningServer, model: str, count: int = 12) -> list[int]:
    """Of requests with a connection each, which any worker may accept."""

    def ask() -> int:
        body = {"model": model, "prompt": "Once", "max_tokens": 1, "temperature": 0}
        return httpx2.post(
            f"{server.url}/v1/completions", json=body, headers={"connection": "close"}, timeout=LAST_RESORT
        ).status_code

    return sorted({ask() for _ in range(count)})


def call(server: RunningServer, route: str, **body: str) -> int:
    return httpx2.post(f"{server.url}{route}", json=body, headers=ADMIN, timeout=LAST_RESORT).status_code


def models(server: RunningServer) -> list[str]:
    return [each["id"] for each in httpx2.get(f"{server.url}/v1/models", timeout=LAST_RESORT).json()["data"]]


@pytest.mark.slow
def test_every_worker_knows_what_a_route_has_loaded(compile_cache: str, allowed: Path) -> None:
    keys = {"workers": 2, "admin_api_key": "root", "weights_directories": [str(allowed)], "slots": 2}
    with launch_server(compile_cache=compile_cache, **ONE_ROW, **keys) as server:
        assert statuses(server, "sql") == [404]
        assert call(server, "/v1/load_lora_adapter", lora_name="sql", lora_path="sql") == 200
        assert statuses(server, "sql") == [200] and models(server)[-1] == "sql"
        assert call(server, "/v1/unload_lora_adapter", lora_name="sql") == 200
        assert statuses(server, "sql") == [404] and "sql" not in models(server)


@pytest.mark.slow
def test_what_routes_have_loaded_is_loaded_again_after_a_restart(
    compile_cache: str, allowed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [random_pairs(LAYERS, 4, seed) for seed in range(3)]
    changed, gone = (write_adapter(allowed / name, pairs[2], peft_config(4)) for name in ("changed", "gone"))
    config = Config.parse(
        {
            "server": {"port": 0, "admin_api_key": "root", "weights_directories": [str(allowed)]},
            "scheduler": ONE_ROW,
            "lora": {"slots": 2, "keep": True},
            "store": {"path": str(tmp_path / "store")},
            "runtime": {"compile_cache": compile_cache},
        }
    )
    with launch_server(config=config) as server:
        for name in ("sql", "changed", "gone"):
            assert call(server, "/v1/load_lora_adapter", lora_name=name, lora_path=name) == 200
    write_adapter(changed, pairs[0], peft_config(4))
    gone.rename(allowed / "elsewhere")
    with launch_server(config=config) as server:
        assert statuses(server, "sql", 1) == [200]
        wait_until(lambda: models(server)[-1] == "sql", "only one of three is listed")
        assert statuses(server, "changed", 1) == statuses(server, "gone", 1) == [404]
        assert call(server, "/v1/unload_lora_adapter", lora_name="sql") == 200
    assert "'changed' is not loaded" in caplog.text and "has changed since it was loaded" in caplog.text
    assert "the adapter 'gone' is not loaded again" in caplog.text
    with launch_server(config=config) as server:
        assert "sql" not in models(server)


@pytest.mark.slow
def test_adapters_of_a_model_behind_the_front(compile_cache: str, allowed: Path, tmp_path: Path) -> None:
    """Its server is stopped and started again. What the store keeps is there by MODEL:ADAPTER, then by its own name."""
    start = write_adapter(allowed / "start", random_pairs(LAYERS, 4, 2), peft_config(4))
    lora = {"slots": 2, "keep": True, "adapters": [{"name": "start", "path": str(start)}]}
    entries = [{"name": "plain"}, {"name": "base", "config": {"lora": lora}}]
    shared = {"weights_directories": [str(allowed)]}
    with Front(compile_cache, tmp_path, entries, shared, max_loaded=1) as front:

        def ask(model: str) -> int:
            return front.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1}).status_code

        def adapters() -> dict[str, str]:
            data = httpx2.get(f"{front.url}/v1/models", timeout=LAST_RESORT).json()["data"]
            return {each["id"]: each["root"] for each in data if each.get("parent") == "base"}

        assert adapters() == {"start": str(start)} and front.is_in("base", "unloaded")
        assert [ask(name) for name in ("start", "base:start", "plain:start", "sql")] == [200, 200, 404, 404]
        body = {"lora_name": "sql", "lora_path": "sql"}
        assert front.post("/v1/load_lora_adapter?model=base", body).status_code == 401
        assert front.post("/v1/load_lora_adapter?model=base", body, **FRONT_ADMIN).status_code == 200
        assert adapters() == {"start": str(start), "sql": str(allowed / "sql")}
        assert [ask(name) for name in ("sql", "base:sql", "sql:base")] == [200, 200, 404]
        assert front.post("/load_lora_adapter?model=plain", body, **FRONT_ADMIN).status_code == 409
        assert ask("plain") == 200 and front.is_in("base", "unloaded")
        assert ask("sql") == 200 and front.is_in("base", "loaded")
        assert front.post("/unload_lora_adapter", {"lora_name": "sql"}, **FRONT_ADMIN).status_code == 200
        assert ask("sql") == ask("base:sql") == 404 and list(adapters()) == ["start"]


@pytest.mark.slow
def test_every_engine_of_several_has_what_a_route_has_loaded(compile_cache: str, allowed: Path, tmp_path: Path) -> None:
    """Through two workers, after the death of an engine, and after a restart."""
    config = Config.parse(
        {
            "server": {"port": 0, "workers": 2, "admin_api_key": "root", "weights_directories": [str(allowed)]},
            "mesh": {"replicas": 2},
            "scheduler": ONE_ROW,
            "lora": {"slots": 2, "keep": True},
            "store": {"path": str(tmp_path / "store")},
            "runtime": {"compile_cache": compile_cache},
        }
    )

    def of_each(server: RunningServer, model: str) -> list[str]:
        """The text of both engines, or the status."""
        found = []
        for rank in (0, 1):
            body = {"model": model, "prompt": "Once", "max_tokens": 8, "temperature": 0, "data_parallel_rank": rank}
            answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=LAST_RESORT)
            found.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else str(answer.status_code))
        return found

    with launch_server(config=config) as server:
        plain = of_each(server, "demo")
        assert call(server, "/v1/load_lora_adapter", lora_name="sql", lora_path="sql") == 200
        adapted = of_each(server, "sql")
        assert len(set(plain)) == len(set(adapted)) == 1 and plain != adapted
        killed = [process for process in psutil.Process().children() if is_engine(process)][-1]
        killed.kill()
        restarts = lambda: [
            each["restarts"] for each in httpx2.get(f"{server.url}/server_info").json()["engines"] if each["alive"]
        ]
        wait_until(lambda: sorted(restarts()) == [0, 1], "both serve, one of them again")
        wait_until(lambda: of_each(server, "sql") == adapted, "both have it")
    with launch_server(config=config) as server:
        assert statuses(server, "sql") == [200]
        assert of_each(server, "sql") == adapted
        assert call(server, "/v1/unload_lora_adapter", lora_name="sql") == 200
        assert of_each(server, "sql") == ["404", "404"]


FILES = ("shape", "NaN", "rank", "layer", "pickle", "link", "pipe", "pipe of the configuration", "header")
FILES += ("deep header", "empty file", "configuration", "DoRA")
PATHS = ("..", "/etc", "../beside", "sql/../../beside", "outside", "missing")


def spoil(directory: Path, kind: str) -> None:
    weights, config = directory / WEIGHTS, directory / "adapter_config.json"
    tensors = load_file(weights)
    a, b = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")
    match kind:
        case "shape":
            tensors[a] = np.ones((4, 255), np.float32)
        case "NaN":
            tensors[a][0, 0] = np.nan
        case "rank":
            tensors[a], tensors[b] = np.ones((4096, 256), np.float32), np.ones((256, 4096), np.float32)
        case "layer":
            tensors[a.replace("layers.0", "layers.99")] = tensors.pop(a)
    save_file(tensors, weights)
    match kind:
        case "pickle":
            weights.rename(directory / "adapter_model.bin")
        case "link":
            weights.unlink()
            weights.symlink_to("/etc/passwd")
        case "pipe" | "pipe of the configuration":
            path = weights if kind == "pipe" else config
            path.unlink()
            os.mkfifo(path)
        case "header" | "deep header":
            text = (b"[]," if kind == "header" else b"[[[") * (30 * 2**20)
            weights.write_bytes(len(text).to_bytes(8, "little") + text)
        case "empty file":
            weights.write_bytes(b"")
        case "configuration":
            config.write_text(json.dumps(peft_config(4, x="y" * 2**24)))
        case "DoRA":
            config.write_text(json.dumps(peft_config(4, use_dora=True)))


@pytest.mark.slow
def test_hostile_adapters_are_refused_and_nobody_else_notices(compile_cache: str, allowed: Path) -> None:
    """Requests of the model and of an adapter go on meanwhile with their tokens, and the engine lives."""
    one, other = (random_pairs(LAYERS, 4, seed) for seed in (2, 3))
    for kind in FILES:
        spoil(write_adapter(allowed / kind, one, peft_config(4)), kind)
    write_adapter(allowed.parent / "beside", one, peft_config(4))
    (allowed / "outside").symlink_to(allowed.parent / "beside")
    keys = {"admin_api_key": "root", "weights_directories": [str(allowed)], "slots": 2, "max_num_seqs": 4}
    with launch_server(compile_cache=compile_cache, **(ONE_ROW | keys)) as server:

        def text(model: str) -> str:
            body = {"model": model, "prompt": "Once", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
            answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=LAST_RESORT)
            return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

        def load(name: str, path: str) -> int:
            body = {"lora_name": name, "lora_path": path, "load_inplace": True}
            url = f"{server.url}/v1/load_lora_adapter"
            return httpx2.post(url, json=body, headers=ADMIN, timeout=LAST_RESORT).status_code

        assert load("sql", "sql") == 200
        wanted = {model: text(model) for model in ("demo", "sql")}
        done, wrong, count = threading.Event(), list[str](), Counter[str]()

        def ask_again(model: str) -> None:
            while not done.is_set():
                found = text(model)
                wrong.extend([found] * (found != wanted[model]))
                count[model] += 1

        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(ask_again, model) for model in wanted]
            try:
                assert {path: {load(name, path) for name in ("new", "sql")} for path in (*FILES, *PATHS)} == {
                    path: {400} for path in (*FILES, *PATHS)
                }
                assert models(server)[-1] == "sql" and "new" not in models(server)
                found = replaced_while_read(load, text, allowed, one, other)
            finally:
                done.set()
            for each in asking:
                each.result()
        assert not wrong and min(count.values()) > 5
        assert found <= {text("one"), text("other")} and "sql" in models(server)
        engines = httpx2.get(f"{server.url}/server_info", timeout=LAST_RESORT).json()["engines"]
        assert [each["restarts"] for each in engines] == [0]


def replaced_while_read(
    load: Callable[[str, str], int], text: Callable[[str], str], allowed: Path, one: Pairs, other: Pairs
) -> set[str]:
    """The texts of an adapter that is loaded while its file is replaced again and again, by whole files."""
    for name, pairs in (("one", one), ("other", other)):
        write_adapter(allowed / name, pairs, peft_config(4))
        assert load(name, name) == 200
    moving = write_adapter(allowed / "moving", one, peft_config(4))
    done = threading.Event()

    def replace() -> None:
        for number in itertools.count():
            if done.is_set():
                return
            shutil.copy(allowed / ("one", "other")[number % 2] / WEIGHTS, moving / "next")
            (moving / "next").rename(moving / WEIGHTS)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        found = set()
        for _ in range(20):
            status = load("moving", "moving")
            assert status in (200, 400)
            found |= {text("moving")} if status == 200 else set()
    finally:
        done.set()
        thread.join()
    return found
