"""Pictures over every API: one prompt, one picture for the engine, one count of tokens; and what is refused by name."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import numpy as np
import ollama
import openai
import pytest
from PIL import Image

from jaxserve.api.generate.pictures import PicturePart, joined_content, taken_out
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.media.images import patches
from jaxserve.media.processor import PictureSettings
from jaxserve.types.picture import Picture, PictureInfo, check_pictures
from tests.api.conftest import LiveServer
from tests.api.fakes import FakeLink, fake_engine
from tests.media.pictures import encoded, pixels, png
from tests.waiting import LAST_RESORT

PAD, START, END = 2041, 2039, 2040  # special tokens of the demo tokenizer
INFO = PictureInfo(
    kind="qwen3_vl",
    patch_size=4,
    merge_size=2,
    width=48,
    token_id=PAD,
    max_tokens=64,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
SETTINGS = PictureSettings(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)
TEMPLATE = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' -%}
<|fim_prefix|><|fim_middle|><|fim_suffix|>{%- else -%}{{ part.text }}{%- endif %}{% endfor %}{% endif -%}
{%- for call in m.tool_calls or [] -%}<tool_call>{{ call.function.name }}</tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}<|im_start|>assistant
"""
FIRST, SECOND = png(40, 24, seed=1), png(24, 64, seed=2)
TEXT = base64.b64encode(FIRST).decode()
URL = f"data:image/png;base64,{TEXT}"
SECOND_URL = "DATA:image;base64," + base64.encodebytes(SECOND).decode()
TOKENS = 15  # of FIRST: 5 x 3


class PictureServer(LiveServer):
    """A server whose model takes pictures."""

    def make_engine(self) -> AsyncEngine:
        link = FakeLink()
        assert self.store is not None
        directory = self.store.parent / "model"
        directory.mkdir(exist_ok=True)
        sizes = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
        (directory / "preprocessor_config.json").write_text(json.dumps(sizes))
        link.info = msgspec.structs.replace(link.info, pictures=INFO, model_path=str(directory))
        engine, self.link = fake_engine(self.config, link)
        return engine


def config(**media: Any) -> Config:
    return Config.parse({"model": {"chat_template": TEMPLATE}, "media": media})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PictureServer]:
    with PictureServer(config(max_items=3), store=tmp_path_factory.mktemp("pictures") / "store") as server:
        yield server


@pytest.fixture
def server(shared: PictureServer) -> Iterator[PictureServer]:
    yield shared
    shared.link.seen.clear()


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": list(parts)}], **more}


