"""One engine over two processes: the tokens of one device, and what happens when either process dies."""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.numpy import save_file

from jaxserve import Engine
from tests.api.fakes import DEMO
from tests.conftest import SMALL
from tests.faults.group import Group
from tests.faults.helpers import QUESTIONS, tensors
from tests.models.lora import peft_config, random_pairs, write_adapter
from tests.waiting import LAST_RESORT, until, wait_until

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "legs": {"type": "integer", "maximum": 99}},
    "required": ["city", "legs"],
    "additionalProperties": False,
}
GRAMMAR = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
COUNT = 8  # twice as many as there are slots
LENGTHS = (140, 40)  # tokens of an answer; those of the first half run on until the second half comes
SHAPED = (5, 7)


def body(index: int) -> dict[str, Any]:
    """Greedy, some under a grammar. A later one is of a better priority."""
    shaped: dict[str, Any] = {"response_format": GRAMMAR} if index in SHAPED else {"ignore_eos": True}
    messages = [{"role": "user", "content": QUESTIONS[index]}]
    return {
        "model": "demo",
        "messages": messages,
        "temperature": 0,
        "max_tokens": LENGTHS[index >= COUNT // 2],
        "priority": -index,
    } | shaped


async def ask(client: httpx2.AsyncClient, fields: dict[str, Any]) -> dict[str, Any]:
    """The first choice. A request that comes while the group joins again is refused, and asks again."""
    while True:
        answer = await client.post("/v1/chat/completions", json=fields)
        if answer.status_code != 503:
            break
        await asyncio.sleep(0.5)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def client_of(group: Group) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=group.leader.url, timeout=2 * LAST_RESORT)


