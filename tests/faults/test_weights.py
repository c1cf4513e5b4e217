"""New weights over HTTP into a real engine process: the answers, two updates at once, a killed engine, workers."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from jaxserve import launch_server
from jaxserve.library.serving import RunningServer
from tests.api.fakes import DEMO
from tests.conftest import FEW_PAGES
from tests.faults.helpers import engine_process, tensors
from tests.scrape import values
from tests.waiting import LAST_RESORT, wait_until

PROMPTS = ["Once upon a time", "A dog and a cat went to the sea. They", "a"]
LOGPROBS: dict[str, Any] = {"return_logprob": True, "sampling_params": {"temperature": 0, "max_new_tokens": 12}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of other weights: one, two; and one that is damaged."""
    root = tmp_path_factory.mktemp("checkpoints")
    for seed, name in ((1, "one"), (2, "two"), (3, "damaged"), (0, "first")):
        shutil.copytree(DEMO, root / name)
        if seed:
            save_file(tensors(seed), root / name / "model.safetensors")
    whole = (root / "damaged" / "model.safetensors").read_bytes()
    (root / "damaged" / "model.safetensors").write_bytes(whole[:-1000])
    return root


@contextlib.contextmanager
def serving(model: Path, compile_cache: str, **keys: Any) -> Iterator[RunningServer]:
    keys = {"compile_cache": compile_cache, "admin_api_key": "root", **FEW_PAGES} | keys
    with launch_server(str(model), served_name="demo", **keys) as running:
        yield running


@pytest.fixture(scope="module")
def server(root: Path, compile_cache: str) -> Iterator[RunningServer]:
    with serving(root / "first", compile_cache, weights_directories=[str(root)]) as running:
        yield running


def client(server: RunningServer) -> httpx2.Client:
    headers = {"authorization": "Bearer root"}
    return httpx2.Client(base_url=server.url, headers=headers, timeout=LAST_RESORT)


def post(server: RunningServer, path: str, method: str = "POST", **options: Any) -> Any:
    with client(server) as http:
        answer = http.request(method, path, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def answers(server: RunningServer) -> tuple[list[Any], set[str]]:
    """Tokens and log-probabilities, and the versions of the weights."""
    post(server, "/flush_cache")
    found = [post(server, "/generate", json={"text": text, **LOGPROBS}) for text in PROMPTS]
    return (
        [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in found],
        {one["meta_info"]["weight_version"] for one in found},
    )


@pytest.fixture(scope="module")
def expected(root: Path, compile_cache: str) -> list[Any]:
    """The answers of a server that started with the first of the other weights."""
    with serving(root / "one", compile_cache) as running:
        return answers(running)[0]


@pytest.fixture(scope="module")
def originals(server: RunningServer) -> list[Any]:
    found, versions = answers(server)
    assert versions == {"default"}
    return found


@pytest.fixture(autouse=True)
def compiles_nothing(server: RunningServer, originals: list[Any]) -> Iterator[None]:
    yield
    post(server, "/wake_up")
    post(server, "/update_weights_from_disk", json={"model_path": "first", "weight_version": "default"})
    assert answers(server) == (originals, {"default"})
    assert metric(server, "jaxserve:xla_compilations_total") == 0


def metric(server: RunningServer, name: str) -> float:
    with client(server) as http:
        return values(http.get("/metrics").text)[name]


def test_from_a_directory_and_from_bytes(server: RunningServer, expected: list[Any], originals: list[Any]) -> None:
    updates = metric(server, "jaxserve:weight_updates")
    answer = post(server, "/update_weights_from_disk", json={"model_path": "one", "weight_version": "step 1"})
    assert answer["success"] is True and answer["weight_version"] == "step 1"
    assert answers(server) == (expected, {"step 1"}) and expected != originals
    assert metric(server, "jaxserve:weight_updates") == updates + 1
    with client(server) as http:
        assert http.get("/model_info").json()["weight_version"] == "step 1"
        fields = {"return_weight_versions": True, "return_meta_info": True}
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, **fields}
        [choice] = http.post("/v1/chat/completions", json=chat).json()["choices"]
    assert choice["weight_versions"] == ["step 1"] and choice["meta_info"]["weight_version"] == "step 1"
    post(server, "/update_weights_from_tensor?weight_version=bytes", content=save(tensors(2)))
    assert answers(server)[1] == {"bytes"}
    post(server, "/update_weights_from_tensor", content=save(tensors(1)))
    assert answers(server)[0] == expected
    norm = {"model.norm.weight": tensors(2)["model.norm.weight"]}
    post(server, "/update_weights_from_tensor?partial=true", content=save(norm))
    assert answers(server)[0] != expected


@pytest.mark.parametrize("what", ["damaged", "no file", "missing", "integers"])
def test_a_failed_update_leaves_the_old_weights(server: RunningServer, originals: list[Any], what: str) -> None:
    wrong = tensors(1)
    norm = wrong.pop("model.norm.weight")
    bodies = {
        "no file": b"no safetensors file",
        "missing": save(wrong),
        "integers": save(wrong | {"model.norm.weight": norm.astype(np.int32)}),
    }
    with client(server) as http:
        if what == "damaged":
            answer = http.post("/update_weights_from_disk", json={"model_path": "damaged"})
        else:
            answer = http.post("/update_weights_from_tensor", content=bodies[what])
    named = {"damaged": "truncated", "no file": "safetensors", "missing": "model.norm.weight", "integers": "int32"}
    assert answer.status_code == 400 and named[what] in answer.json()["error"]["message"], answer.text
    assert answers(server) == (originals, {"default"})


