"""Random frames on the engine's private socket: whatever comes, the process goes on and its answers are right."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from jaxserve.config import Config
from jaxserve.transport.shared_state import SharedState
from jaxserve.transport.socket_directory import STATE
from jaxserve.types.calls import FlushCache, ReadWeights
from jaxserve.types.messages import (
    Abort,
    Add,
    Call,
    MessageError,
    Outputs,
    Ready,
    Stop,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from jaxserve.types.sampling import EngineRequest, GrammarSpec, SamplingParams
from tests.conftest import SMALL

WHOLE = [
    encode(message)
    for message in (
        Add.of(EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(logit_bias={1: 1.0}))),
        Add.of(EngineRequest(request_id="g", prompt_token_ids=[1], params=SamplingParams(logprobs=2), deadline=3.0)),
        Abort(["r"]),
        Call(1, FlushCache()),
        Call(2, ReadWeights("nothing", 1)),
    )
]
ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 1e308, float("nan"), float("inf"), "", "\0", "é" * 99]
ODD += [b"\xff", [], [[]], {}, {"a": {}}, [1] * 300, [2**31 - 1], ["x"], {"1": 1}, [-5], 10**6]
KINDS = ["add", "abort", "call", "stopp", "beat", "outputs", ""]
FIELDS = list(EngineRequest.__struct_fields__)
PARAMS = list(SamplingParams.__struct_fields__)


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(80))


def damaged(rng: random.Random) -> bytes:
    """A real message with some bytes changed, cut off or doubled."""
    frame = bytearray(rng.choice(WHOLE))
    for _ in range(rng.randrange(1, 4)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    at = rng.randrange(len(frame))
    return bytes(rng.choice([frame, frame[:at], frame + frame[at:]]))


def invented(rng: random.Random) -> bytes:
    """A request with a few odd values where good ones should be: some of them are valid, and are run."""
    request: dict[str, Any] = {"request_id": "f", "prompt_token_ids": []}
    params: dict[str, Any] = {"max_tokens": 3}
    for _ in range(rng.randrange(3)):
        params[rng.choice(PARAMS)] = rng.choice(ODD)
    if rng.random() < 0.3:
        request[rng.choice(FIELDS)] = rng.choice(ODD)
    if rng.random() < 0.02:
        kind, source = rng.choice(["regex", "lark", "ebnf", "json_schema", "x"]), rng.choice(["(", "[a-z]+", "{}", ""])
        params["grammar"] = msgspec.to_builtins(GrammarSpec(kind=kind, source=source))
    message: dict[str, Any] = {"type": rng.choice(KINDS), "request": {"params": params} | request}
    message |= {"prompt": np.full(3, rng.randrange(400), "<i4").tobytes()}
    message |= {"siblings": [[f"f{rng.randrange(50)}", rng.randrange(9)] for _ in range(rng.randrange(1, 4))]}
    if rng.random() < 0.1:
        message[rng.choice(["prompt", "siblings"])] = rng.choice(ODD)
    message |= {
        "request_ids": rng.choice(ODD),
        "call_id": rng.choice(ODD),
        "call": rng.choice([*ODD, {"type": "waiting"}, {"type": "read_weights", "tensor": "x", "num_rows": -1}]),
    }
    return msgspec.msgpack.encode(message)


MAKERS: list[Callable[[random.Random], bytes]] = [random_bytes, damaged, damaged, invented]


def frames(count: int, seed: int) -> Iterator[bytes]:
    """Any but those that order the engine to stop."""
    rng = random.Random(seed)
    while count:
        frame = rng.choice(MAKERS)(rng)
        if b"stop" in frame and _decoded(frame) == Stop():
            continue
        count -= 1
        yield frame


def _decoded(frame: bytes) -> ToEngine | None:
    try:
        return decode_to_engine(frame)
    except MessageError:
        return None


class EngineProcess:
    """A real engine process, with this test at the other end of its sockets."""

    def __init__(self, config: Config, directory: Path) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.to_engine = self._bind(zmq.PUSH, directory / "to-engine")
        self.from_engine = self._bind(zmq.PULL, directory / "from-engine")
        with open(directory / STATE, "xb") as state:
            SharedState.create(state.fileno())
        self._log = open(directory / "log", "w+b")
        command = [sys.executable, "-m", "jaxserve.engine.process", str(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self._log)
        assert self.process.stdin is not None
        self.process.stdin.write(config.model_dump_json().encode() + b"\n")
        self.process.stdin.flush()

    def _bind(self, kind: int, path: Path) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(f"ipc://{path}")
        return socket

    def wait_for(self, wanted: Callable[[Any], bool], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.from_engine.poll(200):
                message = decode_from_engine(self.from_engine.recv())
                if wanted(message):
                    return message
            assert self.process.poll() is None, self.log()
        raise AssertionError(f"no such message within {seconds} s: {self.log()}")

    def answer(self, request_id: str) -> list[int]:
        """Tokens of a greedy request, by way of the same socket."""
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        self.to_engine.send(
            encode(Add.of(EngineRequest(request_id=request_id, prompt_token_ids=[5, 6, 7], params=params)))
        )
        tokens: list[int] = []

        def done(message: Any) -> bool:
            for output in message.outputs if isinstance(message, Outputs) else ():
                if output.request_id == request_id:
                    assert output.error is None
                    tokens.extend(output.token_ids)
            return len(tokens) == 12

        self.wait_for(done, 120)
        return tokens

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:].decode()

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._log.close()
        self._context.destroy(linger=0)


@pytest.fixture
def engine(compile_cache: str, tmp_path: Path) -> Iterator[EngineProcess]:
    config = Config.of(None, compile_cache=compile_cache, **SMALL)
    process = EngineProcess(config, tmp_path)
    yield process
    process.close()


@pytest.mark.parametrize("count", [8_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_random_frames_harm_nobody(engine: EngineProcess, count: int) -> None:
    engine.wait_for(lambda message: isinstance(message, Ready), 240)
    expected = engine.answer("before")
    for number, frame in enumerate(frames(count, seed=7)):
        engine.to_engine.send(frame)
        if number % 10_000 == 9_999:
            assert engine.answer(f"canary-{number}") == expected
    assert engine.answer("after") == expected
    assert "Traceback" not in engine.log() and "rebuild" not in engine.log()


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_random_frames_from_an_engine_are_refused(count: int) -> None:
    refused = 0
    for frame in frames(count, seed=8):
        try:
            decode_from_engine(frame)
        except MessageError:
            refused += 1
    assert refused > 0.9 * count
