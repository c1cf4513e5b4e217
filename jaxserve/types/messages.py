"""Messages between the API process and the engine process: msgpack frames of tagged structs.

Nothing else crosses the private socket and nothing is unpickled. A frame that does not decode raises MessageError.

    API process  --ToEngine-->    Add · Abort · Call · Stop
                 <--FromEngine--  Located · Progress · Ready · Failed · Outputs · Reply

With `server.workers`, the same messages connect the workers to the main process, and some more:

    worker       --FromWorker-->  Add · Abort · Reply
                 <--ToWorker--    Located · Ready · EngineState · Outputs · RequestRefused · Call
"""

from __future__ import annotations

from array import array
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from jaxserve.errors import (
    EngineDeadError,
    HTTPError,
    InvalidValueError,
    JaxserveError,
    NotReadyError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
)
from jaxserve.types.bounds import Int32
from jaxserve.types.calls import EngineCall, WorkerCall
from jaxserve.types.page_keys import PageEvents
from jaxserve.types.picture import PictureInfo
from jaxserve.types.sampling import EngineRequest
from jaxserve.types.step import FIRST_VERSION, DraftCounters, TokenOutput


class MessageError(JaxserveError):
    """A frame that is not a valid message."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a ready engine. They do not change until it stops, `useful_rows` excepted."""

    model_path: str  # as the operator wrote it
    served_names: list[str]
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int  # tokens, prompt plus output
    page_size: int  # tokens
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    attention: str  # the selected attention backend
    devices: list[str]
    tensor: int = 1  # number of devices over which heads are split
    expert: int = 1  # number of devices over which experts are split
    split: str = ""  # why the devices are split so, for the operator; "": the configuration says it
    num_programs: int
    eos_token_ids: list[int]
    generation_defaults: dict[str, float | int]  # sampling defaults of generation_config.json
    memory_plan: dict[str, Any]  # bytes by purpose, and the largest concurrency
    seconds: dict[str, float]  # start-up time by phase
    num_compiled: int = 0  # XLA compilations of the start; 0 if every program was found in a bundle or in the cache
    useful_rows: int = 2**31  # decode rows beyond which throughput does not rise
    is_embedding: bool = False  # an embedding model, which generates no text
    embedding_size: int = 0
    embedding_normalized: bool = True  # embeddings have L2 norm 1
    embedding_prompt: str = ""  # goes before each text that is embedded
    labels: list[str] = []  # of a classification head; a model with one generates no text
    multi_label: bool = False  # each label has a probability of its own: sigmoid, not softmax
    regression: bool = False  # the classification head gives values, not logits of labels
    raw_scores: bool = False  # relevance is the head's value itself, without a sigmoid
    label_token_ids: tuple[int, ...] = ()  # if a reranker answers with a word: the ids of not relevant and relevant
    lora_slots: int = 0  # adapters on the devices at once; 0: none are served
    routed: tuple[int, int] = (0, 0)  # number of MoE layers, and routed experts per token in each
    pictures: PictureInfo | None = None  # None: the model takes no pictures
    drafter: str = ""  # where drafts come from, for the operator; "": there are none

    @property
    def task(self) -> Literal["generate", "embed", "classify"]:
        """The model's task. Only `generate` makes text."""
        if self.labels:
            return "classify"
        return "embed" if self.is_embedding else "generate"

    @property
    def num_kv_tokens(self) -> int:
        return self.num_pages * self.page_size


