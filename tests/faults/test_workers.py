"""A server with two workers, real sockets and real kills, over an engine process whose device is that of the fakes."""

import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from jaxserve.client.link import process_links
from jaxserve.config import Config
from jaxserve.library.serving import RunningServer, launch_server
from jaxserve.types.sampling import SamplingParams
from tests.fakes import alone
from tests.faults.fake_engine import CONFIG, SEGFAULT
from tests.scrape import values
from tests.waiting import LAST_RESORT, wait_until

ENGINE = "tests.faults.fake_engine"
ADMIN, CLIENT = "the-admin-key", "the-client-key"
KEYS = [
    {"name": "narrow", "value": "narrow-key", "max_running": 1, "max_queued": 1},
    {"name": "metered", "value": "metered-key", "tokens_per_minute": 60},
]
LENGTH = 300  # tokens of a long stream, of 2 ms or more each
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "return_token_ids": True}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": LENGTH, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def launched(directory: Path, replicas: int = 1, **section: Any) -> Iterator[RunningServer]:
    keys = {"port": 0, "workers": 2, "api_key": CLIENT, "admin_api_key": ADMIN, "keys": KEYS} | section
    rest = {"store": {"path": str(directory)}, "runtime": {"random_seed": 3}, "mesh": {"replicas": replicas}}
    config = Config.parse({"server": keys, **rest})
    with launch_server(config=config, make_link=lambda config: process_links(config, ENGINE)) as it:
        yield it


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with launched(tmp_path_factory.mktemp("store")) as running:
        yield running


