"""Responses in the background: their states, their replay, clients that come back, and their errors."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from jaxserve.api.batch.job import RequestWindow
from jaxserve.api.responses.background import BackgroundRunner, ConversationLocks
from jaxserve.errors import DiskFullError, ServerError, StoreDamagedError
from jaxserve.store.responses import QueuedResponse
from tests.api.conftest import LiveServer
from tests.scrape import values

from .conftest import create, not_found, refused, wait


def test_a_background_response(client: Any, server: LiveServer) -> None:
    server.call(server.link.hold.clear)
    made = create(client, "Hello", background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    assert wait(client, made, "in_progress").output == []
    assert values(server.http.get("/metrics").text)["jaxserve:background_responses_running"] == 1
    server.call(server.link.hold.set)
    kept = wait(client, made)
    server.wait(lambda: not server.app.state.responses.background.num_running, "it counts after its end")
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


@pytest.mark.parametrize("error", [DiskFullError("no room"), StoreDamagedError("no database")])
def test_what_is_queued_counts_while_it_is_looked_for_and_not_while_the_store_fails(error: ServerError) -> None:
    """A model that works on nothing is unloaded, and one whose store is broken can be."""
    counts: list[int] = []

    async def main() -> None:
        async def queued(_: int) -> list[QueuedResponse]:
            counts.append(runner.num_running)
            return [QueuedResponse("r", 1)]

        async def start(*_: Any) -> None:
            counts.append(runner.num_running)
            raise error

        async def nothing(*_: Any) -> tuple[()]:
            return ()

        store: Any = SimpleNamespace(recover=nothing, busy_conversations=nothing, queued=queued, start=start)
        settings: Any = SimpleNamespace(retry_delay=60.0)
        runner = BackgroundRunner(store, RequestWindow(lambda _: 1), ConversationLocks(), settings)
        await runner.start()
        await asyncio.sleep(0.01)
        counts.append(runner.num_running)
        await runner.stop()

    asyncio.run(main())
    assert counts == [1, 1, 0]
