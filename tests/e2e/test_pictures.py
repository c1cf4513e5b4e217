"""Pictures from a client's body to the tower and back, with a tiny Qwen3-VL behind a real socket and the real clients.

Its tokenizer has one character for each token id, and the pictures need no resizing. So the prompts and patches are
those of the goldens, and the answers must be transformers'.
"""

from __future__ import annotations

import base64
import io
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import numpy as np
import ollama
import openai
import pytest
import tokenizers
from PIL import Image

from jaxserve import Engine, launch_server
from jaxserve.library.serving import RunningServer
from tests.faults.helpers import engine_process
from tests.models.picture_cases import END, MERGE, PAD, START, VISION, Pixels, prompt, prompts_of
from tests.models.test_pictures import GOLDENS, write_case
from tests.quick import quick_processes, quick_programs
from tests.scrape import values
from tests.waiting import LAST_RESORT, wait_until

CASE = "qwen3_vl_pictures"
OTHERS = "qwen2_5_vl_pictures", "qwen3_5_pictures"  # the second has recurrent states
PAGE = 8
KEYS: dict[str, Any] = {
    "served_name": "tiny",
    "dtype": "float32",
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "max_model_len": 512,
    "page_size": PAGE,
    "num_pages": 256,
    "wait_for_programs": True,
}
MARKS = {0: "<unk>", 2: "<end>", 59: "<video>", PAD: "<picture>", START: "<start>", END: "<stop>"}
LETTERS = dict(zip((i for i in range(64) if i not in MARKS), string.ascii_letters + string.digits, strict=False))
TEMPLATE = """{%- for m in messages -%}{%- if m.content is string -%}{{ m.content }}{%- else -%}
{%- for part in m.content -%}{%- if part.type == 'image' -%}<start><picture><stop>{%- else -%}{{ part.text }}
{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"""


def text_of(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def write_model(case: str, directory: Path) -> Path:
    """The checkpoint of the goldens with a tokenizer, a chat template and the sizes of pictures."""
    write_case(case, directory)
    vocabulary = {text: i for i, text in (MARKS | LETTERS).items()}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    backend.decoder = tokenizers.decoders.Fuse()  # type: ignore[assignment]
    backend.add_special_tokens(list(MARKS.values()))
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "unk_token": "<unk>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 16384}, "patch_size": VISION["patch_size"]}
    (directory / "preprocessor_config.json").write_text(json.dumps(sizes))
    return directory


def png_of(picture: Pixels) -> bytes:
    """The picture whose patches are these: the inverse of `patches_of`."""
    size, (_, rows, columns) = VISION["patch_size"], picture.grid
    patches = np.frombuffer(picture.patches, np.uint8)
    blocks = patches.reshape(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, size, size)
    pixels = blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * size, columns * size, 3)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def parts_of(name: str) -> list[str | bytes]:
    """The texts and the PNGs of a prompt, in order."""
    ids, pictures = prompt(name)
    found: list[str | bytes] = []
    done = 0
    for picture in pictures:
        found += [text_of(ids[done : picture.start - 1]), png_of(picture)]
        done = picture.start + picture.num_tokens + 1
    return [part for part in [*found, text_of(ids[done:])] if part]


def golden(name: str, case: str = CASE) -> str:
    return text_of(np.load(GOLDENS / f"{case}.npz")[f"{name}_greedy"].tolist())


def chat_parts(parts: list[str | bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(part).decode()}"}}
        for part in parts
    ]