def stream(server: RunningServer, number: int, lines: list[dict[str, Any]], n: int = 1) -> None:
    """Take `n` long answers, with the versions of the weights at their ends."""
    body = {"model": "demo", "prompt": PROMPTS[number % 3], "max_tokens": 100, "ignore_eos": True, "n": n}
    with client(server) as http:
        lines.append(http.post("/v1/completions", json=body | {"return_weight_versions": True}).json())


def test_two_updates_at_once_under_load(server: RunningServer, expected: list[Any]) -> None:
    """Each is whole, the last one stays, and every request ends."""
    lines: list[dict[str, Any]] = []
    bodies = [save(tensors(seed)) for seed in (1, 2)]
    updated = threading.Event()

    def stream_until_updated(number: int) -> None:
        stream(server, number, lines, n=4)  # so many that an update comes while they run
        while not updated.is_set():
            stream(server, number, lines, n=4)

    with ThreadPoolExecutor(9) as pool:
        requests = [pool.submit(stream_until_updated, number) for number in range(5)]
        wait_until(lambda: metric(server, "jaxserve:num_requests_running") > 0, "requests run")
        updates = [
            pool.submit(post, server, f"/update_weights_from_tensor?weight_version={i}", content=body)
            for i, body in enumerate(bodies * 2)
        ]
        try:
            for each in updates:
                each.result()
        finally:
            updated.set()
        for each in requests:
            each.result()
    assert len(lines) >= 5 and all(line["usage"]["completion_tokens"] == 4 * 100 for line in lines)
    versions = [choice["weight_versions"] for line in lines for choice in line["choices"]]
    assert any(len(crossed) > 1 for crossed in versions), {tuple(crossed) for crossed in versions}
    post(server, "/update_weights_from_disk", json={"model_path": "one"})
    assert answers(server)[0] == expected


def kill_engine(server: RunningServer) -> None:
    restarts = metric(server, "jaxserve:engine_restarts_total")
    engine_process().kill()
    wait_until(lambda: metric(server, "jaxserve:engine_restarts_total") > restarts, "it was seen")
    with client(server) as http:
        wait_until(lambda: http.get("/health").status_code == 200, "the next engine is ready")


def test_weights_of_a_directory_are_loaded_again(server: RunningServer, expected: list[Any]) -> None:
    post(server, "/update_weights_from_disk", json={"model_path": "one", "weight_version": "kept"})
    kill_engine(server)
    assert answers(server) == (expected, {"kept"})


def test_weights_that_came_as_bytes_are_gone_and_the_version_says_so(
    server: RunningServer, originals: list[Any]
) -> None:
    post(server, "/update_weights_from_tensor?weight_version=lost", content=save(tensors(1)))
    assert answers(server)[1] == {"lost"}
    kill_engine(server)
    assert answers(server) == (originals, {"default"})


def test_a_new_engine_is_paused_and_asleep_as_the_old_one_was(server: RunningServer, originals: list[Any]) -> None:
    for path, going_on in (("/pause_generation", "/continue_generation"), ("/sleep", "/wake_up")):
        post(server, path)
        lines: list[dict[str, Any]] = []
        waiting = threading.Thread(target=stream, args=(server, 0, lines))
        waiting.start()
        wait_until(lambda: metric(server, "jaxserve:num_requests_waiting") == 1, "the request waits")
        kill_engine(server)
        wait_until(lambda: metric(server, "jaxserve:num_requests_waiting") == 1, "it waits in the new engine")
        assert lines == []
        post(server, going_on)
        waiting.join(LAST_RESORT)
        assert lines[0]["usage"]["completion_tokens"] == 100
    assert answers(server)[0] == originals


def test_a_pause_waits_for_running_requests(server: RunningServer, originals: list[Any]) -> None:
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with client(server) as http, http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        assert post(server, "/pause?mode=wait") == {"status": "paused"}
        rest = [line for line in lines if line.startswith("data: {")]
    assert first.startswith("data: {") and '"finish_reason":"length"' in rest[-1]
    kill_engine(server)
    assert post(server, "/is_paused", method="GET") == {"is_paused": True}, "the new engine is paused too"
    post(server, "/resume")
    assert answers(server)[0] == originals


def test_a_tensor_of_the_weights_in_use(server: RunningServer, root: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    found = post(server, "/get_weights_by_name", json={"name": name, "truncate_size": 3})
    wanted = load_file(root / "first" / "model.safetensors")[name]
    np.testing.assert_array_equal(np.array(found, np.float32), wanted[:3].astype(np.float32))
    with client(server) as http:
        refused = http.request("GET", "/get_weights_by_name", json={"name": "x"})
    assert refused.status_code == 400 and "no tensor 'x'" in refused.text


def test_through_workers(root: Path, compile_cache: str, expected: list[Any]) -> None:
    """They pass the routes on to the main process, and their answers have the version."""
    with serving(root / "first", compile_cache, weights_directories=[str(root)], workers=2) as running:
        post(running, "/update_weights_from_disk", json={"model_path": "one", "weight_version": "w"})
        for _ in range(3):  # by either worker
            assert answers(running) == (expected, {"w"})
        post(running, "/update_weights_from_tensor", content=save(tensors(2)))
        assert answers(running)[1] == {"2"}
        post(running, "/sleep")
        with client(running) as http:
            assert http.get("/is_sleeping").json()["is_sleeping"] is True
        post(running, "/wake_up")
        assert answers(running)[1] == {"2"}
