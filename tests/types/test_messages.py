"""Frames between the processes: what is sent arrives, and what is no message is refused without harm."""

import os
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxserve.errors import InvalidValueError
from jaxserve.types.calls import UpdateFromFile
from jaxserve.types.messages import (
    Abort,
    Add,
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
from jaxserve.types.sampling import EngineRequest, GrammarSpec, SamplingParams
from jaxserve.types.step import FinishReason, TokenLogprobs, TokenOutput

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
    Add.of(EngineRequest(request_id="r", prompt_token_ids=[1, 2], params=PARAMS, resumed_token_ids=[9])),
    Abort(["a", "b"]),
    Call(3, UpdateFromFile(path="x", version="1", partial=True)),
    Stop(),
]
FROM_ENGINE: list[FromEngine] = [
    Located("tokenizer"),
    Progress("weights", 1, 2, "bytes"),
    Failed("cause", "fix"),
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
        ["r"],
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
    small = Add.of(EngineRequest(request_id="r", prompt_token_ids=[], params=SamplingParams()))
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
    assert isinstance(decode_to_engine(add_frame(params | {name: 1})), Add)
    with pytest.raises(MessageError):
        decode_to_engine(add_frame(params))


def add_frame(params: dict[str, Any], **changes: Any) -> bytes:
    request = {"request_id": "r", "prompt_token_ids": [], "params": params}
    message = {"type": "add", "prompt": bytes(8), "request": request, "siblings": [["r"]]}
    return msgspec.msgpack.encode(message | changes)


@pytest.mark.parametrize("changes", [{"prompt": bytes(7)}, {"prompt": "abcd"}, {"siblings": []}, {"siblings": ["r"]}])
def test_a_request_without_a_whole_prompt_or_siblings_is_refused(changes: dict[str, Any]) -> None:
    assert isinstance(decode_to_engine(add_frame({})), Add)
    with pytest.raises(MessageError):
        decode_to_engine(add_frame({}, **changes))


def siblings(prompt: list[int], count: int) -> list[EngineRequest]:
    params = [msgspec.structs.replace(PARAMS, seed=7 + i) for i in range(count)]
    return [
        EngineRequest(
            request_id=f"{i:x}",
            client_id="c",
            group="0",
            prompt_token_ids=prompt,
            params=each,
            resumed_token_ids=[i] * i,
        )
        for i, each in enumerate(params)
    ]


def test_siblings_cross_with_one_prompt() -> None:
    requests = siblings([0, 1, 2**31 - 1, -(2**31)], 3)
    message = decode_to_engine(encode(Add.of(*requests)))
    assert isinstance(message, Add)
    found = message.requests()
    assert found == requests
    assert all(request.prompt_token_ids is found[0].prompt_token_ids for request in found)
    assert message.token_ids.tolist() == requests[0].prompt_token_ids and message.token_ids.dtype == np.int32
    prompt = [5] * 10_000
    assert len(encode(Add.of(*siblings(prompt, 128)))) < len(encode(Add.of(*siblings(prompt, 1)))) + 128 * 200


@pytest.mark.parametrize("token_id", [2**31, -(2**31) - 1, 2**70, 1.5, "1", None])
def test_a_prompt_that_is_no_int32_is_refused_before_it_is_sent(token_id: Any) -> None:
    with pytest.raises(InvalidValueError) as error:
        Add.of(EngineRequest(request_id="r", prompt_token_ids=[1, token_id], params=PARAMS))
    assert error.value.param == "prompt"


@pytest.mark.parametrize(
    "changes",
    [
        {"priority": 2**31},
        {"deadline": 1e13},
        {"params": SamplingParams(top_k=-2)},
        {"params": SamplingParams(min_p=1e9)},
    ],
)
def test_what_would_not_be_decoded_is_refused_before_it_is_sent(changes: dict[str, Any]) -> None:
    """A frame that the engine drops is a request that is never answered."""
    request = msgspec.structs.replace(EngineRequest(request_id="r", prompt_token_ids=[1], params=PARAMS), **changes)
    with pytest.raises(InvalidValueError):
        Add.of(request)
