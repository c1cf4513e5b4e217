"""Several models behind one address: real processes, of which one is killed, loaded and unloaded beside the others."""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGTERM
from types import MappingProxyType
from typing import Any

import httpx2
import openai
import psutil
import pytest
import yaml

from jaxserve import Engine, SamplingParams
from tests.api.fakes import DEMO
from tests.conftest import ONE_ROW
from tests.e2e.browser import ENDED, Browser, ask
from tests.faults.launched import Launched
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.families import CASES
from tests.waiting import LAST_RESORT, wait_until

PROMPT, TOKENS = "A dog and a cat went to the sea", 24
ADMIN = {"Authorization": "Bearer the-admin-key"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model of another family, with the demo model's tokenizer."""
    config = json.loads((DEMO / "config.json").read_text())
    same = {name: config[name] for name in ("vocab_size", "max_position_embeddings", "eos_token_id")}
    hf = CASES["qwen3"] | same | {"bos_token_id": None}
    directory = write_checkpoint(tmp_path_factory.mktemp("qwen") / "model", hf, random_tensors(hf))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, directory)
    return directory


@pytest.fixture(scope="module")
def expected(qwen: Path, compile_cache: str) -> dict[str, list[int]]:
    """The tokens of each model served alone. All programs are compiled here, once for all processes."""
    found = {}
    for name, path in (("demo", None), ("qwen", str(qwen))):
        with Engine(path, compile_cache=compile_cache, wait_for_programs=True, **ONE_ROW) as engine:
            [[answer]] = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=TOKENS))
            found[name] = answer.token_ids
    return found | {"third": found["demo"]}


class Front(Launched):
    """A server of several models. entries: of models.served. server: more keys of this section"""

    def __init__(
        self,
        cache: str,
        directory: Path,
        entries: list[dict[str, Any]],
        server: Mapping[str, Any] = MappingProxyType({}),
        **models: Any,
    ) -> None:
        self.admin_key = ADMIN["Authorization"].partition(" ")[2]
        tree = {
            "server": {"admin_api_key": self.admin_key, "max_body_bytes": 2**20, **server},
            "models": {"served": entries, **models},
        }
        path = directory / "models.yaml"
        path.write_text(yaml.safe_dump(tree))
        super().__init__(cache, directory, config=str(path), **ONE_ROW)

    def models(self) -> dict[str, dict[str, Any]]:
        data = httpx2.get(f"{self.url}/v1/models", timeout=LAST_RESORT).json()["data"]
        return {entry["id"]: entry["status"] for entry in data}

    def is_in(self, name: str, state: str) -> bool:
        return self.models()[name]["value"] == state

    def wait_for(self, name: str, state: str) -> None:
        wait_until(lambda: self.is_in(name, state), f"{name} is {state}")

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        return httpx2.post(f"{self.url}{path}", content=content, headers=headers, timeout=LAST_RESORT)

    def order(self, what: str, model: str) -> None:
        assert self.post(f"/models/{what}", {"model": model}, **ADMIN).json()["success"] is True

    def value(self, metric: str) -> float:
        """The sum of the samples that begin so."""
        lines = httpx2.get(f"{self.url}/metrics", timeout=LAST_RESORT).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LAST_RESORT)


@pytest.fixture(scope="module")
def front(
    qwen: Path, expected: dict[str, list[int]], compile_cache: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    directory = tmp_path_factory.mktemp("front")
    own = directory / "qwen.yaml"
    model = {"path": str(qwen), "served_name": ["alias"]}
    own.write_text(yaml.safe_dump({"model": model, "mesh": {"replicas": min(2, len(os.sched_getaffinity(0)))}}))
    entries = [
        {"name": "demo", "load": "start"},
        {"name": "qwen", "load": "start", "config": str(own)},
        {"name": "third", "config": {"cache": {"prefix_cache": False}}, "idle_seconds": 1},
    ]
    with Front(compile_cache, directory, entries) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with front.client() as client:
        yield client


def tokens(client: openai.OpenAI, model: str, *, stream: bool = False) -> list[int]:
    """The tokens of the answer to PROMPT."""
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"return_token_ids": True}}
    if not stream:
        answer = client.completions.create(model=model, prompt=PROMPT, **options)
        return answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    chunks = client.completions.create(model=model, prompt=PROMPT, stream=True, **options)
    return [token for chunk in chunks for choice in chunk.choices for token in choice.model_extra["token_ids"] or ()]  # type: ignore[index]