def image(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


LOOK = {"type": "text", "text": "look"}
MESSAGE_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}}
ITEM = {"role": "user", "content": [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "look"}]}
# route -> body of the same prompt, where its usage stands, and the route that counts its tokens
SAME: dict[str, tuple[dict[str, Any], Callable[[Any], int], str | None]] = {
    "/v1/chat/completions": (chat(image(), LOOK), lambda found: found["usage"]["prompt_tokens"], "/tokenize"),
    "/v1/responses": (
        {"model": "demo", "max_output_tokens": 4, "input": [ITEM]},
        lambda found: found["usage"]["input_tokens"],
        "/v1/responses/input_tokens",
    ),
    "/v1/messages": (
        {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": [MESSAGE_IMAGE, LOOK]}]},
        lambda found: found["usage"]["input_tokens"] + found["usage"].get("cache_read_input_tokens", 0),
        "/v1/messages/count_tokens",
    ),
    "/api/chat": (
        {"model": "demo", "stream": False, "messages": [{"role": "user", "content": "look", "images": [TEXT]}]},
        lambda found: found["prompt_eval_count"],
        None,
    ),
    "/api/generate": (
        {"model": "demo", "stream": False, "prompt": "look", "images": [URL]},
        lambda found: found["prompt_eval_count"],
        None,
    ),
}


def sent(server: LiveServer) -> tuple[list[int], tuple[Picture, ...]]:
    """What the engine got last: its prompt and pictures, which fit each other."""
    request = server.link.seen[-1]
    check_pictures(request.pictures, INFO, request.prompt_token_ids)
    return request.prompt_token_ids, request.pictures


@pytest.mark.parametrize("route", SAME)
def test_every_api_sends_the_engine_one_picture_and_counts_it(server: PictureServer, route: str) -> None:
    body, used, counter = SAME[route]
    answer = server.post(route, body)
    assert answer.status_code == 200, answer.text
    prompt, (picture,) = sent(server)
    assert picture.num_tokens == TOKENS and picture.grid == (1, 10, 6)
    assert prompt[picture.start - 1] == START and prompt[picture.end] == END
    assert picture.patches == patches(FIRST, SETTINGS, 10**6).tobytes()
    assert used(answer.json()) == len(prompt) and prompt.count(PAD) == TOKENS
    if counter is not None:
        counted = server.post(counter, body).json()
        assert counted.get("count", counted.get("input_tokens")) == len(prompt)


def test_all_apis_make_one_prompt_and_one_digest(server: PictureServer) -> None:
    found = set()
    for route, (body, _, _) in SAME.items():
        assert server.post(route, body).status_code == 200
        prompt, (picture,) = sent(server)
        found.add((tuple(prompt), picture.digest))
    assert len(found) == 1


def test_several_pictures_keep_their_places(server: PictureServer) -> None:
    """Two at the ends and one between texts; other spellings of a data: URL; an equal one has an equal digest."""
    parts = [image(SECOND_URL), LOOK, image(), {"type": "input_image", "image_url": SECOND_URL, "detail": "high"}]
    assert server.post("/v1/chat/completions", chat(*parts)).status_code == 200
    _, pictures = sent(server)
    assert [each.num_tokens for each in pictures] == [24, 15, 24]
    assert pictures[0].digest == pictures[2].digest != pictures[1].digest


def test_pictures_in_results_of_tools(server: PictureServer) -> None:
    call = {"id": "callcall1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "callcall1", "content": [LOOK, image()]},
    ]
    assert server.post("/v1/chat/completions", chat() | {"messages": messages}).status_code == 200
    first = sent(server)
    use = {"type": "tool_use", "id": "callcall1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "callcall1", "content": [LOOK, MESSAGE_IMAGE]}
    body = {"model": "demo", "max_tokens": 4} | {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    }
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    assert sent(server) == first
    output = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": URL}]
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "callcall1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "callcall1", "output": output},
    ]
    answer = server.post("/v1/responses", {"model": "demo", "max_output_tokens": 4, "input": items})
    assert answer.status_code == 200, answer.text
    assert sent(server) == first


CACHED = {"cache_control": {"type": "ephemeral"}}
READ_CALL = {"type": "tool_use", "id": "toolu_01", "name": "Read", "input": {"file_path": "/tmp/a.png"}}
VIEW = {"name": "view_image", "arguments": '{"path":"/tmp/a.png"}', "call_id": "call_1"}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "additionalProperties": False}
# client -> route, and a body in the shape that it sends; each has one picture
CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI": (
        "/v1/chat/completions",
        chat({"type": "text", "text": "What is this?"}, image(), stream=True, stream_options={"include_usage": True}),
    ),
    "Open WebUI by Ollama": (
        "/api/chat",
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "What is this?", "images": [TEXT]}],
            "options": {"num_predict": 4},
            "stream": True,
        },
    ),
    "Open WebUI, a picture alone": (
        "/v1/chat/completions",
        chat({"type": "text", "text": ""}, image(), stream=True, stream_options={"include_usage": True}),
    ),
    "Open WebUI by Ollama, a picture alone": (  # a message without text has no content
        "/api/chat",
        {"model": "demo", "messages": [{"role": "user", "images": [TEXT]}], "options": {"num_predict": 4}},
    ),
    "LangChain's ChatOpenAI": (
        "/v1/chat/completions",
        chat({"type": "text", "text": "Describe it."}, image(detail="auto"), temperature=0.7, n=1, stream=False),
    ),
    "LangChain's ChatAnthropic": (
        "/v1/messages?beta=true",
        {
            "model": "demo",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Describe it."}, MESSAGE_IMAGE]}],
        },
    ),
    "Claude Code, pasted": (
        "/v1/messages?beta=true",
        {
            "model": "demo",
            "max_tokens": 4,
            "stream": True,
            "system": [{"type": "text", "text": "You are an agent.", **CACHED}],
            "metadata": {"user_id": "user_1_account__session_2"},
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "[Image #1] what is this?"}, MESSAGE_IMAGE | CACHED],
                }
            ],
        },
    ),
    "Claude Code, read by a tool": (
        "/v1/messages?beta=true",
        {
            "model": "demo",
            "max_tokens": 4,
            "stream": True,
            "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA}],
            "messages": [
                {"role": "user", "content": "Look at /tmp/a.png"},
                {"role": "assistant", "content": [{"type": "text", "text": "I look."}, READ_CALL]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "toolu_01", "content": [MESSAGE_IMAGE]}],
                },
            ],
        },
    ),
    "Codex, pasted": (
        "/v1/responses",
        {
            "model": "demo",
            "instructions": "You are an agent.",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "<image name=[Image #1]>"},
                        {"type": "input_image", "image_url": URL, "detail": "high"},
                        {"type": "input_text", "text": "</image>"},
                        {"type": "input_text", "text": "What is this?"},
                    ],
                }
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": False,
            "stream": True,
            "include": [],
            "prompt_cache_key": "0199",
        },
    ),
    "Codex, view_image": (
        "/v1/responses",
        {
            "model": "demo",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
                {"type": "function_call", **VIEW},
                {
                    "type": "function_call_output",
                    "call_id": "call_1",
                    "output": [{"type": "input_image", "image_url": URL, "detail": "high"}],
                },
            ],
            "tools": [{"type": "function", "name": "view_image", "strict": False, "parameters": SCHEMA}],
            "store": False,
            "stream": True,
        },
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_the_bodies_of_clients_reach_the_engine_with_their_picture(server: PictureServer, client: str) -> None:
    route, body = CLIENTS[client]
    answer = server.post(route, body)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    prompt, (picture,) = sent(server)
    assert picture.num_tokens == TOKENS == prompt.count(PAD)


