"""Conversations: their turns, their limits, and hostile items, metadata and ids."""

from typing import Any

import openai
import pytest

from tests.api.conftest import LiveServer, reply_with
from tests.waiting import wait_until

from .conftest import create, prompt_of, refused


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
