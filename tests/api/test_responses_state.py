"""The durable state of Responses and Conversations: the official client over a real socket and a real SQLite file."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.config import Config
from jaxserve.store import responses as response_rows
from tests.store.disks import FailingDisk
from tests.waiting import wait_until

from .conftest import LiveServer, reply_with

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ENDED = ("completed", "failed", "cancelled", "incomplete")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(store=tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def server(live: LiveServer) -> Iterator[LiveServer]:
    script = live.link.script
    yield live
    live.call(live.link.hold.set)
    live.wait(lambda: not live.link.running and live.engine.num_live == 0, "requests were left behind")
    live.link.script, live.link.delay = script, 0.0
    live.link.seen.clear()


@pytest.fixture
def client(server: LiveServer) -> Any:
    return server.client


def create(client: Any, text: Any, **keys: Any) -> Any:
    return client.responses.create(model="demo", input=text, **keys)


def prompt_of(server: LiveServer) -> str:
    return server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids)


def wait(client: Any, response: Any, *until: str) -> Any:
    def reached() -> bool:
        return client.responses.retrieve(response.id).status in (until or ENDED)

    wait_until(reached, f"{response.id} never reached {until}")
    return client.responses.retrieve(response.id)


def refused(call: Callable[[], Any], status: int, text: str, param: str | None = None, code: Any = ...) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert (caught.value.status_code, caught.value.body["message"]) == (status, text)  # type: ignore[index]
    assert param in (None, caught.value.param) and code in (..., caught.value.code)


def not_found(response_id: str) -> str:
    return f"Response with id '{response_id}' not found."


# responses


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
        made, sealed = create(server.client, "x"), "reasoning.encrypted_content"
        assert made.output[0].encrypted_content is None
        found = server.client.responses.retrieve(made.id, include=[sealed, "message.output_text.logprobs"])
        plain = server.app.state.server.seal.open(found.output[0].encrypted_content, "demo", "")
        assert plain == made.output[0].content[0].text and found.output[1] == made.output[1]
        assert server.http.get(f"/v1/responses/{made.id}?include={sealed}").json()["output"][0]["encrypted_content"]
        assert server.client.responses.retrieve(made.id).to_dict() == made.to_dict()
        for wrong in ("include=nothing", "include[]=nothing", f"include={sealed}&stream=true"):
            answer = server.http.get(f"/v1/responses/{made.id}?{wrong}")
            assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("include"), answer.text


# conversations


def test_a_conversation_collects_the_turns(client: Any, server: LiveServer) -> None:
    first = {"type": "message", "role": "user", "content": "I am Ann"}
    made = client.conversations.create(items=[first], metadata={"topic": "x"})
    reply_with(server, "Hello Ann")
    answer = create(client, "Who am I?", conversation=made.id)
    assert answer.conversation.id == made.id
    create(client, [{"role": "user", "content": "Sure?"}], conversation={"id": made.id})
    assert all(text in prompt_of(server) for text in ("I am Ann", "Who am I?", "Hello Ann", "Sure?"))
    items = list(client.conversations.items.list(made.id, order="asc", limit=2))
    texts = [item.content[0].text for item in items]
    assert texts == ["I am Ann", "Who am I?", "Hello Ann", "Sure?", "Hello Ann"]
    assert client.conversations.items.retrieve(items[2].id, conversation_id=made.id).id == answer.output[0].id
    client.conversations.items.delete(items[2].id, conversation_id=made.id)
    assert len(client.conversations.items.list(made.id).data) == 4
    added = client.conversations.items.create(made.id, items=[{"role": "user", "content": "more"}])
    assert added.data[0].content[0].text == "more" and added.first_id == added.last_id
    assert client.conversations.retrieve(made.id).metadata == {"topic": "x"}
    assert client.conversations.update(made.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert client.conversations.delete(made.id).deleted
    text = f"Conversation with id '{made.id}' not found."
    refused(lambda: client.conversations.retrieve(made.id), 404, text)
    refused(lambda: create(client, "x", conversation=made.id), 404, text, "conversation")
    assert client.responses.retrieve(answer.id).status == "completed"


def is_locked(client: Any, conversation_id: str) -> bool:
    """Ask with a reference to no item: it is looked for only once the conversation has been locked."""
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, [{"type": "item_reference", "id": "msg_missing"}], conversation=conversation_id)
    return caught.value.code == "conversation_locked"


def test_two_responses_at_once_on_one_conversation(client: Any, server: LiveServer) -> None:
    made = client.conversations.create()
    server.call(server.link.hold.clear)
    for keys in ({"stream": True}, {"background": True}):
        running = create(client, "Hello", conversation=made.id, **keys)
        assert is_locked(client, made.id)
        for other in ({}, {"stream": True}, {"background": True}):
            with pytest.raises(openai.BadRequestError) as caught:
                create(client, "Me too", conversation=made.id, **other)
            assert (caught.value.code, caught.value.param) == ("conversation_locked", "conversation")
        if "stream" in keys:
            running.close()  # a client that leaves unlocks it
            wait_until(lambda: not is_locked(client, made.id), "the conversation was not unlocked")
    client.responses.cancel(running.id)
    server.call(server.link.hold.set)
    assert create(client, "Now", conversation=made.id).status == "completed"
    assert not is_locked(client, made.id)  # and its refused request leaves no lock
    assert create(client, "Again", conversation=made.id).status == "completed"


def test_the_items_of_a_conversation_are_bounded(client: Any) -> None:
    item = {"role": "user", "content": "x"}
    with pytest.raises(openai.BadRequestError, match="items"):
        client.conversations.create(items=[item] * 21)
    made = client.conversations.create(items=[item] * 20)
    for bad in ([item] * 21, []):
        with pytest.raises(openai.BadRequestError, match="items"):
            client.conversations.items.create(made.id, items=bad)


def test_a_conversation_of_many_megabytes(client: Any, server: LiveServer) -> None:
    """Its rendering passes the limits of a template: without some of its turns it does not."""
    made = client.conversations.create()
    for number in range(5):
        items = [{"role": "user", "content": f"{number} " + "word " * 800_000}, {"role": "assistant", "content": "so"}]
        client.conversations.items.create(made.id, items=items)
    with pytest.raises(openai.BadRequestError, match="passes 16777216 characters"):
        create(client, "x", conversation=made.id)
    assert create(client, "And now?", conversation=made.id, truncation="auto").status == "completed"
    assert "And now?" in prompt_of(server) and "word" not in prompt_of(server)
    assert len(server.http.get(f"/v1/conversations/{made.id}/items?limit=100").content) > 2 * 10**7


HOSTILE: list[tuple[Any, str]] = [
    *((value, "items") for value in ("x", 7, True, {}, [None], ["x"], [[]])),
    ([{}], "items.0.role"),
    ([{"role": "user"}], "items.0.content"),
    ([{"role": "king", "content": "x"}], "items.0.role"),
    ([{"role": "user", "content": 7}], "items.0.content"),
    ([{"role": "user", "content": [{"type": "nothing"}]}], "items.0.content.0.type"),
    ([{"role": "user", "content": "x"}, {"type": "unknown"}], "items.1.type"),
    ([{"type": "function_call", "name": "x"}], "items.0.call_id"),
    ([{"type": "item_reference", "id": "msg_none"}], "items.0"),
    ([{"role": "user", "content": "x", "id": "i" * 129}], "items.0.id"),
]


@pytest.mark.parametrize(("items", "param"), HOSTILE)
def test_hostile_items_of_a_conversation(client: Any, server: LiveServer, items: Any, param: str) -> None:
    made = client.conversations.create()
    for path in ("/v1/conversations", f"/v1/conversations/{made.id}/items"):
        answer = server.post(path, {"items": items})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param), answer.text
    assert client.conversations.items.list(made.id).data == []


@pytest.mark.parametrize(
    "metadata", ["x", [], {"a": 1}, {"a": "b" * 513}, {"k" * 65: "v"}, {str(n): "" for n in range(17)}]
)
def test_hostile_metadata_of_a_conversation(client: Any, server: LiveServer, metadata: Any) -> None:
    made = client.conversations.create(metadata={"kept": "yes"})
    for path in ("/v1/conversations", f"/v1/conversations/{made.id}"):
        answer = server.post(path, {"metadata": metadata})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("metadata"), answer.text
    assert client.conversations.retrieve(made.id).metadata == {"kept": "yes"}


@pytest.mark.parametrize("name", ["", "x" * 5000, "a/b", "é\u0000"])
def test_hostile_ids(client: Any, server: LiveServer, name: str) -> None:
    body = {"model": "demo", "input": "x"}
    assert server.post("/v1/responses", body | {"previous_response_id": name}).status_code == 400
    assert server.post("/v1/responses", body | {"conversation": name}).status_code == 404
    reference = [{"type": "item_reference", "id": name}]
    assert server.post("/v1/responses", body | {"input": reference}).status_code == 400


# background


def test_a_background_response(client: Any, server: LiveServer) -> None:
    server.call(server.link.hold.clear)
    made = create(client, "Hello", background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    assert wait(client, made, "in_progress").output == []
    server.call(server.link.hold.set)
    kept = wait(client, made)
    assert kept.status == "completed" and kept.created_at == made.created_at
    assert kept.output_text == create(client, "Hello").output_text
    assert client.responses.cancel(made.id).to_dict() == kept.to_dict()
    assert create(client, "More", previous_response_id=made.id).status == "completed"


def test_background_requests_are_checked_at_once(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        create(client, "x", background=True, temperature=9)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        create(client, "long " * 5000, background=True)


def test_background_and_batches_share_the_spare_capacity(client: Any, server: LiveServer) -> None:
    create(client, "online")
    online = server.link.seen[-1]
    wait(client, create(client, "later", background=True))
    assert server.link.seen[-1].priority > online.priority
    window = server.app.state.batches.window
    assert window is server.app.state.responses.background._window
    server.call(server.link.hold.clear)
    made = [create(client, f"n{number}", background=True) for number in range(12)]
    limit = server.app.state.batches.window._limit
    server.wait(lambda: window.num_running == limit(window.num_running) > 0, "the window never filled")
    server.call(server.link.hold.set)
    assert {wait(client, each).status for each in made} == {"completed"}


def test_cancel_and_delete_of_a_running_response(client: Any, server: LiveServer) -> None:
    server.call(server.link.hold.clear)
    cancelled, deleted = (create(client, "Hello", background=True) for _ in range(2))
    for each in (cancelled, deleted):
        wait(client, each, "in_progress")
    for _ in range(2):
        assert client.responses.cancel(cancelled.id).status == "cancelled"
    client.responses.delete(deleted.id)
    server.wait(lambda: not server.link.running, "they were not aborted")
    server.call(server.link.hold.set)
    assert client.responses.retrieve(cancelled.id).status == "cancelled"
    refused(lambda: client.responses.retrieve(deleted.id), 404, not_found(deleted.id))


def test_replay_after_every_number(client: Any, server: LiveServer) -> None:
    live = list(create(client, "Hello", background=True, stream=True))
    response_id = live[0].response.id
    assert [event.sequence_number for event in live] == list(range(len(live)))
    kinds = [event.type for event in live]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    expected = [event.to_dict() for event in live]
    assert [event.to_dict() for event in client.responses.retrieve(response_id, stream=True)] == expected
    for number in range(len(live)):
        found = client.responses.retrieve(response_id, stream=True, starting_after=number)
        assert [event.to_dict() for event in found] == expected[number + 1 :]
    with client.responses.stream(response_id=response_id, starting_after=5) as stream:
        assert stream.get_final_response().output_text == live[-1].response.output_text


def test_a_client_that_leaves_can_come_back(client: Any, server: LiveServer) -> None:
    server.call(server.link.hold.clear)
    stream = create(client, "Hello", background=True, stream=True)
    first = [next(stream) for _ in range(3)]
    stream.close()
    found: list[Any] = []
    after = first[-1].sequence_number
    source = client.responses.retrieve(first[0].response.id, stream=True, starting_after=after)
    reader = threading.Thread(target=lambda: found.extend(source))
    reader.start()
    server.call(server.link.hold.set)
    reader.join(60)
    assert [event.sequence_number for event in found] == list(range(after + 1, after + 1 + len(found)))
    assert found[-1].type == "response.completed"


def test_a_follower_learns_of_a_cancel(client: Any, server: LiveServer) -> None:
    server.call(server.link.hold.clear)
    stream = create(client, "Hello", background=True, stream=True)
    name = next(stream).response.id
    wait(client, next(stream).response, "in_progress")
    client.responses.cancel(name)
    last = list(stream)[-1]
    assert (last.type, last.response["status"]) == ("response.cancelled", "cancelled")  # of no type of the client's
    again = list(client.responses.retrieve(name, stream=True))
    assert again[-1].to_dict() == last.to_dict()


def test_the_errors_of_background_responses(client: Any, server: LiveServer) -> None:
    server.call(server.link.hold.clear)
    made = client.conversations.create()
    blocked = [create(client, "x", background=True) for _ in range(8)]  # more than the window
    late = create(client, "x", background=True, stream=True, conversation=made.id)
    name = next(late).response.id
    client.conversations.delete(made.id)
    server.call(server.link.hold.set)
    last = list(late)[-1]
    assert last.type == "response.failed" and "not found" in last.response.error.message
    assert client.responses.retrieve(name).status == "failed"
    assert {wait(client, each).status for each in blocked} == {"completed"}


# batches, tenancy, no store, full disk


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