def claude_parts(parts: list[str | bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            found.append({"type": "text", "text": part})
        else:
            data = base64.b64encode(part).decode()
            found.append({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}})
    return found


def chat(parts: list[str | bytes], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": chat_parts(parts)}]
    return {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0} | more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(CASE, tmp_path_factory.mktemp(CASE))


@pytest.fixture(scope="module")
def server(model: Path, compile_cache: str) -> Iterator[RunningServer]:
    with quick_processes(), launch_server(str(model), compile_cache=compile_cache, **KEYS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=LAST_RESORT) as client:
        yield client


def numbers(server: RunningServer) -> dict[str, float]:
    return values(httpx2.get(f"{server.url}/metrics", timeout=LAST_RESORT).text)


def encoded(server: RunningServer) -> float:
    return numbers(server)["jaxserve:images_encoded"]


def post(server: RunningServer, route: str, body: dict[str, Any]) -> Any:
    answer = httpx2.post(f"{server.url}{route}", json=body, timeout=LAST_RESORT)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", ["one", "two"])
def test_openais_client_gets_transformers_tokens(server: RunningServer, client: Any, name: str) -> None:
    body = chat(parts_of(name))
    whole = client.chat.completions.create(**body)
    assert whole.choices[0].message.content == golden(name)
    with client.chat.completions.create(**body, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == golden(name)
    ids, _ = prompt(name)
    found = post(server, "/tokenize", {"model": "tiny", "messages": body["messages"]})
    assert found["count"] == whole.usage.prompt_tokens == len(ids)
    assert found["tokens"] == ids
    content = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in chat_parts(parts_of(name))
    ]
    items = [{"role": "user", "content": content}]
    response = client.responses.create(model="tiny", input=items, max_output_tokens=6, temperature=0)
    assert (response.output_text, response.usage.input_tokens) == (golden(name), len(ids))
    assert post(server, "/v1/responses/input_tokens", {"model": "tiny", "input": items})["input_tokens"] == len(ids)


@pytest.mark.parametrize("name", ["one", "two"])
def test_anthropics_client_gets_transformers_tokens(server: RunningServer, name: str) -> None:
    messages: list[Any] = [{"role": "user", "content": claude_parts(parts_of(name))}]
    keys: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "messages": messages}
    keys["extra_body"] = {"temperature": 0}  # which the newest client has no argument for
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=LAST_RESORT) as claude:
        whole = claude.messages.create(**keys)
        (block,) = whole.content
        assert block.type == "text" and block.text == golden(name)
        with claude.messages.stream(**keys) as events:
            assert events.get_final_text() == golden(name)
        counted = claude.messages.count_tokens(model="tiny", messages=messages).input_tokens
    used = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert counted == used == len(prompt(name)[0])


def test_ollamas_client_gets_the_same_tokens(server: RunningServer, client: Any) -> None:
    """Its pictures stand before the text of a message."""
    given = parts_of("one")
    (text,), (picture,) = given[:1], [part for part in given if isinstance(part, bytes)]
    expected = client.chat.completions.create(**chat([picture, text])).choices[0].message.content
    messages: list[Any] = [{"role": "user", "content": text, "images": [picture]}]
    own = ollama.Client(host=server.url, timeout=LAST_RESORT)
    options = {"temperature": 0, "num_predict": 6}
    try:
        assert own.chat(model="tiny", messages=messages, options=options).message.content == expected
        chunks = list(own.chat(model="tiny", messages=messages, options=options, stream=True))
    finally:
        own.close()
    assert "".join(chunk.message.content or "" for chunk in chunks) == expected
    counted = post(server, "/tokenize", {"model": "tiny", "messages": chat([picture, text])["messages"]})["count"]
    assert chunks[-1].prompt_eval_count == counted


def test_lines_of_a_batch_get_transformers_tokens(client: Any) -> None:
    names = ("one", "two")
    assert answers_of_a_batch(client, {name: chat(parts_of(name)) for name in names}) == {
        name: golden(name) for name in names
    }


def answers_of_a_batch(client: Any, bodies: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The texts that a batch of chats is answered with."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in bodies.items()
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", io.BytesIO(data)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch ends")
    output = client.files.content(client.batches.retrieve(batch.id).output_file_id).text
    answers = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, output.splitlines())}
    return {name: answer["choices"][0]["message"]["content"] for name, answer in answers.items()}


