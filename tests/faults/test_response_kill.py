"""SIGKILL of the engine and of the whole server during chained turns, turns of a conversation and background responses.

What a client saw as completed is there with all its items; nothing is there twice; nothing stays in progress.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest

from tests.waiting import LAST_RESORT, wait_until

ROOT = Path(__file__).parent.parent.parent
TURNS = 3  # of a chain or a conversation, which then fills the context of the fake model
ENDED = ("completed", "failed", "incomplete")
GONE = (openai.APIConnectionError, openai.InternalServerError)


@dataclass
class Server:
    process: subprocess.Popen[str]
    client: Any

    def kill_engine(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if any("fake_engine" in word for word in child.cmdline()):
                child.kill()

    def kill(self) -> None:
        parent = psutil.Process(self.process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(store: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.faults.responses_server", str(store)]
    with (
        open(store.parent / "stderr.txt", "a") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=LAST_RESORT) as client:
            server = Server(process, client)
            try:
                yield server
            finally:
                if process.poll() is None:
                    server.kill()


@dataclass
class Seen:
    """What clients have seen over all lives of the server."""

    ended: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # id -> output
    accepted: set[str] = field(default_factory=set)  # ids of background responses
    turns: dict[str, list[str]] = field(default_factory=dict)  # id of a conversation -> inputs of ended turns
    number: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def text(self) -> str:
        """A text that no other request has."""
        with self.lock:
            self.number += 1
            return f"q{self.number}"

    def note(self, response: Any) -> None:
        assert response.status in ("completed", "incomplete"), response
        self.ended[response.id] = [item.to_dict() for item in response.output]


def ask(client: Any, text: str, **keys: Any) -> Any:
    return client.responses.create(model="demo", input=text, temperature=0, max_output_tokens=6, **keys)


def final(stream: Any) -> Any:
    last = None
    for event in stream:
        if event.type in ("response.completed", "response.incomplete"):
            last = event.response
    return last


def chained(client: Any, seen: Seen) -> None:
    """A chain of turns, streamed and not."""
    previous = None
    for turn in range(TURNS):
        if turn % 2:
            response = ask(client, seen.text(), previous_response_id=previous)
        else:
            response = final(ask(client, seen.text(), previous_response_id=previous, stream=True))
            if response is None:
                return
        seen.note(response)
        previous = response.id


def in_conversation(client: Any, seen: Seen) -> None:
    conversation = client.conversations.create().id
    turns = seen.turns[conversation] = []
    for _ in range(TURNS):
        text = seen.text()
        seen.note(ask(client, text, conversation=conversation))
        turns.append(text)


def in_background(client: Any, seen: Seen) -> None:
    """Some are followed, some are polled, some are left."""
    made = [ask(client, seen.text(), background=True) for _ in range(3)]
    seen.accepted.update(each.id for each in made)
    for event in ask(client, seen.text(), background=True, stream=True):
        if event.type == "response.created":
            seen.accepted.add(event.response.id)
        if event.type in ("response.completed", "response.incomplete"):
            seen.note(event.response)
    polled = client.responses.retrieve(made[0].id)
    if polled.status in ("completed", "incomplete"):
        seen.note(polled)


def repeated(work: Callable[[Any, Seen], None], client: Any, seen: Seen, failures: list[BaseException]) -> None:
    """Until the server is gone."""
    try:
        while True:
            work(client, seen)
    except GONE:
        return
    except openai.APIError as error:  # an event `error`, or a stream that was cut
        if not isinstance(error, openai.APIStatusError):
            return
        failures.append(error)
    except Exception as error:
        if not is_cut(error):
            failures.append(error)


def is_cut(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in ("httpx2", "httpcore2", "httpx", "httpcore")


def live(store: Path, seen: Seen, rng: random.Random, *, engine: bool) -> None:
    """One life of the server, under load until it is killed; before that its engine, if asked."""
    failures: list[BaseException] = []
    with serving(store) as server:
        check_seen(server.client, seen)
        threads = [
            threading.Thread(target=repeated, args=(work, server.client, seen, failures))
            for work in (chained, in_conversation, in_background, in_background)
        ]
        for thread in threads:
            thread.start()
        if not seen.ended:  # the first life: on a busy machine a random time may be too short for any answer
            wait_until(lambda: seen.ended and seen.accepted, "no response ended")
        time.sleep(rng.uniform(0, 0.7))
        if engine:
            server.kill_engine()
            time.sleep(rng.uniform(0, 2.5))
        server.kill()
        for thread in threads:
            thread.join(LAST_RESORT)
    assert not failures, failures


def check_seen(client: Any, seen: Seen) -> None:
    """Some of what was seen, so that a life stays short; the last check reads all."""
    for response_id in list(seen.ended)[-20:]:
        check_response(client, response_id, seen.ended[response_id])


def check_response(client: Any, response_id: str, output: list[dict[str, Any]]) -> None:
    kept = client.responses.retrieve(response_id)
    assert [item.to_dict() for item in kept.output] == output
    assert len(client.responses.input_items.list(response_id).data) == 1


def check_all(store: Path, seen: Seen) -> None:
    """After all kills: a life in peace in which everything that waits ends."""
    with serving(store) as server:
        client = server.client
        for response_id in seen.accepted:
            wait_until(
                lambda name=response_id: client.responses.retrieve(name).status in ENDED, "a response never ended"
            )
        for response_id, output in seen.ended.items():
            check_response(client, response_id, output)
        for conversation, turns in seen.turns.items():
            items = list(client.conversations.items.list(conversation, order="asc", limit=100))
            texts = [item.content[0].text for item in items if getattr(item, "role", "") == "user"]
            assert [text for text in texts if text in turns] == turns, "a turn is lost, twice, or out of order"
            assert len(set(texts)) == len(texts)
    with contextlib.closing(sqlite3.connect(store / "store.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        statuses = dict(connection.execute("SELECT status, count(*) FROM responses GROUP BY status"))
        assert not {"queued", "in_progress"} & set(statuses), statuses
        twice = "SELECT holder, id FROM items GROUP BY holder, id HAVING count(*) > 1"
        assert connection.execute(twice).fetchall() == []
        inputs = "SELECT holder FROM items WHERE side = 'input' GROUP BY holder HAVING count(*) <> 1"
        assert connection.execute(inputs).fetchall() == []
    print(f"{len(seen.ended)} seen ended, {len(seen.accepted)} accepted, {len(seen.turns)} conversations, {statuses}")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("lives", "seed"), [(3, 1), pytest.param(50, 2, marks=pytest.mark.slow)])
def test_kills_of_engine_and_server(tmp_path: Path, lives: int, seed: int) -> None:
    """Each life has two kills: of the engine, then of all processes."""
    rng, seen = random.Random(seed), Seen()
    for _ in range(lives):
        live(tmp_path / "store", seen, rng, engine=True)
    check_all(tmp_path / "store", seen)
    assert seen.ended and seen.accepted


def turn_of_a_thread(client: Any, thread: dict[str, str], text: str, *, stream: bool) -> tuple[str, int]:
    """The id of a reply whose end was read, and how many tokens its prompt had."""
    messages = [{"role": "user", "content": text}]
    keys = {"model": "demo", "max_tokens": 6, "messages": messages, "thread": thread}
    if not stream:
        reply = client.beta.messages.create(**keys)
        usage = reply.usage
    else:
        events = client.beta.messages.create(stream=True, **keys)
        reply = next(events).message
        usage = next(event for event in events if event.type == "message_delta").usage
    return reply.id, usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_a_thread_of_messages_outlives_a_kill_after_every_turn(tmp_path: Path) -> None:
    """The server is killed as soon as a client has read the end of a reply; the next server continues it."""
    thread, lengths = {"type": "create"}, [0]
    for turn in range(3):
        with serving(tmp_path / "store") as server:
            url = str(server.client.base_url).removesuffix("/v1/")
            with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=LAST_RESORT) as client:
                reply_id, length = turn_of_a_thread(client, thread, f"turn {turn}", stream=turn != 1)
                server.kill()
        thread = {"type": "continue", "previous_message_id": reply_id}
        lengths.append(length)
    assert lengths == sorted(set(lengths)), "a turn is lost"