def long_stream(client: openai.OpenAI, model: str) -> Iterator[Any]:
    return iter(
        client.completions.create(
            model=model, prompt="a", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
    )


@pytest.mark.parametrize("stream", [False, True])
def test_each_model_answers_with_its_own_tokens(
    client: openai.OpenAI, expected: dict[str, list[int]], stream: bool
) -> None:
    assert expected["demo"] != expected["qwen"]
    for name in ("demo", "qwen", "alias"):
        assert tokens(client, name, stream=stream) == expected["qwen" if name == "alias" else name]


def test_models_are_listed_with_their_states(front: Front, client: openai.OpenAI) -> None:
    assert list(front.models()) == ["demo", "qwen", "alias", "third"]
    assert front.is_in("qwen", "loaded") and front.is_in("alias", "loaded")
    shown: Any = client.models.retrieve("alias")
    assert shown.id == "alias" and shown.max_model_len == 2048 and shown.status["value"] == "loaded"
    health = httpx2.get(f"{front.url}/health").json()
    assert health["status"] == "ready" and health["models"]["demo"] == "loaded"
    assert front.value('jaxserve:model_loaded{model="demo",model_name="demo"}') == 1


class Steady(threading.Thread):
    """A client that asks one model the same again and again until `done`."""

    def __init__(self, front: Front, model: str, expected: list[int]) -> None:
        super().__init__()
        self.count, self.wrong = 0, list[Any]()
        self.done = threading.Event()
        self._front, self._model, self._expected = front, model, expected
        self.start()

    def run(self) -> None:
        with self._front.client() as client:
            while not self.done.is_set():
                try:
                    found = tokens(client, self._model, stream=self.count % 2 == 0)
                except openai.OpenAIError as error:
                    self.wrong.append(error)
                else:
                    self.wrong += [found] if found != self._expected else []
                self.count += 1


def test_one_model_is_killed_and_another_is_loaded_and_the_others_notice_nothing(
    front: Front, client: openai.OpenAI, expected: dict[str, list[int]]
) -> None:
    killed = max(front.api.children(), key=lambda child: child.create_time())  # the second that was started
    steady = [Steady(front, "demo", expected["demo"]) for _ in range(3)]
    with ThreadPoolExecutor(2) as pool:
        stream = long_stream(client, "qwen")
        next(stream)
        killed.suspend()  # so that the requests are in hand until it is killed
        body = {"model": "qwen", "prompt": "a", "max_tokens": 9}
        whole = pool.submit(front.post, "/v1/completions", body)
        wait_until(lambda: front.models()["qwen"]["requests"] == 2, "the process has both requests")
        third = pool.submit(tokens, client, "third")
        front.wait_for("third", "loading")
        killed.kill()
        with pytest.raises(openai.APIError) as broken:
            list(stream)
        assert broken.value.code == "model_ended"
        answer = whole.result()
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "model_ended"
        assert answer.headers["x-request-id"]
        assert tokens(client, "qwen") == expected["qwen"]  # it waits for the new process
        assert third.result() == expected["third"]
    before = [each.count for each in steady]
    wait_until(lambda: all(each.count > then for each, then in zip(steady, before, strict=True)), "more answers")
    for each in steady:
        each.done.set()
        each.join()
    assert [each.wrong for each in steady] == [[], [], []]


def test_a_model_without_requests_is_unloaded(front: Front, client: openai.OpenAI) -> None:
    assert tokens(client, "third")
    children = len(front.api.children())
    front.wait_for("third", "unloaded")
    wait_until(lambda: len(front.api.children()) == children - 1, "its process is gone")
    assert front.is_in("demo", "loaded") and "failed" not in front.models()["third"]


def test_the_page_shows_a_load_and_the_files_of_the_chosen_model(
    front: Front, client: openai.OpenAI, browser: Browser, tmp_path: Path
) -> None:
    front.wait_for("third", "unloaded")
    browser.open(f"{front.url}/")
    browser.wait("document.getElementById('models').value === 'demo'")
    assert browser.run("[...document.getElementById('models').options].map((each) => each.value).join()") == (
        "demo,qwen,alias,third"
    )
    browser.run("document.getElementById('models').value = 'third'")
    browser.run("document.getElementById('temperature').value = 0")
    ask(browser, "What is the capital of France?")
    browser.wait("document.getElementById('notice').textContent.startsWith('The model third is loading')")
    browser.picture(tmp_path / "model_loading.png")
    browser.wait(f"{ENDED} === 1")
    assert "Paris" in browser.run("document.querySelector('.assistant .body').innerText")
    browser.wait("document.getElementById('notice').hidden")
    (tmp_path / "own.jsonl").write_text("{}\n")
    browser.run("location.hash = 'files'")
    browser.choose_file("#upload", tmp_path / "own.jsonl")
    browser.wait("document.getElementById('file-table').innerText.includes('own.jsonl')")
    assert "own.jsonl" in [each.filename for each in client.files.list(extra_query={"model": "third"})]
    assert "own.jsonl" not in [each.filename for each in client.files.list()]
    browser.press("Delete", "document.getElementById('file-table')")
    browser.wait("!document.getElementById('file-table').innerText.includes('own.jsonl')")
    assert browser.complaints == []


def test_a_client_that_leaves_ends_its_request(front: Front, client: openai.OpenAI) -> None:
    generated, running = (
        f'jaxserve:{name}{{model="demo",model_name="demo"}}'
        for name in ("generation_tokens_total", "num_requests_running")
    )
    before = front.value(generated)
    stream: Any = client.completions.create(
        model="demo", prompt="a", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: not front.value(running), "the request has ended")
    assert 0 < front.value(generated) - before < 1900


def test_files_and_batches_of_a_model_named_in_the_query(client: openai.OpenAI) -> None:
    """An object is found without the model's name as long as its model is loaded."""
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "qwen", "prompt": "a"}}
    query = {"model": "qwen"}
    file = client.files.create(file=("one.jsonl", json.dumps(line).encode()), purpose="batch", extra_query=query)
    window: Any = {"completion_window": "24h", "endpoint": "/v1/completions"}
    with pytest.raises(openai.BadRequestError):
        client.batches.create(input_file_id=file.id, **window)  # the default model has no such file
    batch = client.batches.create(input_file_id=file.id, **window, extra_query=query)
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch is done")
    assert file.id in [each.id for each in client.files.list(extra_query=query)]
    assert file.id not in [each.id for each in client.files.list()]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b"hello", 400, None),
        ("/v1/completions", [1], 400, None),
        ("/v1/completions", {"model": 5, "prompt": "a"}, 400, "model"),
        ("/v1/completions", {"model": "demo", "prompt": 5}, 400, "prompt"),
        ("/v1/chat/completions", {"model": "none", "messages": []}, 404, "model"),
        ("/v1/completions?model=qwen", {"model": "demo", "prompt": "a"}, 400, "model"),
        ("/v1/completions", {"model": "demo", "prompt": "a" * 2**20}, 413, None),
        ("/v1/nothing", {"model": "qwen"}, 404, None),
    ],
)
def test_hostile_bodies_are_refused_by_name(front: Front, path: str, body: Any, status: int, param: str | None) -> None:
    answer = front.post(path, body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_errors_have_the_form_of_the_route(front: Front) -> None:
    answer = front.post("/v1/messages", {"model": "none"})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    answer = front.post("/api/chat", {"model": "none"})
    assert answer.status_code == 404 and "none" in answer.json()["error"]


@pytest.mark.parametrize("what", ["load", "unload"])
def test_only_the_operator_loads_and_unloads(front: Front, what: str) -> None:
    assert front.post(f"/models/{what}", {"model": "demo"}).status_code == 401
    assert front.post(f"/models/{what}", {"model": "none"}, **ADMIN).status_code == 404
    wrong = front.post(f"/models/{what}", {"model": 5}, **ADMIN)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "model"


def test_sigterm_drains_and_leaves_no_process(front: Front, client: openai.OpenAI) -> None:
    """The last test of this server."""
    stream = long_stream(client, "demo")
    next(stream)
    processes = front.children()
    assert len(processes) >= 4
    front.send(SIGTERM)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert front.process.wait(LAST_RESORT) == 0, front.log()
    assert not psutil.wait_procs(processes, timeout=LAST_RESORT)[1]


# a server with room for one model, which waits for none


@pytest.fixture(scope="module")
def narrow(qwen: Path, compile_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    broken = tmp_path_factory.mktemp("broken")
    shutil.copy(DEMO / "config.json", broken)
    shutil.copy(DEMO / "tokenizer.json", broken)
    (broken / "model.safetensors").write_bytes(b"damaged")
    entries = [
        {"name": "demo"},
        {"name": "qwen", "load": "start", "config": {"model": {"path": str(qwen)}}},
        {"name": "broken", "config": {"model": {"path": str(broken)}}},
    ]
    directory = tmp_path_factory.mktemp("narrow")
    with Front(compile_cache, directory, entries, max_loaded=1, wait_seconds=0.2) as running:
        yield running


def refused(front: Front, model: str) -> httpx2.Response:
    answer = front.post("/v1/completions", {"model": model, "prompt": "a"})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"
    assert int(answer.headers["Retry-After"]) >= 1
    return answer


def test_a_model_in_use_is_not_unloaded_for_room(narrow: Front) -> None:
    """Its engine is paused, so that the request cannot end before the other model is asked for."""
    assert narrow.post("/pause_generation?model=qwen", {"mode": "in_place"}, **ADMIN).status_code == 200
    with narrow.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.completions.create, model="qwen", prompt="a", max_tokens=4)
        try:
            wait_until(lambda: narrow.models()["qwen"]["requests"] == 1, "the request is in hand")
            refused(narrow, "demo")
            assert narrow.is_in("qwen", "loaded")
        finally:
            narrow.post("/continue_generation?model=qwen", {}, **ADMIN)
        assert answer.result().choices[0].finish_reason in ("length", "stop")


def test_the_model_that_was_used_longest_ago_makes_room(narrow: Front, expected: dict[str, list[int]]) -> None:
    with narrow.client() as client:
        with contextlib.suppress(openai.InternalServerError):  # 503: it is being loaded
            tokens(client, "demo")
        narrow.wait_for("demo", "loaded")
        assert narrow.is_in("qwen", "unloaded") and len(narrow.api.children()) == 1
        assert tokens(client, "demo") == expected["demo"]


def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason(narrow: Front) -> None:
    narrow.order("load", "broken")
    wait_until(lambda: narrow.models()["broken"].get("failed"), "it has failed")
    assert narrow.models()["broken"]["exit_code"] == 2
    reason = "'broken' ended with status 2"
    wait_until(lambda: reason in refused(narrow, "broken").json()["error"]["message"], "the reason is told")
    assert "broken: " in narrow.log()


def test_a_load_is_given_up_by_an_unload(narrow: Front) -> None:
    narrow.order("load", "demo")
    narrow.wait_for("demo", "loading")
    narrow.order("unload", "demo")
    narrow.wait_for("demo", "unloaded")
    wait_until(lambda: not narrow.api.children(), "no process is left")


def test_a_killed_front_leaves_no_process(narrow: Front) -> None:
    """The last test of this server."""
    narrow.order("load", "demo")
    processes = wait_until(narrow.children, "a process is started")
    narrow.api.kill()
    assert not psutil.wait_procs(processes, timeout=LAST_RESORT)[1]
