"""What crosses the private socket between the API process and the engine process: msgpack frames of tagged structs.

Nothing else crosses it, and nothing is unpickled: a frame that does not decode is refused by `MessageError`.

    API process  --ToEngine-->    Add · Abort · Call · Stop
                 <--FromEngine--  Located · Progress · Ready · Failed · Beat · Outputs · Reply
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.engine.request import EngineRequest, TokenOutput
from jaxserve.errors import JaxserveError


class MessageError(JaxserveError):
    """A frame that is no message."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a ready engine is: fixed until it stops."""

    model_path: str  # as the operator named it
    served_names: list[str]
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and output
    page_size: int  # tokens
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    attention: str  # the backend that was chosen
    devices: list[str]
    num_programs: int
    eos_token_ids: list[int]
    generation_defaults: dict[str, float | int]  # sampling defaults of generation_config.json
    memory_plan: dict[str, Any]  # bytes by purpose, largest concurrency
    seconds: dict[str, float]  # start-up time by phase
    useful_rows: int = 2**31  # of a decode step: more of them bring no more tokens a second
    is_embedding: bool = False  # made for embeddings: no text is generated
    embedding_size: int = 0
    embedding_normalized: bool = True  # embeddings have length one
    routed: tuple[int, int] = (0, 0)  # sparse layers, and the experts that each of them gives a token to

    @property
    def num_kv_tokens(self) -> int:
        return self.num_pages * self.page_size


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges now and counters since the start, for metrics, logs and routers."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_pages_free: int = 0
    num_pages_cached: int = 0
    num_pages_used: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # counters from here
    computed_prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    compiles: int = 0  # XLA compilations after ready
    host_seconds: float = 0.0  # host work of the steps: scheduler, pack, unpack
    details: dict[str, float] = {}


class Add(msgspec.Struct, frozen=True, tag="add"):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """An administrative call; answered by one Reply."""

    call_id: int
    method: str
    args: dict[str, Any] = {}


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the engine process now; what still runs is lost to it."""


class Located(msgspec.Struct, frozen=True, tag="located"):
    """The checkpoint and the tokenizer are local directories; the API process may load its tokenizer."""

    model_dir: str
    tokenizer_dir: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Start-up: `done` of `total` in `unit` ("bytes", "programs") of a phase."""

    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start (a cause and a fix for the operator), or its loop raised."""

    message: str
    fix: str | None = None
    expected: bool = True  # False: a bug, see the engine's log


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent by the engine's heartbeat thread. `busy_seconds`: how long the current loop turn has lasted."""

    step: int
    busy_seconds: float


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: list[TokenOutput]
    stats: EngineStats | None = None


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    call_id: int
    result: Any = None
    error: str | None = None


ToEngine = Add | Abort | Call | Stop
FromEngine = Located | Progress | Ready | Failed | Beat | Outputs | Reply

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _ENCODER.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    try:
        return _TO_ENGINE.decode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"no message to the engine: {error}") from None


def decode_from_engine(frame: bytes) -> FromEngine:
    try:
        return _FROM_ENGINE.decode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"no message from the engine: {error}") from None