def test_a_template_without_pictures_of_tools_gets_them_in_a_users_message() -> None:
    pictures = [PicturePart("a", "p"), PicturePart("b", "q")]
    messages = [
        {"role": "tool", "content": [{"type": "text", "text": "x"}, pictures[0]]},
        {"role": "tool", "content": [pictures[1]]},
        {"role": "user", "content": "next"},
    ]
    shown, found = taken_out(messages, lambda: False)
    assert found == pictures
    assert [message["role"] for message in shown] == ["tool", "tool", "user", "user"]
    assert shown[2]["content"] == [{"type": "image"}] * 2
    assert taken_out(messages, lambda: True)[0][1]["content"] == [{"type": "image"}]


def test_neighbouring_texts_are_joined() -> None:
    picture = PicturePart("a", "p")
    assert joined_content(["a", "", "b"]) == "a\nb"
    assert joined_content(["a", "b", picture, ""]) == [{"type": "text", "text": "a\nb"}, picture]


def test_a_placeholder_in_a_users_text_is_text(server: PictureServer) -> None:
    text = {"type": "text", "text": "<|fim_middle|> <|fim_prefix|>"}
    assert server.post("/v1/chat/completions", chat(text, image(), text)).status_code == 200
    prompt, _ = sent(server)
    assert prompt.count(PAD) == TOKENS and prompt.count(START) == 1


def test_detail_and_areas_change_the_picture(server: PictureServer) -> None:
    """A part may lower the area, which is in the digest, and not raise it over the server's."""
    assert server.post("/v1/chat/completions", chat(image() | {"max_pixels": 512})).status_code == 200
    assert sent(server)[1][0].num_tokens == 6
    answer = server.post("/v1/chat/completions", chat(image() | {"max_pixels": 10**6}))
    assert answer.status_code == 400 and "max_pixels" in answer.json()["error"]["message"]


