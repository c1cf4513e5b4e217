"""Engine.chat answers as POST /v1/chat/completions does, and the README's examples print what they say."""

import asyncio
import contextlib
import fcntl
import gc
import itertools
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest

import jaxserve
from jaxserve import Engine, SamplingParams
from jaxserve.errors import (
    ConfigError,
    InvalidSchemaError,
    InvalidValueError,
    RequestError,
    ServerError,
    UnsupportedParameterError,
)
from jaxserve.library import serving
from jaxserve.library.in_process import INSTEAD, SAME
from jaxserve.library.serving import LoopThread, RunningServer, config_of
from jaxserve.types.sampling import EMBED
from tests.conftest import ONE_ROW, SMALL

README = Path(__file__).parents[2] / "README.md"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
DIFFERENT = ("id", "created")  # from one answer to the next


@pytest.fixture(scope="module")
def engine(compile_cache: str) -> Engine:
    return Engine(compile_cache=compile_cache, **SMALL)


def near(value: Any) -> Any:
    """`value` to compare with: a prompt taken from the cache is computed in other shapes, whose last bits differ."""
    if isinstance(value, dict):
        return {name: near(part) for name, part in value.items()}
    if isinstance(value, list):
        return [near(part) for part in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def plain(answer: Any) -> dict[str, Any]:
    """Without what differs from one answer to the next, nulls, and how much of the prompt was cached."""
    value = answer.model_dump(exclude_none=True, exclude=set(DIFFERENT))
    if "usage" in value:
        del value["usage"]["prompt_tokens_details"]
    for choice in value["choices"]:
        said = choice.get("message") or choice["delta"]
        for call in said.get("tool_calls", ()):
            call.pop("id", None)
    return value


ASKED: dict[str, dict[str, Any]] = {
    "text": {"messages": FRANCE},
    "choices": {"messages": FRANCE, "n": 2, "seed": 7, "temperature": 1.0, "max_tokens": 8},
    "logprobs": {"messages": FRANCE, "logprobs": True, "top_logprobs": 3},
    "length": {"messages": FRANCE, "max_tokens": 3},
    "stop": {"messages": FRANCE, "stop": [" is"]},
    "reasoning": {
        "messages": [{"role": "user", "content": "What is 2+3? Think."}],
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    },
    "tools": {"messages": WEATHER, "tools": [TOOL]},
    "named tool": {
        "messages": FRANCE,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    },
    "schema": {"messages": FRANCE, "response_format": SCHEMA},
    "beams": {"messages": FRANCE, "max_tokens": 6, "n": 2, "extra_body": {"use_beam_search": True}},
}


def fields(name: str) -> dict[str, Any]:
    asked = {"temperature": 0, **ASKED[name]}
    more: dict[str, Any] = asked.pop("extra_body", {})
    return asked | more


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_is_that_of_the_server(name: str, engine: Engine, client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(**{"model": "demo", "temperature": 0} | ASKED[name])
    assert plain(engine.chat(**fields(name))) == near(plain(expected))
    assert not engine.has_unfinished


@pytest.mark.parametrize("name", [name for name in ASKED if name not in ("beams", "choices")])
def test_a_stream_is_that_of_the_server(name: str, engine: Engine, client: openai.OpenAI) -> None:
    asked = {"model": "demo", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    expected = client.chat.completions.create(**asked | ASKED[name])
    found = engine.chat(**fields(name), stream=True, stream_options={"include_usage": True})
    assert [plain(chunk) for chunk in found] == [near(plain(chunk)) for chunk in expected]
    assert not engine.has_unfinished


def test_a_tool_loop_over_messages_of_answers(engine: Engine) -> None:
    messages: list[Any] = list(WEATHER)
    message = engine.chat(messages, tools=[TOOL], temperature=0).choices[0].message
    assert message.tool_calls is not None and message.tool_calls[0].function is not None
    assert message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": '{"temperature": 21, "sky": "sunny"}',
    }
    last = engine.chat([*messages, message, result], tools=[TOOL], temperature=0).choices[0].message
    assert last.content is not None and "21" in last.content


@pytest.mark.parametrize(
    ("wrong", "error", "param"),
    [
        ({"temprature": 1}, InvalidValueError, "temprature"),
        ({"temperature": "hot"}, InvalidValueError, "temperature"),
        ({"messages": []}, InvalidValueError, "messages"),
        ({"model": "gpt-9"}, RequestError, "model"),
        ({"chat_template": "x"}, UnsupportedParameterError, "chat_template"),
        ({"top_logprobs": 2}, InvalidValueError, "top_logprobs"),
        ({"data_parallel_rank": 1}, InvalidValueError, "data_parallel_rank"),
        ({"routed_dp_rank": 2}, InvalidValueError, "routed_dp_rank"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, RequestError, "messages"),
        (
            {"response_format": SCHEMA | {"json_schema": {"schema": {"type": "no"}}}},
            InvalidSchemaError,
            "response_format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named_at_once(
    wrong: dict[str, Any], error: type[RequestError], param: str, stream: Any, engine: Engine
) -> None:
    with pytest.raises(error) as caught:
        engine.chat(**{"messages": FRANCE, "stream": stream} | wrong)
    assert caught.value.param == param
    assert not engine.has_unfinished


@pytest.mark.parametrize("end", ["close", "forget", "collect"])
def test_a_stream_that_is_left_is_aborted(end: str, engine: Engine) -> None:
    stream: Any = engine.chat(FRANCE, stream=True, ignore_eos=True)
    next(stream)
    assert engine.has_unfinished
    if end == "close":
        stream.close()
    elif end == "collect":
        loop = [stream]
        loop.append(loop)
        del loop
    del stream
    gc.collect()
    assert not engine.has_unfinished


def test_a_stream_that_is_collected_during_a_step_is_aborted_after_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort in the middle of a step would change what the step is made of."""
    loop: list[Any] = [engine.chat(FRANCE, stream=True, ignore_eos=True)]
    next(loop[0])
    loop.append(loop)
    del loop
    execute, live = engine.runner.execute, list[int]()

    def collecting(output: Any) -> Any:
        gc.collect()
        live.append(len(engine.core.live_ids))
        return execute(output)

    monkeypatch.setattr(engine.runner, "execute", collecting)
    [[found]] = engine.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=9))
    assert found.text == " there was a kind tiger named Hugo." and live[:2] == [2, 1]
    assert not engine.has_unfinished


def test_streams_and_other_requests_share_the_engine(engine: Engine) -> None:
    alone = [engine.chat(messages, temperature=0).choices[0].message.content for messages in (FRANCE, WEATHER)]
    streams = [engine.chat(messages, temperature=0, stream=True) for messages in (FRANCE, WEATHER)]
    queued = engine.add_request("Once upon a time")
    texts = ["", ""]
    for chunks in itertools.zip_longest(*streams):
        for place, chunk in enumerate(chunks):
            texts[place] += chunk.choices[0].delta.content or "" if chunk else ""
    assert texts == alone
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {queued} and outputs[-1].finished


def test_a_caller_inside_a_running_loop(engine: Engine) -> None:
    """As in a notebook."""

    async def cell() -> str | None:
        return engine.chat(FRANCE, temperature=0).choices[0].message.content

    assert asyncio.run(cell()) == "The capital of France is Paris."


def test_an_interrupt_aborts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([KeyboardInterrupt])
    wait = threading.Event.wait

    def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
        if engine.has_unfinished and (error := next(waits, None)):
            raise error
        return wait(event, timeout)

    stream: Any = engine.chat(FRANCE, stream=True, ignore_eos=True)
    next(stream)
    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert not engine.has_unfinished
    assert engine.chat(FRANCE, temperature=0).choices[0].message.content == "The capital of France is Paris."


def test_a_closed_engine_answers_no_conversation(compile_cache: str) -> None:
    before = set(threading.enumerate())
    with Engine(compile_cache=compile_cache, **SMALL) as engine:
        begun = engine.chat(FRANCE, stream=True, ignore_eos=True)
        assert next(begun).choices[0].delta.role == "assistant"
        assert any(thread.name == "jaxserve-chat" for thread in set(threading.enumerate()) - before)
    assert not engine.has_unfinished
    begun.close()
    with pytest.raises(ServerError, match="closed"):
        engine.chat(FRANCE)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in left if name.startswith(("jaxserve-chat", "masks"))], left


def test_an_engine_that_is_dropped_frees_its_memory_and_its_file(compile_cache: str, tmp_path: Path) -> None:
    """As in a notebook, where another one takes its name: nothing of the process may keep the weights."""
    before = set(threading.enumerate())
    engine = Engine(compile_cache=compile_cache, host_memory="1MiB", disk=str(tmp_path), **ONE_ROW)
    assert engine.chat(FRANCE, max_tokens=1).choices[0].finish_reason == "length"
    left = [weakref.ref(engine), weakref.ref(engine.runner), weakref.ref(engine.runner.leaves[0])]
    del engine
    gc.collect()
    assert [each() for each in left] == [None] * 3
    with next(tmp_path.glob("*.pages")).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not [thread.name for thread in set(threading.enumerate()) - before if not thread.name.startswith("masks")]


def test_a_start_that_is_given_up_leaves_no_process(compile_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate()), set(psutil.Process().children())
    monkeypatch.setattr(serving, "START_TIMEOUT", 0.5)
    with pytest.raises(ConfigError, match="not ready"), jaxserve.launch_server(compile_cache=compile_cache, **ONE_ROW):
        pass
    assert not [each.name for each in set(threading.enumerate()) - before[0] if each.name.startswith("jaxserve")]
    assert set(psutil.Process().children()) <= before[1]


def test_a_loop_thread_passes_errors_on_and_ends() -> None:
    loop = LoopThread("test-loop")

    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run(fail())
    loop.close()
    loop.settle(fail())  # nothing runs any more: it is dropped
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_an_example_of_the_readme_prints_what_it_says(
    number: int,
    engine: Engine,
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = examples()[number]
    monkeypatch.setattr(jaxserve, "Engine", lambda: engine, raising=False)
    monkeypatch.setattr(jaxserve, "launch_server", lambda: contextlib.nullcontext(server), raising=False)
    names: dict[str, Any] = {}
    exec(code.replace("http://127.0.0.1:8000", server.url), names)
    if "client" in names:
        names["client"].close()
    said = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")] or [server.url]
    assert capsys.readouterr().out.replace("\n", "") == "".join(said)


def test_every_example_of_the_readme_is_run() -> None:
    assert len(examples()) == 3


def test_prompts_in_the_forms_of_other_engines(engine: Engine) -> None:
    """A mapping names a text or token ids, an array is token ids, and what is neither is an error, not a text."""
    ids = engine.tokenizer.encode("Once upon a time")
    params = SamplingParams(max_tokens=3, temperature=0)
    [[expected]] = engine.generate([ids], params)
    forms: list[Any] = [
        ids,
        tuple(ids),
        np.array(ids),
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids)},
        {"prompt": "Once upon a time"},
        {"prompt": "Once upon a time", "multi_modal_data": None},
        [{"prompt_token_ids": ids}],
        [np.array(ids)],
        np.array([ids]),
    ]
    for form in forms:
        [[found]] = engine.generate(form, params)
        assert (found.token_ids, found.num_prompt_tokens) == (expected.token_ids, len(ids)), form
    engine.add_request({"prompt_token_ids": ids}, params, request_id="form")
    outputs = []
    while engine.has_unfinished:
        outputs += [output for output in engine.step() if output.request_id == "form"]
    assert [token for output in outputs for token in output.token_ids] == expected.token_ids


@pytest.mark.parametrize(
    "prompt",
    [
        b"text",
        bytearray(b"text"),
        [b"text"],
        {"prompt_token_ids": "text"},
        {"prompt": [1, 2]},
        {"prompt": b"text"},
        {"prompt": {"prompt": "text"}},
        {"prompt_token_ids": [1], "multi_modal_data": {}},
        {"prompt_embeds": [[0.5]]},
        {},
        7,
        None,
        [True, False],
        [1.5],
        [1, "text"],
        [[1, "text"]],
        {1, 2},
    ],
)
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidValueError, match="prompt"):
        engine.generate(prompt)


def test_a_conversation_takes_sampling_params(engine: Engine) -> None:
    """As vLLM's chat does: the same answer as with the fields, which go before them."""
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2, stop=("zebra",), logit_bias={5: -1.0})
    found = engine.chat(FRANCE, params)
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    expected = engine.chat(FRANCE, **fields, stop=["zebra"], logit_bias={"5": -1.0})
    assert plain(found) == near(plain(expected))
    assert engine.chat(FRANCE, params, max_tokens=2).usage.completion_tokens == 2
    assert sum(bool(chunk.choices) for chunk in engine.chat(FRANCE, params, stream=True)) > 1
    with pytest.raises(InvalidValueError, match=r"params\.bad_words_token_ids.*bad_words"):
        engine.chat(FRANCE, SamplingParams(bad_words_token_ids=((5,),)))
    with pytest.raises(InvalidValueError, match="params are SamplingParams"):
        engine.chat(FRANCE, 2)  # type: ignore[call-overload]


def test_a_prompt_that_fills_the_context_is_scored(engine: Engine, client: openai.OpenAI) -> None:
    """Nothing is generated after it, so that every token of the context may be the prompt's."""
    context = engine.info.max_model_len
    prompt = [5 + number % 50 for number in range(context)]
    scored = client.completions.create(model="demo", prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == context and None not in logprobs.token_logprobs[1:]
    shorter = client.completions.create(model="demo", prompt=prompt[:-1], max_tokens=0, echo=True, logprobs=1)
    assert shorter.choices[0].logprobs is not None and shorter.choices[0].logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[1:-1] == near(shorter.choices[0].logprobs.token_logprobs[1:])
    with pytest.raises(openai.BadRequestError, match=f"> {context - 1} maximum"):
        client.completions.create(model="demo", prompt=prompt, max_tokens=1)


def test_several_conversations_are_one_batch(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    both = engine.chat_all([FRANCE, WEATHER], max_tokens=6, temperature=0)
    assert capfd.readouterr().err == ""
    assert [plain(each) for each in both] == [
        near(plain(engine.chat(messages, max_tokens=6, temperature=0))) for messages in (FRANCE, WEATHER)
    ]
    with pytest.raises(InvalidValueError, match="no_such"):
        engine.chat_all([FRANCE], no_such=1)
    short = SamplingParams(max_tokens=2, temperature=0)
    engine.chat_all([FRANCE, WEATHER], short, progress=True)
    assert "2/2" in capfd.readouterr().err
    engine.chat(FRANCE, short, use_tqdm=True)
    assert "1/1" in capfd.readouterr().err
    with pytest.raises(InvalidValueError, match="a stream shows no progress"):
        engine.chat(FRANCE, short, stream=True, progress=True)
    for own, lengths in (
        (engine.chat_all([FRANCE, WEATHER], [short, {"max_tokens": 6, "temperature": 0}]), [2, 6]),
        (engine.chat_all([FRANCE, WEATHER], sampling_params=(short, short)), [2, 2]),
    ):
        assert [plain(each)["usage"]["completion_tokens"] for each in own] == lengths
    with pytest.raises(InvalidValueError, match="there are 2 conversations and 1 params"):
        engine.chat_all([FRANCE, WEATHER], [short])
    with pytest.raises(InvalidValueError, match="chat_all takes a list"):
        engine.chat(FRANCE, sampling_params=[short, short])
    with pytest.raises(InvalidValueError, match="use chat_all"):
        engine.chat([FRANCE, WEATHER])
    for wrong in (None, 3, "text", b"text"):
        with pytest.raises(InvalidValueError, match="conversations are a list"):
            engine.chat_all(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="use chat"):
        engine.chat_all(FRANCE)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="no JSON"):
        engine.chat([{"role": "user", "content": b"bytes"}])
    assert not engine.has_unfinished


def test_names_of_other_engines_are_answered_with_ours(engine: Engine) -> None:
    """Each is told what to use instead, which exists."""
    for name, ours in INSTEAD.items():
        with pytest.raises(AttributeError, match=f"Engine has no {name}: use {re.escape(ours)}"):
            getattr(engine, name)
        word = re.split(r"\W", ours)[0]
        assert hasattr(engine, word) or hasattr(jaxserve, word) or word == "jax", name
    for name, ours in SAME.items():
        assert getattr(engine, name) == getattr(engine, ours)
    assert not hasattr(engine, "no_such")
    recommended: dict[str, Any] = dict(engine.info.generation_defaults)
    assert engine.get_default_sampling_params() == SamplingParams(**recommended)
    for name in jaxserve.INSTEAD:
        with pytest.raises(ImportError, match=f"jaxserve has no {name}: "):
            exec(f"from jaxserve import {name}")
    with pytest.raises(TypeError, match=r"list of completions.*\['text'\]"):
        engine.generate("The capital", {"max_new_tokens": 1})[0]["text"]  # type: ignore[call-overload]


def test_parameters_by_the_names_of_others(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    """SGLang's names in a dict, and results that know their prompt, as vLLM's do."""
    ours = SamplingParams(max_tokens=5, temperature=0.0, stop="zebra", ignore_eos=True)  # type: ignore[arg-type]
    theirs = {"max_new_tokens": 5, "temperature": 0, "stop": "zebra", "ignore_eos": True, "top_k": -1, "top_p": None}
    [expected] = engine.generate("The capital", ours)
    found = engine.generate(["The capital", [5, 6, 7]], theirs, progress=True)
    assert found[0][0].token_ids == expected[0].token_ids and len(found[0].outputs[0].token_ids) == 5
    assert [each.prompt for each in found] == ["The capital", None] and found[1].prompt_token_ids == [5, 6, 7]
    assert "2/2" in capfd.readouterr().err
    [[digits]] = engine.generate("x", {"regex": "[0-9]{3}", "max_new_tokens": 9})
    assert re.fullmatch("[0-9]{3}", digits.text)
    with pytest.raises(InvalidValueError, match="'max_token', did you mean max_tokens"):
        engine.generate("x", {"max_token": 5})
    with pytest.raises(InvalidValueError, match="max_tokens is given twice"):
        engine.generate("x", {"max_tokens": 5, "max_new_tokens": 5})
    for wrong, message in (
        ({"temperature": "hot"}, "temperature"),
        ({"n": "2"}, "n is a whole number"),
        ({"seed": "x"}, "seed is a whole number"),
        ({1: 2}, "no sampling parameter '1'"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            engine.generate("x", wrong)  # type: ignore[arg-type]


def test_arguments_by_the_names_of_others(engine: Engine) -> None:
    """Those that mean the same are taken, the others are answered, and nothing is a TypeError of Python."""
    ask: Any = engine.generate
    params = {"max_tokens": 3, "temperature": 0}
    [expected] = ask([5, 6, 7], params)
    for given in ({"input_ids": [5, 6, 7]}, {"prompt": [5, 6, 7], "lora_request": None, "stream": False}):
        [found] = ask(**given, sampling_params=params, use_tqdm=False)
        assert found[0].token_ids == expected[0].token_ids
    name = engine.add_request([5, 6, 7], sampling_params=params)  # type: ignore[call-arg]
    assert any(output.request_id == name for output in engine.step()) or engine.has_unfinished
    engine.abort(name)
    for given, message in (
        ({"prompts": "x", "prompt": "x"}, "prompts is given twice"),
        ({"prompts": "x", "lora_request": 1}, "generate has no lora_request: use load_adapter"),
        ({"prompts": "x", "stream": True}, "use AsyncEngine"),
        ({"prompts": "x", "no_such": 1}, r"generate\(prompts, params=None, .* unexpected keyword argument 'no_such'"),
        ({}, "missing a required argument: 'prompts'"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            ask(**given)
    with pytest.raises(InvalidValueError, match=r"\(prompt, .*request_id=None, .*too many positional"):
        engine.add_request("0", "x", SamplingParams())  # type: ignore[call-arg]


def test_a_constraint_in_the_forms_of_others(engine: Engine) -> None:
    params: Any = {"structured_outputs": {"choice": ["zebra", "gnu"]}, "max_tokens": 12}
    [[found]] = engine.generate("The animal is a", params)
    assert found.text in ("zebra", "gnu")
    content = engine.chat(FRANCE, SamplingParams(**params)).choices[0].message.content
    assert content in ("zebra", "gnu")
    with pytest.raises(InvalidSchemaError):
        engine.generate("x", {"regex": "["})


def test_an_engine_takes_the_arguments_of_others(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("DIR", {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "max_num_seqs": 4})
    assert (config.mesh.tensor, config.cache.memory_fraction, config.scheduler.max_num_seqs) == (2, 0.5, 4)
    config = config_of(None, {"model_path": "DIR", "tp_size": 2, "context_length": 64, "enforce_eager": True})
    assert (config.model.path, config.mesh.tensor, config.model.max_model_len) == ("DIR", 2, 64)
    assert "enforce_eager has no effect" in caplog.text
    config = config_of("DIR", {"enable_lora": True, "max_loras": 3, "max_lora_rank": 32, "disable_radix_cache": False})
    assert (config.lora.slots, config.lora.max_rank, config.cache.prefix_cache) == (3, 32, True)
    assert config_of("DIR", {"enable_lora": False}).lora.slots == 0
    config = config_of("DIR", {"dtype": "bfloat16", "kv_cache_dtype": "int8", "disable_log_stats": False})
    assert (config.model.dtype, config.cache.dtype, config.logging.stats_interval) == ("bfloat16", "int8", 10.0)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    config = config_of("DIR", {"speculative_config": drafts})
    assert (config.speculation.method, config.speculation.num_speculative_tokens) == ("ngram", 3)
    values = {"dtype": "half", "load_format": "dummy", "quantization": "awq", "device": "cuda", "log_level": "DEBUG"}
    config = config_of("DIR", values | {"max_num_seqs": None, "hf_overrides": {}, "pooler_config": None})
    assert (config.model.dtype, config.model.load_format, config.model.quantization) == ("float16", "random", "auto")
    assert (config.mesh.device, config.logging.level, config.scheduler.max_num_seqs) == ("gpu", "debug", "auto")
    config = config_of("DIR", {"quantization": "none", "compile_cache": None})
    assert (config.model.quantization, config.runtime.compile_cache) == ("none", None)
    for keys, message in (
        ({"load_format": "tensorizer"}, "model.load_format: should be 'auto', 'safetensors' or 'random'"),
        ({"logits_processors": [str]}, "logits_processors is no argument"),
        ({"hf_overrides": {"architectures": []}}, "hf_overrides is no argument"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is no argument"),
        ({"tensor": 1, "tensor_parallel_size": 2}, "given twice"),
        ({"enable_lora": True}, "enable_lora is no argument"),
        ({"tensor_paralel_size": 2}, "unknown argument tensor_paralel_size"),
        ({"model_path": "OTHER"}, "two models"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_of("DIR", keys)


def test_embeddings_in_process(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    texts = ["Paris", "the capital of France"]
    expected = [np.frombuffer(each[0].embedding or b"", "<f4") for each in engine.generate(texts, EMBED)]
    found = engine.embed(texts, use_tqdm=True)
    assert "2/2" in capfd.readouterr().err
    assert found.dtype == np.float32 and found.shape == (2, engine.info.embedding_size)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(
        engine.embed([[5, 6], [7]], dimensions=4)[1], engine.embed([7], dimensions=4)[0], atol=1e-5
    )
    for ask in (lambda: engine.score("a", ["b"]), lambda: engine.rerank("a", ["b"]), lambda: engine.classify("a")):
        with pytest.raises(InvalidValueError, match="does not support"):
            ask()
    with pytest.raises(InvalidValueError, match="no field dimension"):
        engine.embed("a", dimension=4)
    with pytest.raises(InvalidValueError, match="input"):
        engine.embed([])
