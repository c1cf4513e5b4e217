"""An engine whose tokens are known: the real AsyncEngine over a link with no model behind it.

Tokenizer, detokenizer, stop strings, queue and errors are the real ones; only the tokens come from a script.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import jaxserve
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.extras import ExtraParams, SamplingMask, TokenExtras
from jaxserve.types.messages import (
    Abort,
    AdapterStatus,
    Add,
    Call,
    EngineInfo,
    EngineStats,
    FromEngine,
    Located,
    Outputs,
    Ready,
    Reply,
    ToEngine,
)
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.step import FinishReason, TokenLogprobs, TokenOutput

DEMO = Path(jaxserve.__file__).parent / "assets" / "demo"
MAX_MODEL_LEN = 512
VECTOR = 8

Script = Callable[[list[int], SamplingParams], list[int] | str]
# what the engine answers to a call; True to others
CALLS = {
    "waiting": [],
    "state": {"paused": False, "asleep": []},
    "read_weights": [[0.5, -1.0]],
    "sleep": ["kv_cache", "weights"],
    "wake": [],
    "update_from_directory": "1",
    "update_from_file": "1",
    "set_weight_version": "1",
    "load_adapter": {"name": "sql", "digest": "1" * 32, "rank": 8, "version": 2},
}


def demo_info(tokenizer: Tokenizer) -> EngineInfo:
    return EngineInfo(
        model_path="demo-path",
        served_names=["demo", "org/demo"],
        architecture="FakeForCausalLM",
        dtype="float32",
        vocab_size=tokenizer.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        page_size=16,
        num_pages=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        attention="none",
        devices=["fake:0"],
        num_programs=0,
        eos_token_ids=list(tokenizer.eos_token_ids),
        generation_defaults={},
        memory_plan={},
        seconds={"load": 0.0},
        embedding_size=VECTOR,
    )


def vector_of(token_ids: list[int]) -> np.ndarray:
    """The embedding of a text, float32 [VECTOR] of length one: it depends on every token and its position."""
    ids = np.array(token_ids) + 1
    vector = np.sin(np.outer(np.arange(1, VECTOR + 1), ids) + np.arange(len(ids))).sum(axis=1)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def logprobs_of(token_id: int, vocab_size: int, top: int, watched: Sequence[float] = ()) -> TokenLogprobs:
    """Some numbers that depend on the token only; an odd token is the second most likely.

    watched: the log-probabilities of the watched tokens
    """
    values = [float(np.float32(-0.3 - 0.1 * (token_id % 7) - 0.7 * k)) for k in range(20)]
    others = [(token_id + k) % vocab_size for k in range(1, 20)]
    place = token_id % 2
    ids = [*others[:place], token_id, *others[place:]]
    return TokenLogprobs(token_id, values[place], place + 1, ids[:top], values[:top], list(watched))


def experts_of(token_ids: list[int]) -> bytes:
    """Two layers with three experts each: ids that depend on the token, the layer and the place."""
    return (np.array(token_ids)[:, None, None] + 10 * np.arange(6).reshape(2, 3)).astype("<i4").tobytes()


def mask_of(token_id: int) -> SamplingMask:
    """The token and, if it is odd, one other candidate."""
    other = [token_id + 1] * (token_id % 2)
    value = -0.5 if other else 0.0
    return SamplingMask(value, [token_id, *other], [value, *(-2.0 for _ in other)])


def _extras(sequence: list[int], num_prompt: int, count: int, asked: ExtraParams) -> TokenExtras:
    """Those of the `count`th token after the prompt."""
    extras, prompt, place = TokenExtras(), sequence[:num_prompt], num_prompt + count - 1
    if asked.routed_experts:
        extras.routed_experts = experts_of(sequence[place - 1 : place])
        extras.prompt_routed_experts = experts_of(prompt) if count == 1 else None
    if asked.hidden_states:
        extras.hidden_states = vector_of(sequence[:place]).tobytes()
    if asked.hidden_states == "all" and count == 1:
        extras.prompt_hidden_states = b"".join(vector_of(prompt[: n + 1]).tobytes() for n in range(num_prompt))
    return extras


class FakeLink:
    """The engine's end of the wire: answers every Add with the script's tokens, one an output."""

    def __init__(self, script: Script | None = None) -> None:
        self.tokenizer = Tokenizer.from_directory(DEMO)
        self.info = demo_info(self.tokenizer)
        self.script: Script = script or (lambda prompt, params: f"I count {len(prompt)} tokens, é and 日本 too.")
        self.watched: Callable[[list[int], int], float] = lambda prompt, token_id: -float(token_id)
        self.delay = 0.0  # seconds a token
        self.hold = asyncio.Event()
        self.hold.set()  # cleared: no token is made
        self.ready = True
        self.answers_calls = True
        self.seen: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.calls: list[Call] = []
        self.adapters: list[AdapterStatus] = []
        self.running: dict[str, asyncio.Task[None]] = {}
        self._messages: asyncio.Queue[FromEngine] = asyncio.Queue()

    async def start(self) -> None:
        if self.ready:
            self.become_ready()

    def become_ready(self) -> None:
        self._messages.put_nowait(Located(str(DEMO)))
        self._messages.put_nowait(Ready(self.info))

    def say(self, message: FromEngine) -> None:
        self._messages.put_nowait(message)

    async def receive(self) -> FromEngine:
        return await self._messages.get()

    def send(self, message: ToEngine) -> None:
        match message:
            case Add():
                for request in message.requests():
                    self.seen.append(request)
                    self.running[request.request_id] = asyncio.create_task(self._run(request))
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._abort(request_id)
            case Call():
                self.calls.append(message)
                if not self.answers_calls:
                    return
                result = CALLS.get(message.call.name, True)
                error = str(result) if isinstance(result, Exception) else None
                self._messages.put_nowait(Reply(message.call_id, None if error else result, error, status=500))

    def pulse(self) -> None: ...

    def in_work(self) -> list[str]:
        return []

    def dump_stacks(self) -> None: ...

    def kill(self) -> None: ...

    async def stop(self) -> None:
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        task = self.running.pop(request_id, None)
        if task is not None:
            task.cancel()
            self._put(TokenOutput(request_id=request_id, finish_reason=FinishReason.ABORT))

    def _put(self, output: TokenOutput) -> None:
        running = len(self.running)
        stats = EngineStats(num_running=running, num_pages_used=16 * running, adapters=self.adapters)
        self._messages.put_nowait(Outputs([output], stats))

    async def _run(self, request: EngineRequest) -> None:
        for number, output in enumerate(self._outputs(request)):
            await self.hold.wait()
            await asyncio.sleep(self.delay if number else 0)
            if output.finish_reason is not None:
                self.running.pop(request.request_id, None)
            self._put(output)

    def _outputs(self, request: EngineRequest) -> list[TokenOutput]:
        params, prompt = request.params, request.prompt_token_ids
        if params.embed:
            vector = vector_of(prompt).tobytes()
            return [TokenOutput(request_id=request.request_id, finish_reason=FinishReason.STOP, embedding=vector)]
        if params.max_tokens == 0:
            return [
                TokenOutput(
                    request_id=request.request_id,
                    finish_reason=FinishReason.LENGTH,
                    prompt_logprobs=self._prompt_logprobs(prompt, params),
                )
            ]
        done = len(request.resumed_token_ids)
        reply = self.script([*prompt, *request.resumed_token_ids], params)
        token_ids = self.tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else list(reply)
        if params.ignore_eos:
            token_ids = (token_ids * 100)[: params.max_tokens]
        else:
            token_ids.append(self.info.eos_token_ids[0])
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.info.eos_token_ids)}
        outputs = []
        last = params.max_tokens and params.max_tokens - done
        wants_extras = params.extras.wanted
        for count, token_id in enumerate(token_ids[:last], done + 1):
            output = TokenOutput(request_id=request.request_id, token_ids=[token_id])
            if not (outputs or request.is_answered):
                output.num_cached_tokens = (len(prompt) - 1) // 16 * 16  # the last token is always computed
                output.prompt_logprobs = self._prompt_logprobs(prompt, params)
            if params.logprobs is not None:
                watched = [self.watched(prompt, each) for each in params.extras.logprob_token_ids]
                output.logprobs = [logprobs_of(token_id, self.info.vocab_size, params.logprobs, watched)]
            if wants_extras:
                output.extras = _extras([*prompt, *token_ids], len(prompt), count, params.extras)
                if params.extras.sampling_mask:
                    output.extras.sampling_masks = [mask_of(token_id)]
            if token_id in ends:
                output.finish_reason, output.stop_token_id = FinishReason.STOP, token_id
            elif count == params.max_tokens:
                output.finish_reason = FinishReason.LENGTH
            outputs.append(output)
            if output.finish_reason is not None:
                break
        return outputs

    def _prompt_logprobs(self, prompt: list[int], params: SamplingParams) -> list[TokenLogprobs | None] | None:
        top = params.prompt_logprobs
        if top is None:
            return None
        watched = [-float(each) for each in params.extras.logprob_token_ids]
        return [None, *(logprobs_of(token_id, self.info.vocab_size, top, watched) for token_id in prompt[1:])]


def fake_engine(config: Config | None = None, link: FakeLink | None = None) -> tuple[AsyncEngine, FakeLink]:
    link = link or FakeLink()
    return AsyncEngine(config or Config(), link), link