class WaitingRequest(msgspec.Struct, frozen=True):
    """A request that has no slot, with a value of the scheduler's `WaitReason`."""

    request_id: str  # the engine id
    client_id: str
    reason: str
    seconds: float  # since its arrival in the engine


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter, and its requests.

    digest: of its tensors and scales. version: how often its name was loaded. path: empty if it came as arrays
    """

    name: str
    digest: str
    rank: int
    version: int
    path: str = ""
    pinned: bool = False
    num_running: int = 0
    num_waiting: int = 0


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Current gauges and counters since the start, for metrics, logs and routers."""

    num_running: int = 0
    num_waiting: int = 0
    num_compiling: int = 0  # of these, waiting for their grammar to be compiled
    num_waiting_tokens: int = 0
    num_pages_free: int = 0
    num_pages_cached: int = 0
    num_pages_used: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # this and all below: counters
    computed_prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    compiles: int = 0  # XLA compilations after the engine was ready
    host_seconds: float = 0.0  # host time of the steps: scheduling, packing, unpacking
    step_tokens: int = 0  # prompt tokens computed plus tokens sampled, summed over the steps
    step_sizes: list[int] = []  # number of steps by size, see scheduler_stats.STEP_SIZES
    drafts: DraftCounters | None = None  # None: there is no speculation
    weight_version: str = FIRST_VERSION
    adapters: list[AdapterStatus] = []
    details: dict[str, float] = {}


def with_measured(info: EngineInfo, stats: EngineStats) -> EngineInfo:
    """Return the properties with the useful rows that the engine has measured since it was ready."""
    rows = stats.details.get("useful_rows")
    return info if rows in (None, info.useful_rows) else msgspec.structs.replace(info, useful_rows=int(rows))


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """The part of a sequence that differs from its siblings."""

    request_id: str
    seed: int | None = None
    resumed_token_ids: list[Int32] = []
    is_answered: bool = False


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Submits one request with one sequence per sibling. Values that siblings share are sent once."""

    prompt: bytes  # int32, little-endian
    request: EngineRequest  # shared by all siblings; without the prompt and without the fields of Sibling
    siblings: list[Sibling]

    def __post_init__(self) -> None:
        if len(self.prompt) % 4 or not self.siblings:
            raise ValueError("a request has siblings and a prompt of int32 tokens")

    @classmethod
    def of(cls, *requests: EngineRequest) -> Add:
        """Build the message for sequences of one request. They may differ only in the fields of Sibling.

        Raises InvalidValueError for a value that the engine would refuse to decode.
        """
        first = requests[0]
        assert all(request.prompt_token_ids is first.prompt_token_ids for request in requests)
        shared = msgspec.structs.replace(first, prompt_token_ids=[], resumed_token_ids=[], is_answered=False)
        siblings = [
            Sibling(each.request_id, each.params.seed, each.resumed_token_ids, each.is_answered) for each in requests
        ]
        try:
            prompt = np.asarray(array("i", first.prompt_token_ids), "<i4").tobytes()
        except (OverflowError, TypeError) as error:
            raise InvalidValueError(f"the prompt's token ids: {error}", param="prompt") from None
        try:
            # Without the pictures, which have megabytes and are checked where they are made and by the engine.
            _REQUEST.decode(_ENCODER.encode(msgspec.structs.replace(shared, pictures=())))
        except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
            raise InvalidValueError(f"the request cannot be run: {error}") from None
        return cls(prompt, shared, siblings)

    @property
    def token_ids(self) -> np.ndarray:
        """The token ids of the prompt, int32 [n]."""
        return np.frombuffer(self.prompt, "<i4")

    def requests(self) -> list[EngineRequest]:
        """Return one request per sibling. They share one list of prompt tokens; do not modify it."""
        prompt, params = self.token_ids.tolist(), self.request.params
        return [
            msgspec.structs.replace(
                self.request,
                request_id=each.request_id,
                prompt_token_ids=prompt,
                params=msgspec.structs.replace(params, seed=each.seed),
                resumed_token_ids=each.resumed_token_ids,
                is_answered=each.is_answered,
            )
            for each in self.siblings
        ]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A call to an engine or to a worker. It is answered by one Reply."""

    call_id: int
    call: EngineCall | WorkerCall


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop the engine process now. Running requests are lost."""


class Located(msgspec.Struct, frozen=True, tag="located"):
    """Checkpoint and tokenizer are in local directories. The API process may load its tokenizer."""

    tokenizer_dir: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Start-up progress: `done` of `total` in `unit` ("bytes", "programs") of a phase."""

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
    expected: bool = True  # False: a bug; the engine's log has the traceback


