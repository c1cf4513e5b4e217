"""Frames between the processes: what is sent arrives, and what is no message is refused without harm."""

import os
import random
from typing import Any

import msgspec
import pytest

from jaxserve.engine.messages import (
    Abort,
    Add,
    Beat,
    Call,
    EngineStats,
    Failed,
    FromEngine,
    Located,
    MessageError,
    Outputs,
    Progress,
    Reply,
    Stop,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from jaxserve.engine.request import (
    EngineRequest,
    FinishReason,
    GrammarSpec,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)

PARAMS = SamplingParams(
    temperature=0.5,
    logit_bias={3: -1.5},
    allowed_token_ids=(1, 2),
    bad_words_token_ids=((4,), (5, 6)),
    seed=2**63 - 1,
    stop=("a",),
    grammar=GrammarSpec(kind="regex", source="a+", begin_after=(7,)),
)

TO_ENGINE: list[ToEngine] = [
    Add(EngineRequest(request_id="r", prompt_token_ids=[1, 2], params=PARAMS, resumed_token_ids=[9])),
    Abort(["a", "b"]),
    Call(3, "flush_cache", {"now": True}),
    Stop(),
]
FROM_ENGINE: list[FromEngine] = [
    Located("model", "tokenizer"),
    Progress("weights", 1, 2, "bytes"),
    Failed("cause", "fix"),
    Beat(7, 0.5),
    Outputs(
        [
            TokenOutput(
                request_id="r",
                token_ids=[1],
                logprobs=[TokenLogprobs(1, -0.5, 1, [1, 2], [-0.5, -1.0])],
                finish_reason=FinishReason.STOP,
            )
        ],
        EngineStats(num_running=1),
    ),
    Reply(3, {"ok": 1}),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_to_the_engine(message: ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_from_the_engine(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


def test_defaults_are_not_sent() -> None:
    small = Add(EngineRequest(request_id="r", prompt_token_ids=[], params=SamplingParams()))
    assert len(encode(small)) < 120


def test_random_frames_are_refused() -> None:
    rng = random.Random(0)
    whole = [encode(message) for message in TO_ENGINE]
    for _ in range(5000):
        frame = bytearray(rng.choice(whole) if rng.random() < 0.5 else os.urandom(rng.randrange(64)))
        for _ in range(rng.randrange(1, 4)):
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            decode_to_engine(bytes(frame))
        except MessageError:
            pass


def test_a_deep_frame_is_refused() -> None:
    with pytest.raises(MessageError):
        decode_to_engine(b"\x91" * 100_000)


@pytest.mark.parametrize("value", [-1, 2**31, 2**63, 1.5, "1"])
@pytest.mark.parametrize("name", ["n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"])
def test_numbers_that_no_array_takes_are_refused(name: str, value: Any) -> None:
    """They would fail a step of everybody."""
    params = {"max_tokens": 3, name: value}
    request = {"request_id": "r", "prompt_token_ids": [1], "params": params}
    with pytest.raises(MessageError):
        decode_to_engine(msgspec.msgpack.encode({"type": "add", "request": request}))
    good = msgspec.msgpack.encode({"type": "add", "request": request | {"params": {name: 1}}})
    assert isinstance(decode_to_engine(good), Add)