@pytest.fixture(scope="module")
def group(compile_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    directory = tmp_path_factory.mktemp("group")
    shutil.copytree(DEMO, directory / "other")
    save_file(tensors(1), directory / "other" / "model.safetensors")
    keys = {"runtime.deterministic": True, "server.admin_api_key": "root", "server.weights_directories": directory}
    with Group(compile_cache, directory, 1, **keys) as running:
        yield running


@pytest.fixture(scope="module")
def expected(compile_cache: str) -> list[str]:
    """The answers of one device, one after the other."""
    with Engine(compile_cache=compile_cache, **SMALL) as engine:
        fields = [body(index) for index in range(COUNT)]
        answers = [engine.chat(each.pop("messages"), **each) for each in fields]
    return [answer.choices[0].message.content for answer in answers]


async def contents(group: Group, begun: asyncio.Event | None = None) -> list[str]:
    """All answers, to requests of which the second half preempts the first. begun: set when both halves were asked"""
    async with client_of(group) as client:
        asked = [asyncio.create_task(ask(client, body(index))) for index in range(COUNT // 2)]
        await until(lambda: group.leader.state().running == COUNT // 2, "all slots are taken")
        asked += [asyncio.create_task(ask(client, body(index))) for index in range(COUNT // 2, COUNT)]
        if begun is not None:
            begun.set()
        return [choice["message"]["content"] for choice in await asyncio.gather(*asked)]


def check_tokens(group: Group, expected: list[str]) -> None:
    """Under load, with grammars, preemption and an abort."""

    async def run() -> list[str]:
        async with client_of(group) as client:
            leaving = asyncio.create_task(ask(client, body(0) | {"max_tokens": 150}))
            await until(lambda: group.leader.state().running, "it runs")
            leaving.cancel()
            return await contents(group)

    assert asyncio.run(run()) == expected
    assert group.leader.stats()["jaxserve:priority_preemptions"] > 0
    assert group.leader.settled().idle
    assert group.leader.stats()["jaxserve:xla_compilations_total"] == 0


def test_tokens_are_those_of_one_device(group: Group, expected: list[str]) -> None:
    check_tokens(group, expected)


@pytest.mark.slow
def test_tokens_of_four_devices_are_those_of_one(compile_cache: str, tmp_path: Path, expected: list[str]) -> None:
    with Group(compile_cache, tmp_path, 2) as group:
        check_tokens(group, expected)


async def logprobs_alone_and_under_load(group: Group) -> list[dict[str, Any]]:
    """The log-probabilities of sampled tokens, of a request alone and beside five others."""
    drawn = body(1) | {"temperature": 1, "seed": 5, "logprobs": True, "top_logprobs": 3, "max_tokens": 20}
    async with client_of(group) as client:
        alone = await ask(client, drawn)
        others = [asyncio.create_task(ask(client, body(index) | {"max_tokens": 25})) for index in range(5)]
        beside = await ask(client, drawn)
        await asyncio.gather(*others)
    return [alone["logprobs"], beside["logprobs"]]


def test_log_probabilities_are_bitwise_equal_alone_and_under_load(group: Group) -> None:
    alone, beside = asyncio.run(logprobs_alone_and_under_load(group))
    assert beside == alone
    assert len(alone["content"]) == 20


async def logprobs_of_a_load(group: Group) -> list[dict[str, Any]]:
    """The log-probabilities of all answers to a load with grammars, preemption and an abort."""
    async with client_of(group) as client:
        leaving = asyncio.create_task(ask(client, body(0) | {"max_tokens": 150}))
        await until(lambda: group.leader.state().running, "it runs")
        leaving.cancel()
        several = {"logprobs": True, "top_logprobs": 5}
        asked = [asyncio.create_task(ask(client, body(index) | several)) for index in range(COUNT // 2)]
        await until(lambda: group.leader.state().running == COUNT // 2, "all slots are taken")
        asked += [asyncio.create_task(ask(client, body(index) | several)) for index in range(COUNT // 2, COUNT)]
        return [choice["logprobs"] for choice in await asyncio.gather(*asked)]


@pytest.mark.slow
def test_four_devices_are_bitwise_equal_between_runs_and_loads(
    compile_cache: str, tmp_path: Path, expected: list[str]
) -> None:
    """In deterministic mode, where sums over devices have one order. Each run has processes of its own."""
    runs = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        with Group(compile_cache, directory, 2, **{"runtime.deterministic": True}) as group:
            check_tokens(group, expected)
            runs.append([*asyncio.run(logprobs_alone_and_under_load(group)), *asyncio.run(logprobs_of_a_load(group))])
            assert group.leader.stats()["jaxserve:priority_preemptions"] > 0
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[0][1], "alone and under load"


@pytest.mark.parametrize("host", ["follower", "leader"])
def test_every_request_is_answered_when_a_host_is_killed(group: Group, expected: list[str], host: str) -> None:
    killed = group.leader_engine if host == "leader" else group.follower.engine
    assert killed is not None

    async def run() -> list[str]:
        begun = asyncio.Event()
        answers, waiting = asyncio.create_task(contents(group, begun)), asyncio.create_task(begun.wait())
        await asyncio.wait((answers, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        killed.kill()
        return await answers

    assert asyncio.run(run()) == expected
    wait_until(lambda: group.follower.health() == (200, {"status": "serving"}), "the follower serves again")
    assert "host 1 is lost" in group.leader.log() or host == "leader"
    assert "the leader is lost" in group.follower.log_file.read_text() or host == "follower"


def admin(group: Group, path: str, **options: Any) -> dict[str, Any]:
    headers = {"authorization": "Bearer root"}
    answer = httpx2.post(f"{group.leader.url}{path}", headers=headers, timeout=2 * LAST_RESORT, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_new_weights_and_sleep_are_of_all_hosts(group: Group, compile_cache: str, expected: list[str]) -> None:
    other = group.directory / "other"
    fields: dict[str, Any] = body(1) | {"max_tokens": 60}
    alone: dict[str, Any] = {**fields, "model": "other"}
    with Engine(str(other), compile_cache=compile_cache, **SMALL) as engine:
        wanted = engine.chat(alone.pop("messages"), **alone).choices[0].message.content

    def told() -> str:
        answer = httpx2.post(f"{group.leader.url}/v1/chat/completions", json=fields, timeout=2 * LAST_RESORT)
        return answer.json()["choices"][0]["message"]["content"]

    before = told()
    admin(group, "/update_weights_from_disk", json={"model_path": str(other)})
    assert told() == wanted != before
    admin(group, "/sleep?level=1")
    admin(group, "/wake_up")
    assert told() == wanted
    admin(group, "/update_weights_from_tensor", content=(DEMO / "model.safetensors").read_bytes())
    assert told() == before
    admin(group, "/sleep?level=2")
    admin(group, "/wake_up")
    admin(group, "/update_weights_from_disk", json={"model_path": str(other)})
    assert told() == wanted
    admin(group, "/update_weights_from_tensor", content=(DEMO / "model.safetensors").read_bytes())
    assert told() == before and expected[1].startswith(before)


@pytest.mark.slow
def test_adapters_of_all_hosts(compile_cache: str, tmp_path: Path) -> None:
    """Loaded at the start and by a route, replaced, and there again after the death of either engine process."""
    layers = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.mlp.down_proj": (256, 640)}
    pairs = [random_pairs(layers, 4, seed) for seed in range(3)]
    paths = [write_adapter(tmp_path / "a" / str(i), each, peft_config(4)) for i, each in enumerate(pairs)]
    fields: dict[str, Any] = body(1) | {"max_tokens": 24}
    entries = [{"name": "start", "path": str(paths[0])}]
    with Engine(compile_cache=compile_cache, slots=2, **SMALL) as engine:
        for name, path in (("start", paths[0]), ("one", paths[1]), ("two", paths[2])):
            engine.load_adapter(name, path)
        own: dict[str, dict[str, Any]] = {name: fields | {"model": name} for name in ("demo", "start", "one", "two")}
        wanted = {
            name: engine.chat(each.pop("messages"), **each).choices[0].message.content for name, each in own.items()
        }
    assert len(set(wanted.values())) == 4
    keys = {"server.admin_api_key": "root", "server.weights_directories": tmp_path / "a", "lora.slots": 2}
    with Group(compile_cache, tmp_path, 1, **keys, **{"lora.adapters": json.dumps(entries)}) as group:

        async def told(*names: str) -> list[str]:
            async with client_of(group) as client:
                asked = (ask(client, body(1) | {"max_tokens": 24, "model": name}) for name in names)
                return [choice["message"]["content"] for choice in await asyncio.gather(*asked)]

        def check(**meaning: str) -> None:
            found = asyncio.run(told("demo", "start", *meaning))
            assert found == [wanted[name] for name in ("demo", "start", *meaning.values())]

        check()
        load = {"lora_name": "sql", "lora_path": "1", "load_inplace": True}
        for index, name in ((1, "one"), (2, "two")):
            call = {"headers": {"authorization": "Bearer root"}, "timeout": 2 * LAST_RESORT}
            url = f"{group.leader.url}/v1/load_lora_adapter"
            assert httpx2.post(url, json=load | {"lora_path": str(index)}, **call).status_code == 200
            check(sql=name)
        for host in ("follower", "leader"):
            killed = group.follower.engine if host == "follower" else group.leader_engine
            assert killed is not None
            killed.kill()
            check(sql="two")
            wait_until(lambda: group.follower.health() == (200, {"status": "serving"}), "the follower serves again")
        assert list(admin(group, "/unload_lora_adapter", json={"lora_name": "sql"})["loaded_adapters"]) == ["start"]
        assert group.leader.stats()["jaxserve:xla_compilations_total"] == 0


@pytest.mark.slow
def test_the_leaders_command_is_killed_and_started_again(group: Group, expected: list[str]) -> None:
    """Its clients lose their connections. The follower waits for the next leader and joins it."""
    with httpx2.Client(base_url=group.leader.url, timeout=LAST_RESORT) as client:
        fields = body(0) | {"stream": True, "max_tokens": 200}
        with pytest.raises(httpx2.RemoteProtocolError), client.stream("POST", "/v1/chat/completions", json=fields) as s:
            for number, _ in enumerate(s.iter_lines()):
                if number == 2:
                    group.leader.send(signal.SIGKILL)
    engine = group.follower.engine
    wait_until(lambda: group.follower.health()[1] != {"status": "serving"}, "the follower notices")
    group.restart_leader()
    wait_until(lambda: group.follower.health() == (200, {"status": "serving"}), "the follower serves again")
    assert group.follower.engine != engine, "a new engine process"
    assert asyncio.run(contents(group)) == expected


def test_the_follower_serves_no_requests(group: Group) -> None:
    port = group.follower.port
    answer = httpx2.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body(0), timeout=LAST_RESORT)
    assert (answer.status_code, json.loads(answer.text)) == (404, {"detail": "Not Found"})