@pytest.mark.parametrize("alone", [False, True])
def test_open_webuis_bodies_are_one_prompt(server: RunningServer, client: Any, alone: bool) -> None:
    """Its text stands before the picture, for Ollama behind it. A picture alone has an empty text, or none."""
    given = parts_of("one")
    (picture,), text = [part for part in given if isinstance(part, bytes)], "" if alone else given[0]
    orders: tuple[list[str | bytes], ...] = ([text, picture], [picture, text])
    plain = [[part for part in order if part] for order in orders]
    expected = [client.chat.completions.create(**chat(parts)).choices[0].message.content for parts in plain]
    body = chat(orders[0], metadata={"chat": "1"}) | {"stream_options": {"include_usage": True}, "stream": True}
    with client.chat.completions.create(**body) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == expected[0]
    whole = chat(orders[0])
    assert post(server, "/v1/chat/completions", whole)["choices"][0]["message"]["content"] == expected[0]
    assert answers_of_a_batch(client, {"a": whole}) == {"a": expected[0]}
    message = {"role": "user", "images": [base64.b64encode(picture).decode()]} | ({} if alone else {"content": text})
    options = {"temperature": 0, "num_predict": 6}
    own = {"model": "tiny", "messages": [message], "options": options}
    assert post(server, "/api/chat", own | {"stream": False})["message"]["content"] == expected[1]
    answer = httpx2.post(f"{server.url}/api/chat", json=own | {"stream": True}, timeout=LAST_RESORT)
    assert "".join(json.loads(line)["message"]["content"] for line in answer.text.splitlines()) == expected[1]


def test_the_same_picture_is_found_and_another_of_its_size_is_not(server: RunningServer, client: Any) -> None:
    """The salt keeps the first request apart from those of other tests."""
    parts, salt = parts_of("one"), {"extra_body": {"cache_salt": "found"}}
    before = encoded(server)
    answers = [client.chat.completions.create(**chat(parts), **salt) for _ in range(2)]
    assert [answer.choices[0].message.content for answer in answers] == [golden("one")] * 2
    length = answers[0].usage.prompt_tokens
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached == [0, (length - 1) // PAGE * PAGE]
    assert encoded(server) == before + 1
    (picture,) = prompt("one")[1]
    other = picture._replace(patches=bytes(255 - value for value in picture.patches))
    parts = [png_of(other) if isinstance(part, bytes) else part for part in parts]
    answer = client.chat.completions.create(**chat(parts), **salt)
    assert answer.usage.prompt_tokens_details.cached_tokens == picture.start // PAGE * PAGE  # text and the start mark
    assert encoded(server) == before + 2


def test_a_killed_engine_goes_on_with_the_same_tokens(server: RunningServer, client: Any) -> None:
    """The API sends the pictures again. The new engine encodes them anew."""
    assert stream_over_a_kill(server, client, "two").startswith(golden("two"))


def stream_over_a_kill(server: RunningServer, client: Any, name: str) -> str:
    """The answer to a prompt, which is the same without a kill and with one after its first token."""
    keys: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}  # the kill must come before its end
    expected = client.chat.completions.create(**chat(parts_of(name), **keys)).choices[0].message.content
    restarts = server.launch.engine.restarts
    found = []
    with client.chat.completions.create(**chat(parts_of(name), **keys), stream=True) as stream:
        for chunk in stream:
            if not found:
                engine_process().kill()
            found += [choice.delta.content or "" for choice in chunk.choices]
    assert server.launch.engine.restarts == restarts + 1
    assert "".join(found) == expected
    return expected


def test_in_process_engines_answer_the_same(model: Path, compile_cache: str) -> None:
    with quick_programs(), Engine(str(model), compile_cache=compile_cache, **KEYS) as engine:
        for name in ("one", "two"):
            answer = engine.chat(chat(parts_of(name))["messages"], max_tokens=6, temperature=0)
            assert answer.choices[0].message.content == golden(name)


@pytest.mark.slow  # 35 s each; tests/models/test_pictures.py holds these models to transformers' rows and logits
@pytest.mark.parametrize("case", OTHERS)
def test_other_families_read_pictures_and_go_on_after_a_kill(case: str, tmp_path: Path, compile_cache: str) -> None:
    directory = write_model(case, tmp_path / case)
    with quick_processes(), launch_server(str(directory), compile_cache=compile_cache, **KEYS) as server:
        for name in prompts_of(case):
            body = chat(parts_of(name), ignore_eos=True, return_token_ids=True)
            choice = post(server, "/v1/chat/completions", body)["choices"][0]
            assert choice["token_ids"] == np.load(GOLDENS / f"{case}.npz")[f"{name}_greedy"].tolist(), name
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=LAST_RESORT) as client:
            for name in ("two", prompts_of(case)[-1]):
                stream_over_a_kill(server, client, name)
