"""Responses that are kept, chained, referred to and deleted; whose they are; no store, a full disk, a restart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.config import Config
from jaxserve.store import responses as response_rows
from tests.api.conftest import LiveServer, reply_with
from tests.store.disks import FailingDisk
from tests.waiting import wait_until

from .conftest import create, not_found, prompt_of, refused, wait

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_response_is_kept_as_it_was_answered(client: Any) -> None:
    made = create(client, "Hello", metadata={"a": "b"}, instructions="Be short")
    assert made.store is True and made.status == "completed"
    kept = client.responses.retrieve(made.id)
    assert kept.to_dict() == made.to_dict()
    with client.responses.stream(model="demo", input="Hello") as stream:
        streamed = stream.get_final_response()
    assert client.responses.retrieve(streamed.id).output[0].id == streamed.output[0].id


def test_the_response_is_there_before_its_final_event(client: Any) -> None:
    for event in create(client, "Hello", stream=True):
        if event.type == "response.completed":
            assert create(client, "And?", previous_response_id=event.response.id).previous_response_id
            return
    raise AssertionError("no final event")


def test_store_false_keeps_nothing(client: Any) -> None:
    made = create(client, "Hello", store=False)
    assert made.store is False
    refused(lambda: client.responses.retrieve(made.id), 404, not_found(made.id))
    text = f"Previous response with id '{made.id}' not found."
    param, code = "previous_response_id", "previous_response_not_found"
    refused(lambda: create(client, "x", previous_response_id=made.id), 400, text, param, code)


def test_a_chain_has_every_item_of_every_turn(client: Any, server: LiveServer) -> None:
    reply_with(server, "I look.\n" + CALL)
    first = create(client, "Weather?", tools=[WEATHER])
    call = next(item for item in first.output if item.type == "function_call")
    reply_with(server, "Sunny")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    second = create(client, [output], previous_response_id=first.id)
    assert second.output_text == "Sunny"
    for text in ("Weather?", "I look.", "Paris", "18 degrees"):
        assert text in prompt_of(server)
    create(client, "Thanks", previous_response_id=second.id)
    chained = server.link.seen[-1].prompt_token_ids
    sent = [{"role": "user", "content": "Weather?"}, *[item.to_dict() for item in first.output], output]
    whole = [*sent, *[item.to_dict() for item in second.output], {"role": "user", "content": "Thanks"}]
    create(client, whole)
    assert server.link.seen[-1].prompt_token_ids == chained


def test_reasoning_stays_in_the_chain_and_instructions_do_not(client: Any, server: LiveServer) -> None:
    server.call(lambda: None)
    first = create(client, "One", instructions="SPEAK LATIN")
    assert "SPEAK LATIN" in prompt_of(server)
    create(client, "Two", previous_response_id=first.id)
    assert "SPEAK LATIN" not in prompt_of(server) and "One" in prompt_of(server)


def test_references_name_stored_items(client: Any, server: LiveServer) -> None:
    reply_with(server, "remember this")
    first = create(client, "Hello")
    reference = {"type": "item_reference", "id": first.output[-1].id}
    second = create(client, [reference, {"role": "user", "content": "Go on"}])
    assert "remember this" in prompt_of(server)
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert listed[0].id == first.output[-1].id and listed[0].type == "message"
    unknown = {"type": "item_reference", "id": "msg_unknown"}
    refused(lambda: create(client, ["x", unknown][1:]), 400, "Item with id 'msg_unknown' not found.", "input.0")


def test_input_items(client: Any) -> None:
    sent = [{"role": "user", "content": f"line {number}"} for number in range(7)]
    made = create(client, [*sent, {"role": "assistant", "content": "so"}])
    ids: list[str] = []
    for item in client.responses.input_items.list(made.id, limit=3, order="asc"):
        ids.append(item.id)
        assert item.type == "message" and item.status == "completed"
    assert len(set(ids)) == 8
    assert [item.id for item in client.responses.input_items.list(made.id, limit=2)] == ids[::-1]
    text = client.responses.input_items.list(made.id, order="asc").data[0]
    assert (text.content[0].type, text.content[0].text) == ("input_text", "line 0")
    refused(lambda: client.responses.input_items.list("resp_none"), 404, not_found("resp_none"))
    for bad in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "none"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(made.id, **bad)


def test_delete(client: Any) -> None:
    first = create(client, "Hello")
    second = create(client, "More", previous_response_id=first.id)
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        refused(lambda call=call: call(first.id), 404, not_found(first.id))
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    text = f"Previous response with id '{first.id}' not found."
    for name in (first.id, second.id):
        refused(lambda name=name: create(client, "x", previous_response_id=name), 400, text)


def test_input_tokens_count_the_history(client: Any, server: LiveServer) -> None:
    first = create(client, "Hello")
    create(client, "More", previous_response_id=first.id)
    counted = client.responses.input_tokens.count(model="demo", input="More", previous_response_id=first.id)
    assert counted.input_tokens == len(server.link.seen[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("keys", "text", "param"),
    [
        ({"background": True, "store": False}, "background can only be used when `store` is true", "background"),
        ({"conversation": "conv_x", "store": False}, "conversation can only be used when `store` is true", None),
        (
            {"conversation": "conv_x", "previous_response_id": "resp_x"},
            "previous_response_id and conversation cannot be used together.",
            "previous_response_id",
        ),
    ],
)
def test_what_does_not_go_together(client: Any, keys: dict[str, Any], text: str, param: str | None) -> None:
    refused(lambda: create(client, "x", **keys), 400, text, param)


def test_cancel_of_a_synchronous_response(client: Any) -> None:
    made = create(client, "Hello")
    refused(lambda: client.responses.cancel(made.id), 400, "Cannot cancel a synchronous response.")
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        list(client.responses.retrieve(made.id, stream=True))


def test_include_of_a_stored_response(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"reasoning_parser": "qwen3"}})
    with LiveServer(config, store=tmp_path) as server:
        reply_with(server, "<think>\nHm.\n</think>\n\nParis")
        made, encrypted = create(server.client, "x"), "reasoning.encrypted_content"
        assert made.output[0].encrypted_content is None
        found = server.client.responses.retrieve(made.id, include=[encrypted, "message.output_text.logprobs"])
        plain = server.app.state.server.encryption.decrypt(found.output[0].encrypted_content, "demo", "")
        assert plain == made.output[0].content[0].text and found.output[1] == made.output[1]
        assert server.http.get(f"/v1/responses/{made.id}?include={encrypted}").json()["output"][0]["encrypted_content"]
        assert server.client.responses.retrieve(made.id).to_dict() == made.to_dict()
        for wrong in ("include=nothing", "include[]=nothing", f"include={encrypted}&stream=true"):
            answer = server.http.get(f"/v1/responses/{made.id}?{wrong}")
            assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("include"), answer.text


def test_responses_in_a_batch(client: Any) -> None:
    first = create(client, "Hello")
    bodies = [{"model": "demo", "input": "Hi"}, {"model": "demo", "input": "Hi", "previous_response_id": first.id}]
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/responses", "body": body} for n, body in enumerate(bodies)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"), "the batch never ended")
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    for line in client.files.content(batch.output_file_id).read().splitlines():
        body = json.loads(line)["response"]["body"]
        assert client.responses.retrieve(body["id"]).to_dict()["output"] == body["output"]


def test_other_keys_ids_are_unknown(tmp_path: Path) -> None:
    keys = [{"name": name, "value": f"key-of-{name}-0123456789"} for name in ("alice", "bob")]
    with LiveServer(Config().replace(server={"keys": keys}), store=tmp_path / "store") as server:
        clients = [
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key["value"], max_retries=0, timeout=30) for key in keys
        ]
        alice: Any = clients[0]
        bob: Any = clients[1]
        made = create(alice, "secret")
        chat = alice.conversations.create(items=[{"role": "user", "content": "secret"}])
        item = alice.conversations.items.list(chat.id).data[0].id
        stream = list(create(alice, "secret", background=True, stream=True))[-1].response.id

        def answers(response: str, followed: str, conversation: str, kept: str) -> list[tuple[int, str]]:
            """What bob gets for each form in which an id can be sent, with the id left out."""
            calls: list[Callable[[], Any]] = [
                lambda: bob.responses.retrieve(response),
                lambda: bob.responses.retrieve(followed, stream=True),
                lambda: bob.responses.delete(response),
                lambda: bob.responses.cancel(response),
                lambda: bob.responses.cancel(followed),
                lambda: bob.responses.input_items.list(response),
                lambda: create(bob, "x", previous_response_id=response),
                lambda: bob.responses.input_tokens.count(model="demo", input="x", previous_response_id=response),
                lambda: create(bob, [{"type": "item_reference", "id": kept}]),
                lambda: create(bob, "x", conversation=conversation),
                lambda: bob.conversations.retrieve(conversation),
                lambda: bob.conversations.update(conversation, metadata={}),
                lambda: bob.conversations.delete(conversation),
                lambda: bob.conversations.items.list(conversation),
                lambda: bob.conversations.items.create(conversation, items=[{"role": "user", "content": "x"}]),
                lambda: bob.conversations.items.retrieve(kept, conversation_id=conversation),
                lambda: bob.conversations.items.delete(kept, conversation_id=conversation),
            ]
            found = []
            for call in calls:
                with pytest.raises(openai.APIStatusError) as caught:
                    call()
                text = caught.value.response.text
                for name in (response, followed, conversation, kept):
                    text = text.replace(name, "ID")
                found.append((caught.value.status_code, text))
            return found

        server.call(server.link.hold.clear)  # a locked conversation is as unknown as any
        running = create(alice, "x", background=True, conversation=chat.id)
        foreign = answers(made.id, stream, chat.id, item)
        server.call(server.link.hold.set)
        wait(alice, running)
        assert foreign == answers("resp_none", "resp_nil", "conv_none", "msg_none")
        assert {status for status, _ in foreign} == {404, 400}
        assert alice.responses.retrieve(made.id).status == "completed"
        assert len(alice.conversations.items.list(chat.id).data) == 3
        for each in clients:
            each.close()


def test_without_a_store(shared_server: LiveServer) -> None:
    client = shared_server.client
    made = create(client, "Hello", store=True)
    assert made.store is False and made.status == "completed"
    text = "background can only be used when `store` is true"
    refused(lambda: create(client, "x", background=True), 400, text, "background")
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, "x", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"
    refused(lambda: create(client, "x", conversation="conv_x"), 404, "Conversation with id 'conv_x' not found.")
    for call in (lambda: client.responses.retrieve(made.id), lambda: client.conversations.create()):
        refused(call, 503, "This server was started without a store.")


def test_a_full_disk(tmp_path: Path) -> None:
    disk = FailingDisk()
    with LiveServer(store=tmp_path / "store", disk=disk) as server:
        client = server.client
        first = create(client, "Hello")
        server.call(server.link.hold.clear)
        running = create(client, "Hello", background=True, stream=True)
        name = next(running).response.id
        wait(client, next(running).response, "in_progress")
        disk.failing.add("commit")
        server.call(server.link.hold.set)
        for keys in ({}, {"previous_response_id": first.id}, {"background": True}):
            with pytest.raises(openai.InternalServerError) as caught:
                create(client, "x", **keys)
            assert (caught.value.status_code, caught.value.code) == (507, "insufficient_storage")
        events = []
        with pytest.raises(openai.APIError, match="disk is full"):
            events.extend(create(client, "x", stream=True))
        assert create(client, "x", store=False).status == "completed"
        assert client.responses.retrieve(name).status == "in_progress"
        disk.failing.clear()
        assert list(running)[-1].type == "response.completed"
        assert client.responses.retrieve(name).status == "completed"
        assert create(client, "x", previous_response_id=first.id).status == "completed"


def test_a_restart_finds_everything(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with LiveServer(store=store) as server:
        client = server.client
        first = create(client, "Hello")
        chat = client.conversations.create(items=[{"role": "user", "content": "hi"}])
        server.call(server.link.hold.clear)
        unseen = create(client, "unseen", background=True, conversation=chat.id)
        seen = create(client, "seen", background=True, stream=True)
        name = next(seen).response.id
        for _ in range(2):
            next(seen)
        wait(client, unseen, "in_progress")
    with LiveServer(store=store) as server:
        client = server.client
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
        assert wait(client, unseen).status == "completed"
        assert len(client.conversations.items.list(chat.id).data) == 3
        failed = client.responses.retrieve(name)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        last = list(client.responses.retrieve(name, stream=True, starting_after=2))[-1]
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert create(client, "More", previous_response_id=first.id).status == "completed"


def test_a_chain_that_is_too_long(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_rows, "MAX_TURNS", 2)
    first = create(client, "1")
    second = create(client, "2", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="at most 2") as caught:
        create(client, "3", previous_response_id=second.id)
    assert caught.value.param == "previous_response_id"