SVG = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a URL": ("/v1/chat/completions", chat(image("https://example.org/a.png")), "media.allowed_hosts"),
    "a file": ("/v1/chat/completions", chat(image("file:///etc/passwd")), "data: URL"),
    "data without base64": ("/v1/chat/completions", chat(image("data:image/png,abc")), "only base64"),
    "no base64": ("/v1/chat/completions", chat(image("data:image/png;base64,*secret*")), "no valid base64"),
    "SVG": ("/v1/chat/completions", chat(image(f"data:image/png;base64,{SVG}")), "use PNG, JPEG, WebP or GIF"),
    "too many": ("/v1/chat/completions", chat(*[image()] * 4), "At most 3 image"),
    "of the system": (
        "/v1/chat/completions",
        chat() | {"messages": [{"role": "system", "content": [image()]}]},
        "user",
    ),
    "of the assistant": (
        "/v1/messages",
        {"model": "demo", "max_tokens": 4, "messages": [{"role": "assistant", "content": [MESSAGE_IMAGE]}]},
        "user messages",
    ),
    "file_id of chat": ("/v1/chat/completions", chat({"type": "image_url", "file_id": "file-1"}), "file_id"),
    "no url": ("/v1/chat/completions", chat({"type": "image_url"}), "image_url is missing"),
    "audio": ("/v1/chat/completions", chat({"type": "input_audio", "input_audio": {}}), "text and images"),
    "input_ids": ("/v1/chat/completions", chat(image(), input_ids=[1]), "input_ids"),
    "truncation": ("/v1/chat/completions", chat(image(), truncate_prompt_tokens=5), "truncate_prompt_tokens"),
    "beams": ("/v1/chat/completions", chat(image(), use_beam_search=True, n=2), "use_beam_search"),
    "file_id of responses": (
        "/v1/responses",
        {"model": "demo", "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
        "file_id",
    ),
    "instructions": ("/v1/responses", {"model": "demo", "input": "a", "instructions": [ITEM]}, "instructions"),
    "a source that is a file": (
        "/v1/messages",
        {"model": "demo", "max_tokens": 4}
        | {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
        "base64",
    ),
    "raw": ("/api/generate", {"model": "demo", "prompt": "a", "raw": True, "images": [TEXT]}, "images"),
    "of Ollama's system": (
        "/api/chat",
        {"model": "demo", "messages": [{"role": "system", "content": "a", "images": [TEXT]}]},
        "images",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(
    server: PictureServer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The error names the part, and neither it nor the log has the data of a picture."""
    route, body, words = REFUSED[name]
    with caplog.at_level(logging.DEBUG):
        answer = server.post(route, body)
    assert answer.status_code == 400, answer.text
    assert words in answer.text
    assert not server.link.seen
    for secret in (TEXT[20:60], SVG[:20], "*secret*"):
        assert secret not in caplog.text and secret not in answer.text


def test_memory_for_pictures_that_is_full_is_a_503(tmp_path: Path) -> None:
    with PictureServer(config(memory=1000), store=tmp_path / "store") as server:
        answer = server.post("/v1/chat/completions", chat(image()))
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "media_memory_full"
        assert server.post("/v1/chat/completions", chat(LOOK)).status_code == 200


def test_the_models_pages_say_that_it_sees(server: PictureServer) -> None:
    assert server.http.get("/model_info").json()["has_image_understanding"] is True
    assert "vision" in server.post("/api/show", {"model": "demo"}).json()["capabilities"]


def test_the_sdks_send_pictures_and_stream(server: PictureServer) -> None:
    """openai's chat and Responses, anthropic's and ollama's, each over the socket."""
    with server.client.chat.completions.create(**chat(image(), LOOK), stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    expected = sent(server)
    with server.client.responses.stream(model="demo", input=[ITEM]) as events:
        assert events.get_final_response().usage.input_tokens == len(expected[0])
    assert sent(server) == expected
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=LAST_RESORT)
    said: list[Any] = [{"role": "user", "content": [MESSAGE_IMAGE, LOOK]}]
    with claude, claude.messages.stream(model="demo", max_tokens=4, messages=said) as events:
        assert events.get_final_text()
    assert sent(server) == expected
    client = ollama.Client(host=server.url, timeout=LAST_RESORT)
    given: list[Any] = [{"role": "user", "content": "look", "images": [FIRST]}]
    try:
        assert list(client.chat(model="demo", messages=given, stream=True))[-1].done
    finally:
        client.close()
    assert sent(server) == expected


def test_a_batch_reads_pictures(server: PictureServer) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat(image(), LOOK)}
    bad = line | {"custom_id": "b", "body": chat(image(f"data:image/png;base64,{SVG}"))}
    lines = "\n".join(map(json.dumps, (line, bad))).encode()
    client: openai.OpenAI = server.client
    file = client.files.create(file=("lines.jsonl", io.BytesIO(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    server.run(_batch_ended(server, batch.id))
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts is not None and batch.output_file_id and batch.error_file_id
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    usage = json.loads(client.files.content(batch.output_file_id).text)["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == len(sent(server)[0])
    errors = client.files.content(batch.error_file_id).text
    assert "PNG, JPEG" in errors and SVG[:20] not in errors


async def _batch_ended(server: PictureServer, batch_id: str) -> None:
    for _ in range(int(LAST_RESORT * 20)):
        if (await asyncio.to_thread(server.client.batches.retrieve, batch_id)).status in ("completed", "failed"):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the batch did not end")


def test_a_picture_of_every_format_reaches_the_engine(server: PictureServer) -> None:
    whole = Image.fromarray(pixels(32, 32))
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        text = base64.b64encode(encoded(whole, kind)).decode()
        assert server.post("/v1/chat/completions", chat(image(f"data:;base64,{text}"))).status_code == 200
        (picture,) = sent(server)[1]
        assert np.frombuffer(picture.patches, np.uint8).size == picture.num_patches * INFO.width