def children(module: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and module in child.cmdline():
                found.append(child)
    return found


def workers() -> list[psutil.Process]:
    return children("jaxserve.cli.worker")


def client(server: RunningServer, key: str = CLIENT) -> httpx2.Client:
    """A client whose every request has a connection of its own, which any worker may accept."""
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    return httpx2.Client(base_url=server.url, headers=headers, timeout=LAST_RESORT)


def complete(server: RunningServer, prompt: list[int], key: str = CLIENT, **fields: Any) -> httpx2.Response:
    with client(server, key) as http:
        return http.post("/v1/completions", json={**GREEDY, "prompt": prompt, "max_tokens": 20, **fields})


def expected(prompt: list[int], count: int, **fields: Any) -> list[int]:
    return alone(prompt, SamplingParams(temperature=0.0, max_tokens=count, **fields))[0]


def metrics(server: RunningServer) -> dict[str, float]:
    with client(server) as http:
        return values(http.get("/metrics").text)


def idle(server: RunningServer) -> None:
    wait_until(lambda: server.launch.engine.num_live == 0, "no request is live")


class Stream(threading.Thread):
    """A client that reads a stream to its end, on a connection of its own. It has begun once it is made."""

    def __init__(self, server: RunningServer, prompt: list[int], **fields: Any) -> None:
        super().__init__(daemon=True)
        host, _, port = server.url.removeprefix("http://").partition(":")
        self.prompt = prompt
        self.tokens: list[int] = []
        self.reasons: list[str] = []
        self.errors: list[Any] = []  # events
        self.error: Exception | None = None
        self._connection = http.client.HTTPConnection(host, int(port), timeout=LAST_RESORT)
        headers = {"authorization": f"Bearer {CLIENT}", "content-type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(LONG | {"prompt": prompt} | fields), headers)
        self._socket = self._connection.sock
        self.port = self._socket.getsockname()[1]
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self.worker = self._find_worker()
        self.start()

    def run(self) -> None:
        try:
            for line in self._response:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
        except (http.client.HTTPException, OSError) as error:
            self.error = error
        finally:
            self._response.close()
            self._connection.close()

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.errors.append(chunk["error"])
        for choice in chunk.get("choices", []):
            self.tokens += choice.get("token_ids") or []
            self.reasons += [choice["finish_reason"]] * bool(choice["finish_reason"])

    def leave(self) -> None:
        with contextlib.suppress(OSError):  # it has read its end
            self._socket.shutdown(socket.SHUT_RDWR)
        self.join(LAST_RESORT)

    def _find_worker(self) -> int | None:
        """The process id of the worker that serves it; None if it has ended."""
        for process in workers():
            if any(each.raddr and each.raddr.port == self.port for each in process.net_connections("tcp")):
                return process.pid
        return None

    @property
    def is_whole(self) -> bool:
        self.join(LAST_RESORT)
        return self.tokens == expected(self.prompt, LENGTH, ignore_eos=True) and self.reasons == ["length"]


@contextlib.contextmanager
def unread(server: RunningServer) -> Iterator[http.client.HTTPResponse]:
    """A stream of more bytes than sockets hold, of which its client has read the headers only."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        data = json.dumps(LONG | {"prompt": [7] * 40, "n": 16, "logprobs": 20, "max_tokens": 400}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost:\r\nauthorization: Bearer {CLIENT}\r\nconnection: close\r\n"
        kind = f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall((head + kind).encode() + data)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        yield answer


def on_both(server: RunningServer, count: int = 4) -> list[Stream]:
    """Streams of which each worker serves `count` or more."""
    streams: list[Stream] = []

    def enough() -> bool:
        pids = [stream.worker for stream in streams if stream.is_alive() and stream.worker is not None]
        return len(set(pids)) == 2 and min(map(pids.count, set(pids))) >= count

    while not enough():
        streams.append(Stream(server, [len(streams) % 90 + 1, 5, 6]))
    return streams


def test_both_workers_answer_with_the_same_tokens(server: RunningServer) -> None:
    for number in range(20):
        answer = complete(server, [number + 1, 7, 8])
        assert answer.json()["choices"][0]["token_ids"] == expected([number + 1, 7, 8], 20)
    assert all(stream.is_whole for stream in on_both(server))


def test_requests_without_a_seed_differ(server: RunningServer) -> None:
    def ask(_: int) -> tuple[int, ...]:
        return tuple(complete(server, [1, 2, 3], temperature=1.0).json()["choices"][0]["token_ids"])

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(ask, range(16)))) > 11  # the fake device tells only 97 seeds apart


def test_clients_that_leave_leave_nothing(server: RunningServer) -> None:
    for stream in on_both(server, 2):
        stream.leave()
    idle(server)


def test_what_only_the_main_process_knows(server: RunningServer) -> None:
    with client(server) as http:
        for _ in range(4):
            assert http.get("/health").json()["status"] == "ready"
            assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
            assert http.get("/no/such/route").json()["error"]["code"] == "not_found"
            assert int(http.head("/metrics").headers["content-length"]) > 0
            assert http.get("/version", headers={"x-request-id": "mine"}).headers.get_list("x-request-id") == ["mine"]
        assert http.get("/v1/models", headers={"authorization": "Bearer no"}).status_code == 401
        assert http.post("/v1/completions", json={}, headers={"x-request-id": "my"}).headers["x-request-id"] == "my"


@pytest.mark.parametrize("chunked", [True, False])
def test_files_are_the_same_for_every_worker(server: RunningServer, chunked: bool) -> None:
    content = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    content *= 3000
    with client(server) as http:
        request = http.build_request(
            "POST", "/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"}
        )
        if chunked:
            body = request.read()
            pieces = (body[start : start + 100_000] for start in range(0, len(body), 100_000))
            sent = http.post("/v1/files", content=pieces, headers={"content-type": request.headers["content-type"]})
        else:
            sent = http.send(request)
        assert sent.status_code == 200, sent.text
        for _ in range(4):
            assert http.get(f"/v1/files/{sent.json()['id']}/content").content == content


def test_a_batch_runs_beside_the_workers_requests(server: RunningServer) -> None:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {**GREEDY, "prompt": [i + 1, 3]}}
        for i in range(20)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with client(server) as http:
        sent = http.post("/v1/files", files={"file": ("b.jsonl", content)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked).json()
        streams = on_both(server, 1)
        output = wait_until(lambda: _output_of(http, batch["id"]), "the batch has ended")
        found = [json.loads(line) for line in http.get(f"/v1/files/{output}/content").text.splitlines()]
    for line in found:
        choice = line["response"]["body"]["choices"][0]
        assert choice["token_ids"] == expected([int(line["custom_id"]) + 1, 3], 16)
    assert len(found) == 20 and all(stream.is_whole for stream in streams)


def _output_of(http: httpx2.Client, batch_id: str) -> str:
    """The id of the output file of a batch; "" before its end."""
    return http.get(f"/v1/batches/{batch_id}").json().get("output_file_id") or ""


def test_responses_are_continued_by_any_worker(server: RunningServer) -> None:
    previous: dict[str, Any] = {}
    with client(server) as http:
        for _ in range(5):
            answer = http.post(
                "/v1/responses", json={"model": "demo", "input": "hello", "max_output_tokens": 8} | previous
            )
            assert answer.status_code == 200, answer.text
            previous = {"previous_response_id": answer.json()["id"]}
            assert http.get(f"/v1/responses/{answer.json()['id']}").json()["id"] == answer.json()["id"]
        with http.stream("POST", "/v1/responses", json={"model": "demo", "input": "hello", "stream": True}) as streamed:
            events = [line for line in streamed.iter_lines() if line.startswith("event: ")]
        assert events[0] == "event: response.created" and events[-1].endswith(("completed", "incomplete"))


def test_threads_of_messages_are_continued_by_any_worker(server: RunningServer) -> None:
    """Each turn finds the pages of the turns before in the prefix cache."""
    before, prompt, thread = metrics(server), 0, {"type": "create"}
    with client(server) as http:
        for turn in range(6):
            messages = [{"role": "user", "content": f"This is turn {turn} of a thread, which any worker may answer."}]
            body = {"model": "demo", "messages": messages, "max_tokens": 8, "thread": thread}
            counted = http.post("/v1/messages/count_tokens", json=body).json()
            answer = http.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            read = usage["cache_read_input_tokens"]
            found = usage["input_tokens"] + usage["cache_creation_input_tokens"] + read
            assert counted == {"input_tokens": found} and found > prompt
            assert read >= prompt - CONFIG.page_size, "the prefix is computed again"
            prompt, thread = found, {"type": "continue", "previous_message_id": answer.json()["id"]}
    with client(server, "narrow-key") as http:
        body = {"model": "demo", "messages": [{"role": "user", "content": "And now?"}], "max_tokens": 8}
        answer = http.post("/v1/messages", json=body | {"thread": thread})
        assert (answer.status_code, answer.json()["error"]["details"]) == (404, {"error_code": "thread_not_found"})
    name = 'jaxserve:http_responses_total{method="POST",status="200"}'
    assert metrics(server)[name] - before.get(name, 0) == 12  # each is counted once


def test_a_session_is_continued_by_any_worker(server: RunningServer) -> None:
    before = metrics(server)
    with client(server) as http:
        session = http.post("/open_session", json={"capacity_of_str_len": 10_000}).json()
        context, rid = [1, 2, 3], None
        for turn in range(6):
            sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
            ids = context if turn == 0 else [9]
            body = {"input_ids": ids, "sampling_params": sampling, "session_params": {"id": session, "rid": rid}}
            answer = http.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            rid = answer.json()["meta_info"]["id"]
            context = context if turn == 0 else [*context, 9]
            want = expected(context, 5, ignore_eos=True)
            assert answer.json()["output_ids"] == want
            context += want
        assert http.post("/close_session", json={"session_id": session}).status_code == 200
    name = 'jaxserve:http_responses_total{method="POST",status="200"}'
    assert metrics(server)[name] - before.get(name, 0) == 8  # each is counted once


def test_an_abort_finds_the_requests_of_every_worker(server: RunningServer) -> None:
    streams = [Stream(server, [1, 2, number + 1], request_id=f"abort-{number}") for number in range(8)]
    with client(server, ADMIN) as http:
        aborted = http.post("/abort_request", json={"rid": "abort-"}).json()["aborted"]
    running = [stream for stream in streams if stream.join(LAST_RESORT) is None and stream.reasons == ["abort"]]
    assert len(aborted) == len(running) > 0 and len(aborted) >= 8 - sum(each.is_whole for each in streams)
    idle(server)


def test_a_keys_requests_in_hand_are_counted_over_all_workers(server: RunningServer) -> None:
    idle(server)

    def ask(number: int) -> httpx2.Response:
        return complete(server, [number + 1, 4], "narrow-key", max_tokens=400, ignore_eos=True)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    refused = [each for each in answers if each.status_code == 429]
    assert 8 <= len(refused) <= 10  # two are in hand; a third may pass if two workers look at the same moment
    assert all("'narrow'" in each.json()["error"]["message"] and int(each.headers["retry-after"]) for each in refused)
    with client(server, ADMIN) as http:
        found = {each["name"]: each for each in http.get("/key_usage").json()["data"]}["narrow"]
    assert found["requests"] == 12 - len(refused) and found["refused"] == len(refused) and found["num_live"] == 0


def test_a_keys_tokens_are_counted_over_all_workers(server: RunningServer) -> None:
    assert complete(server, [1] * 100, "metered-key").status_code == 200

    def refused() -> httpx2.Response | None:
        answer = complete(server, [1], "metered-key", max_tokens=1)
        return answer if answer.status_code == 429 else None

    first = wait_until(refused, "the tokens are used")
    for answer in [first, *(complete(server, [1], "metered-key") for _ in range(8))]:
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 10


def test_metrics_are_sums_and_never_go_back(server: RunningServer) -> None:
    before = metrics(server)
    for number in range(10):
        complete(server, [number + 1, 2])
    after = metrics(server)
    ended = 'jaxserve:request_success_total{finished_reason="length"}'
    assert after[ended] - before.get(ended, 0) == 10
    count = "jaxserve:e2e_request_latency_seconds_count"
    assert after[count] - before[count] == 10
    workers()[0].kill()
    wait_until(lambda: len(workers()) == 2, "it is started again")
    assert metrics(server)[ended] == after[ended]


def test_a_killed_worker_ends_its_own_requests_only(server: RunningServer) -> None:
    victim = workers()[0]
    streams = on_both(server, 4)
    victim.kill()
    lost = [stream for stream in streams if stream.worker == victim.pid]
    for stream in streams:
        stream.join(LAST_RESORT)
        assert stream.is_whole or (stream in lost and not stream.reasons)  # its connection was closed
    assert not all(stream.reasons for stream in lost)
    idle(server)
    wait_until(lambda: len(workers()) == 2, "another is started")
    assert all(stream.is_whole for stream in on_both(server, 1))


def test_the_engines_death_ends_no_request_of_any_worker(server: RunningServer) -> None:
    streams = on_both(server, 3)
    restarts = server.launch.engine.restarts
    children(ENGINE)[0].kill()
    assert all(stream.is_whole for stream in streams)
    assert server.launch.engine.restarts == restarts + 1
    idle(server)


def test_a_request_that_kills_the_engine_is_found_among_those_of_all_workers(server: RunningServer) -> None:
    streams = on_both(server, 3)
    poison = complete(server, [SEGFAULT, 4, 5], max_tokens=50)
    assert poison.status_code == 500, poison.text
    assert all(stream.is_whole for stream in streams)
    idle(server)


def test_a_drain_ends_all_streams_of_all_workers(tmp_path: Path) -> None:
    """Also one that is computed and not yet read, of which only its worker knows."""
    others = workers()
    with launched(tmp_path, max_unread_bytes=2**26) as server, unread(server) as answer:
        streams = on_both(server, 2)
        running = [stream for stream in streams if stream.is_alive()]
        server.launch.stop()
        wait_until(lambda: complete(server, [1]).status_code == 503, "new requests are refused")
        assert running and all(stream.is_whole for stream in streams)
        idle(server)
        time.sleep(0.3)
        assert complete(server, [1]).status_code == 503, "the workers end before all is read"
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert workers() == others


def test_a_drain_has_a_limit(tmp_path: Path) -> None:
    """Streams that are not done in time end with an error event, and no text after it."""
    with launched(tmp_path, drain_timeout=0.1) as server:
        streams = on_both(server, 2)
        server.launch.stop()
        for stream in streams:
            stream.join(LAST_RESORT)
            assert stream.error is None and (stream.is_whole or stream.errors)
    assert any(stream.errors for stream in streams)


def test_a_worker_that_hangs_is_killed(tmp_path: Path) -> None:
    others = workers()
    with launched(tmp_path, watchdog_timeout=5) as server:
        hung = next(each for each in workers() if each not in others)
        hung.send_signal(signal.SIGSTOP)
        wait_until(lambda: not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE, "it is killed")
        wait_until(lambda: len(workers()) == len(others) + 2, "another is started")
        assert complete(server, [1]).status_code == 200


def test_a_client_that_leaves_a_response_ends_it_in_the_engine(server: RunningServer) -> None:
    idle(server)
    body = {"model": "demo", "input": "hello", "stream": True, "max_output_tokens": 400}
    with client(server) as http, http.stream("POST", "/v1/responses", json=body) as answer:
        next(answer.iter_lines())
    idle(server)


def test_an_upload_that_is_refused_is_answered_before_its_end(server: RunningServer) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/files HTTP/1.1\r\nhost:\r\nauthorization: Bearer wrong\r\ncontent-length: 1000000\r\n\r\n"
        connection.sendall(head.encode() + b"x" * 1000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