class Outputs(msgspec.Struct, frozen=True, tag="outputs", omit_defaults=True):
    outputs: list[TokenOutput]
    stats: EngineStats | None = None
    admitted: list[str] = []  # ids of the sequences that were given a slot in the step
    pages: PageEvents | None = None  # changes of the prefix cache, if the server has several engines


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    call_id: int
    result: Any = None
    error: str | None = None
    status: int = 400  # of the error


class EngineState(msgspec.Struct, frozen=True, tag="state"):
    """The state of the engine as the main process sees it (client/supervisor.py)."""

    phase: Literal["loading", "ready", "restarting", "draining", "dead"]
    detail: str = ""


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The error that ends a sequence of a worker. kind: name of the error's class"""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    limit: str = ""

    @classmethod
    def of(cls, request_id: str, error: HTTPError) -> RequestRefused:
        limit = error.limit if isinstance(error, QueueFullError) else ""
        return cls(request_id, type(error).__name__, error.message, error.param, error.code, limit)

    def error(self) -> HTTPError:
        error = _KINDS.get(self.kind, ServerError)(self.message, param=self.param)
        error.code = self.code
        if isinstance(error, QueueFullError):
            error.limit = self.limit
        return error


_KINDS: dict[str, type[HTTPError]] = {
    kind.__name__: kind
    for kind in (InvalidValueError, QueueFullError, NotReadyError, EngineDeadError, RequestTimeoutError)
}

ToEngine = Add | Abort | Call | Stop

# The engine receives at most so much between two steps, in units of `weight`: 256 sequences, or prompts of 262,144
# tokens. Either takes 3 to 5 ms: a sequence 12 us, a token 10 to 20 ns.
MAX_WEIGHT = 2**20
SEQUENCE_WEIGHT = 2**12


def weight(message: ToEngine) -> int:
    """Return the cost of handling a message: 1 per byte of the prompt plus SEQUENCE_WEIGHT per sequence."""
    return (
        len(message.prompt) + SEQUENCE_WEIGHT * len(message.siblings) if isinstance(message, Add) else SEQUENCE_WEIGHT
    )


FromEngine = Located | Progress | Ready | Failed | Outputs | Reply
FromWorker = Add | Abort | Reply
ToWorker = Located | Ready | EngineState | Outputs | RequestRefused | Call

_ENCODER = msgspec.msgpack.Encoder()
_REQUEST = msgspec.msgpack.Decoder(EngineRequest)
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)
_FROM_WORKER = msgspec.msgpack.Decoder(FromWorker)
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_M = TypeVar("_M")


def encode(message: ToEngine | FromEngine | ToWorker) -> bytes:
    return _ENCODER.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Decode a frame sent to the engine. Raises MessageError if it is not a valid message."""
    return _decoded(_TO_ENGINE, frame, "to the engine")


def decode_from_engine(frame: bytes) -> FromEngine:
    """Decode a frame sent by the engine. Raises MessageError if it is not a valid message."""
    return _decoded(_FROM_ENGINE, frame, "from the engine")


def decode_from_worker(frame: bytes) -> FromWorker:
    """Decode a frame sent by a worker. Raises MessageError if it is not a valid message."""
    return _decoded(_FROM_WORKER, frame, "from a worker")


def decode_to_worker(frame: bytes) -> ToWorker:
    """Decode a frame sent to a worker. Raises MessageError if it is not a valid message."""
    return _decoded(_TO_WORKER, frame, "to a worker")


def _decoded(decoder: msgspec.msgpack.Decoder[_M], frame: bytes, whose: str) -> _M:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"no message {whose}: {error}") from None
