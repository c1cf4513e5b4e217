"""The synchronous in-process engine: the caller's thread runs the steps. No sockets, no HTTP. For research and tests.

    engine = TextEngine("DIR")
    engine.generate(["Once upon a time"], SamplingParams(max_tokens=32))

Step by step: `add_request`, then `step` until `has_unfinished` is False. `engine.runner` is the device side; its
programs are plain functions over pytrees. `close`, or leaving a `with` block, ends the mask threads.

EngineLock lets one thread at a time use the engine, and delays Ctrl-C to the end of a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import jax
import msgspec
import numpy as np

from jaxserve.config import Config
from jaxserve.engine.control import EngineControl
from jaxserve.engine.core import EngineCore, StepError
from jaxserve.engine.factory import build_engine
from jaxserve.engine.page_handover import PageHandover
from jaxserve.errors import ConfigError, HTTPError, InvalidValueError, ServerError
from jaxserve.runtime.saved_programs.executable import UnrunnableProgramError, lacks_function
from jaxserve.text.detokenizer import RequestOutput, SequenceText, error_of, make_stops
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.calls import Mode
from jaxserve.types.extras import TokenExtras
from jaxserve.types.messages import Add, EngineInfo, FromEngine, Located
from jaxserve.types.page_keys import namespace_of
from jaxserve.types.picture import Picture
from jaxserve.types.sampling import EngineRequest, SamplingParams, request_seed, siblings
from jaxserve.types.step import FIRST_VERSION, FinishReason, TokenLogprobs, TokenOutput, joined_versions

logger = logging.getLogger(__name__)

POLL = 0.001  # seconds between two tries of a coroutine, which must not block its event loop


class EngineLock:
    """Lets one thread at a time run code under `held` or `awaited`. A thread may nest them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._later: deque[Callable[[], None]] = deque()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no other thread has the lock. A KeyboardInterrupt during the body is raised at its end."""
        with self._lock, interrupts_wait(), self._then_later():
            yield

    @contextlib.asynccontextmanager
    async def awaited(self) -> AsyncIterator[None]:
        """Do the same as `held` for a coroutine whose body awaits nothing."""
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(POLL)
        try:
            with self._then_later():
                yield
        finally:
            self._lock.release()

    def soon(self, work: Callable[[], None]) -> None:
        """Run `work` now, or when the thread that has the lock gives it back. Never waits.

        The garbage collector may call this while the other thread waits for this one.
        """
        self._later.append(work)
        if self._lock.acquire(blocking=False):
            try:
                self._run_later()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _then_later(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._run_later()

    def _run_later(self) -> None:
        while self._later:
            self._later.popleft()()


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the body. A second Ctrl-C interrupts at once.

    Does nothing outside of the main thread, and if the program handles SIGINT itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > 1:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if len(caught) == 1:
            raise KeyboardInterrupt


Prompt = str | Sequence[int] | Mapping[str, Any]  # a mapping has `prompt` or `prompt_token_ids`, as vLLM's has
Params = SamplingParams | Mapping[str, Any]  # a mapping of names that a call of SamplingParams takes
Sink = Callable[[RequestOutput], None]  # receives the outputs of a sequence


# arguments of vLLM's and SGLang's generate -> ours of the same meaning
_OTHER_NAMES = {
    **dict.fromkeys(("prompt", "prompt_token_ids", "input_ids"), "prompts"),
    "sampling_params": "params",
    "lora_path": "adapter",
}
# -> what to use instead
_INSTEAD = {
    "custom_logit_processor": "a constraint of SamplingParams: no code of requests is run",
    "image_data": "chat, with the images in the messages",
    "logprob_start_len": "SamplingParams(prompt_logprobs=...)",
    "lora_request": "load_adapter(name, path), and adapter=name here",
    "multi_modal_data": "chat, with the images in the messages",
    "priority": "add_request(prompt, params, priority=...)",
    "return_hidden_states": "SamplingParams(extras=ExtraParams(hidden_states='last'), logprobs=0)",
    "return_logprob": "SamplingParams(logprobs=...)",
    "rid": "add_request(prompt, params, request_id=...)",
    "stream": "AsyncEngine, whose generate streams",
    "token_ids_logprob": "SamplingParams(extras=ExtraParams(logprob_token_ids=...), logprobs=0)",
    "tokenization_kwargs": "token ids as prompts",
    "top_logprobs_num": "SamplingParams(logprobs=...)",
}

_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes_other_names(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a method take other engines' names of its arguments. The others are an InvalidValueError, not a TypeError."""
    signature = inspect.signature(method)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    names = str(inspect.Signature(bare)).strip("()").removeprefix("self, ")
    has_options = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())  # it checks them itself

    @functools.wraps(method)
    def call(*args: _P.args, **named: _P.kwargs) -> _R:
        given: dict[str, Any] = {}
        for name, value in named.items():
            own = name if name in signature.parameters else _OTHER_NAMES.get(name, name)
            if own in given:
                raise InvalidValueError(f"{own} is given twice, once as {name}", param=name)
            if own in _INSTEAD and not has_options and own not in signature.parameters:
                if value is not None and value is not False:
                    raise InvalidValueError(f"{method.__name__} has no {name}: use {_INSTEAD[name]}", param=name)
                continue
            given[own] = value
        try:
            signature.bind(*args, **given)
        except TypeError as error:
            raise InvalidValueError(f"{method.__name__}({names}): {error}", param="") from None
        return method(*args, **given)

    return call


@dataclass(slots=True)
class Completion:
    """One finished sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    extras: TokenExtras | None = None  # of all tokens, if params.extras ask for some
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    weight_versions: tuple[str, ...] = ()  # labels of the weights that made it; empty: the first weights, or no token
    embedding: bytes | None = None  # float32 [D], little-endian, if params.embed
    error: HTTPError | None = None  # why it failed; set with finish_reason error

    def add(self, output: RequestOutput) -> None:
        """Append one output of the sequence."""
        before = self.weight_versions or ((FIRST_VERSION,) if self.token_ids else ())
        if before != output.weight_versions:
            labels = joined_versions(before, output.weight_versions)
            self.weight_versions = () if labels == (FIRST_VERSION,) else labels
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.extras = TokenExtras.joined([self.extras, output.extras])
        self.finish_reason, self.matched_stop = output.finish_reason, output.matched_stop
        self.num_prompt_tokens = output.num_prompt_tokens
        self.num_cached_tokens = output.num_cached_tokens
        self.embedding = output.embedding
        self.error = output.error


class Completions(list[Completion]):
    """The n completions of one prompt.

    prompt: the text that was given; None: token ids were given. prompt_token_ids: its tokens
    """

    def __init__(self, completions: Iterable[Completion], prompt: str | None, prompt_token_ids: list[int]) -> None:
        super().__init__(completions)
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids

    @property
    def outputs(self) -> list[Completion]:
        """Return the completions, under vLLM's name."""
        return self

    if not TYPE_CHECKING:  # a type checker reports a text as an index by itself

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, str):  # SGLang's answers are dicts
                raise TypeError(f"an answer is a list of completions, [0].text and so on: it has no [{index!r}]")
            return super().__getitem__(index)


class TextEngine:
    """A model with its scheduler and text processing in this process.

    model: hub id or directory; None is the embedded demo model. `keys` are configuration keys by bare name
    (`max_num_seqs=8`); alternatively pass a whole `config`. Raises ConfigError.

    Its methods may be called in several threads. Ctrl-C takes effect between two steps.
    """

    def __init__(self, model: str | None = None, *, config: Config | None = None, **keys: Any) -> None:
        self.config = config or Config.of(model, **keys)
        if self.config.mesh.replicas > 1:
            message = "mesh.replicas is for servers; an engine in this process is one engine"
            raise ConfigError(message, fix="leave mesh.replicas out, or use AsyncEngine")
        self._tokenizer_dir = ""
        built = build_engine(self.config, self._on_message, seed=request_seed(self.config.runtime.random_seed))
        self.core: EngineCore = built.core
        self._control, self._handover, self._discard = built.control, built.handover, built.discard
        self.info: EngineInfo = built.info
        self.tokenizer = Tokenizer.from_directory(self._tokenizer_dir)
        self._sequences: dict[str, tuple[SequenceText, Sink]] = {}  # by engine id
        self._unread: list[RequestOutput] = []  # returned by the next `step`
        self._closed = False
        self._pid = os.getpid()
        self._lock = EngineLock()
        self._ids = itertools.count()
        self._names = itertools.count()

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Located):
            self._tokenizer_dir = message.tokenizer_dir

    def close(self) -> None:
        """Abort running requests and end the engine's threads. Later requests raise ServerError."""
        with self._lock.held():
            self._closed = True
            if self._is_forked:
                return  # its threads and devices are the parent's
            self._abort(list(self._sequences))
            self._unread.clear()
            self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _is_forked(self) -> bool:
        """Whether this process was forked from the one that made the engine, so that it has none of its threads."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        if self._is_forked:
            message = "this process was forked from the engine's, and has none of its threads and devices"
            raise ServerError(f"{message}: make an engine here, or use multiprocessing's spawn")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ServerError("the engine is closed")

    def _check_runs(self) -> None:
        """Raise ServerError if waiting for outputs would never end."""
        self._check_open()
        if self.core.serving.halted:
            raise ServerError("the engine is paused or asleep")

    @property
    def runner(self) -> Any:
        """Return the ModelRunner: weights, KV cache and compiled programs."""
        return self.core.runner

    @takes_other_names
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        progress: bool = False,
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = False,
        adapter: str | None = None,
    ) -> list[Completions]:
        """Generate n completions for each prompt (text, token ids, or one of them in a mapping), batched.

        params: of all prompts, or one for each
        progress: whether a bar of finished prompts is shown on stderr
        sampling_params, use_tqdm: the same two under vLLM's names
        adapter: name of a loaded adapter; None: the model alone

        A completion that failed has an `error`; the others are complete. Raises RequestError for an invalid prompt,
        before any prompt is queued, and ServerError if the engine is closed meanwhile.
        If this raises or is interrupted, running sequences are aborted.
        """
        if params is not None and sampling_params is not None:
            raise InvalidValueError("params and sampling_params are the same; give one", param="params")
        params, progress = (sampling_params if params is None else params), progress or use_tqdm
        batch = _as_list(prompts)
        if not batch:
            return []
        each = params_for(batch, params)
        pairs = list(zip(batch, each, strict=True))
        digest = self._adapter(adapter)
        groups = [self._siblings(prompt, one, f"request-{next(self._names)}", adapter=digest) for prompt, one in pairs]
        results = {each.request_id: Completion() for group in groups for each in group}
        try:
            self._queue(groups, lambda request: results[request.request_id].add)
            with progress_bar("completion", shown=progress) as show:
                while not self._sequences.keys().isdisjoint(results):
                    self._run_step()
                    if progress:
                        show(len(results) - len(self._sequences.keys() & results.keys()), len(results))
                    self._check_runs()
        finally:
            self._abort(results)
        return [
            Completions(
                [results[each.request_id] for each in group],
                prompt if isinstance(prompt, str) else None,
                group[0].prompt_token_ids,
            )
            for prompt, group in zip(batch, groups, strict=True)
        ]

    @takes_other_names
    def add_request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        hold_seconds: float = 0.0,
        adapter: str | None = None,
    ) -> str:
        """Queue a prompt. Returns the id that its outputs will have. Raises RequestError.

        request_id: None: one is made
        priority: lower values run earlier, see `scheduler.policy`
        cache_salt: prompts share cached pages only within a salt
        hold_seconds: seconds after its end in which its KV pages are not evicted, unless `handover.write` takes them
        adapter: name of a loaded adapter; None: the model alone
        """
        name = request_id or f"request-{next(self._names)}"
        (own,) = params_for([prompt], params)
        group = self._siblings(prompt, own, name, priority, cache_salt, self._adapter(adapter))
        group = [msgspec.structs.replace(each, hold_seconds=hold_seconds) for each in group]
        self._queue([group], lambda _: self._keep)
        return name

    def _keep(self, output: RequestOutput) -> None:
        self._unread.append(output)

    def _siblings(
        self,
        prompt: Prompt,
        params: SamplingParams,
        name: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        pictures: tuple[Picture, ...] = (),
    ) -> list[EngineRequest]:
        """Return the n sequences of a prompt, validated like a message from a socket. Raises InvalidValueError."""
        if params.thinking is not None:
            raise InvalidValueError("a budget for thinking needs an AsyncEngine", param="thinking")
        request = EngineRequest(
            request_id="",
            client_id=name,
            prompt_token_ids=self._token_ids(prompt),
            params=params,
            priority=priority,
            namespace=namespace_of(adapter, cache_salt),
            adapter=adapter,
            pictures=pictures,
        )
        return Add.of(*siblings(request, lambda: format(next(self._ids), "x"), params.seed)).requests()

    def _token_ids(self, prompt: Prompt) -> list[int]:
        given = content_of(prompt)
        return self.tokenizer.encode(given) if isinstance(given, str) else given

    def _queue(self, groups: list[list[EngineRequest]], sink: Callable[[EngineRequest], Sink]) -> None:
        """Queue the sequences of several prompts, all or none. `sink` returns the receiver for the outputs of each."""
        sequences = {
            each.request_id: (text, sink(each))
            for group in groups
            for each, text in zip(group, self._texts(group), strict=True)
        }
        with self._lock.held():
            self._check_open()
            self.core.add(*itertools.chain.from_iterable(groups))
            self._sequences |= sequences

    def _texts(self, group: list[EngineRequest]) -> list[SequenceText]:
        prompt, params = group[0].prompt_token_ids, group[0].params
        stops = make_stops(params)
        return [
            SequenceText(each.client_id, index, prompt, params, self.tokenizer, stops)
            for index, each in enumerate(group)
        ]

    @property
    def has_unfinished(self) -> bool:
        """Return whether `step` has outputs to make or to return."""
        return bool(self._sequences or self._unread)

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step and return the outputs of the previous one.

        A sequence that failed has a last output with an `error`. A step that fails on the device is computed again.
        Raises if the device is not usable any more.
        """
        self._run_step()
        outputs, self._unread = self._unread, []
        return outputs

    def _run_step(self) -> None:
        """Run one step of the core and pass its outputs to the sinks of their sequences."""
        self._check_process()
        with self._lock.held():
            self._step()

    def _step(self) -> None:
        try:
            outputs = self.core.step()
        except StepError as error:
            if lacks_function(error) and (names := self._discard()):
                text = f"a stored program cannot be run ({error}); make the engine again; it compiles {len(names)} anew"
                raise UnrunnableProgramError(text) from error
            logger.error("a step failed, and is computed again: %s", error, exc_info=error.__cause__)
            self.core.recover()
            return
        except BaseException:  # an interrupt leaves a half-processed step
            self.core.recover()
            raise
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: TokenOutput) -> None:
        if output.request_id not in self._sequences:
            return  # a stop string ended it while the engine computed one more token
        sequence, sink = self._sequences[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            result = sequence.fail(error_of(output))
        else:
            result = _pushed(sequence, output)
        if result.finished:
            del self._sequences[output.request_id]
            if output.finish_reason is None:
                self.core.abort([output.request_id])
        sink(result)

    def abort(self, request_id: str) -> None:
        """Abort all sequences of the requests with this id. They yield no more outputs."""
        with self._lock.held():
            self._abort([key for key, (sequence, _) in self._sequences.items() if sequence.request_id == request_id])
            self._unread = [output for output in self._unread if output.request_id != request_id]

    def _abort(self, ids: Iterable[str]) -> None:
        with self._lock.held():
            self.core.abort([each for each in ids if self._sequences.pop(each, None) is not None])

    # --- weights and memory; between two steps, whether requests run or not

    @property
    def control(self) -> EngineControl:
        """Return the EngineControl: weight updates, pauses, memory. Raises ServerError if the engine is closed."""
        self._check_open()
        if self._control is None:
            raise ServerError("this engine's weights cannot be changed")
        return self._control

    @property
    def handover(self) -> PageHandover:
        """Return the PageHandover to another engine. Raises ServerError if there is none or the engine is closed."""
        self._check_open()
        if self._handover is None:
            raise ServerError("this engine has no KV pages")
        return self._handover

    @property
    def weight_version(self) -> str:
        """Return the label of the weights that make the next tokens."""
        return self.core.serving.version

    def update_weights(
        self,
        weights: Any,
        *,
        version: str | None = None,
        running: Mode | None = None,
        partial: bool = False,
        delete_old: bool = True,
    ) -> str:
        """Replace the weights; return their label. Nothing is compiled, and no memory of `weights` is kept.

        weights: a tree of arrays with the shape and dtype of each leaf of `runner.structure.specs`, by position or by
          name; or (checkpoint name, array) pairs, which are converted, fused and quantized as at load
        version: the label; by default the number of updates, this one included
        running: how running requests go on: "retract", the default, computes their KV again with the new weights;
          "in_place", the default while paused in place, keeps the old KV; "abort" ends them
        partial: parameters that `weights` lacks stay as they are. A fused parameter is replaced as a whole
        delete_old: free each old parameter when its new one is there, so that memory peaks at one parameter more than
          the weights. False: make the new weights first, in the memory of the host

        No cached prefix of the old weights is used. Raises ModelLoadError that names what does not fit, before
        anything is replaced. Raises WeightsLostError if a device fails half way; then no request runs until an update
        succeeds.
        """
        with self._lock.held():
            return self.control.update(
                weights, version=version, running=running, partial=partial, delete_old=delete_old
            )

    def load_adapter(
        self,
        name: str,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        config: Mapping[str, Any] | None = None,
        pinned: bool = False,
    ) -> str:
        """Load an adapter under a name, or replace the one that has it; return NAME@VERSION. Nothing is compiled.

        source: directory of peft's save_pretrained, or arrays by peft's names, which are copied
        config: of arrays, the fields of an adapter_config.json, such as r and lora_alpha
        pinned: whether it stays on the devices

        Requests that have begun with an adapter end with it. Answers have NAME@VERSION among their `weight_versions`.
        Raises RequestError that names what does not fit; then nothing is replaced.
        """
        with self._lock.held():
            self._check_open()
            adapters = self.control.adapters
            if isinstance(source, Mapping):
                status = adapters.load_arrays(name, source, config or {}, replace=True, pinned=pinned)
            elif config is not None:
                raise InvalidValueError("config is for arrays; a directory has its own", param="config")
            else:
                status = adapters.load_directory(name, os.fspath(source), replace=True, pinned=pinned)
        return f"{name}@{status.version}"

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that have begun with it go on. Raises ModelNotFoundError."""
        with self._lock.held():
            self.control.adapters.unload(name)

    def _adapter(self, name: str | None) -> str:
        if name is None:
            return ""
        with self._lock.held():  # another thread may be loading or unloading one
            return self.control.adapters.digest_of(name)

    def pause(self, mode: Mode = "abort") -> None:
        """Run no steps until `resume`.

        mode: what becomes of running requests. "abort" ends them, "retract" computes them again after `resume`,
          "in_place" keeps their KV
        """
        with self._lock.held():
            self.control.pause(mode)

    def resume(self) -> None:
        """Run steps again, unless the engine is asleep."""
        with self._lock.held():
            self.control.resume()

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """Free the devices' memory until `wake`: KV cache and weights. Compiled programs stay.

        level: 1 keeps the weights in the host's memory; 2 drops them, so that `update_weights` must follow
        mode: "abort" or "retract", as in `pause`
        """
        with self._lock.held():
            self.control.sleep(level, mode)

    def wake(self) -> None:
        """Undo `sleep`. Raises ServerError if there is no memory for it; the engine then stays asleep."""
        with self._lock.held():
            self.control.wake()


def _pushed(sequence: SequenceText, output: TokenOutput) -> RequestOutput:
    try:
        return sequence.push(output)
    except Exception as error:  # the boundary of one request: an error in its text must not end the others
        logger.exception("request %s failed", sequence.request_id)
        return sequence.fail(ServerError(f"the output could not be decoded: {type(error).__name__}"))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, np.ndarray | jax.Array):
        prompts = np.asarray(prompts).tolist()
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return [content_of(prompts)]
    are_ids = [_is_id(each) for each in prompts]
    if not any(are_ids):
        return [content_of(each) for each in prompts]
    if not all(are_ids):
        raise InvalidValueError("prompts are one text, one list of token ids, or a list of these", param="prompt")
    return [content_of(prompts)]


def _is_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def content_of(prompt: Any) -> str | list[int]:
    """Return the text or the token ids of a prompt. Raises InvalidValueError for anything else."""
    if isinstance(prompt, Mapping):
        prompt = {name: value for name, value in prompt.items() if value is not None}  # as multi_modal_data of a text
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            message = (
                f"a prompt that is a mapping has prompt or prompt_token_ids; this one has {sorted(map(str, prompt))}"
            )
            raise InvalidValueError(message, param="prompt")
        name, value = next(iter(prompt.items()))
        if isinstance(value, str) != (name == "prompt") or isinstance(value, Mapping):
            raise InvalidValueError(f"prompt is a text, prompt_token_ids are token ids; {name} is neither", param=name)
        return content_of(value)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, np.ndarray | jax.Array):
        prompt = np.asarray(prompt).tolist()
    if isinstance(prompt, bytes | bytearray) or not (isinstance(prompt, Sequence) and all(map(_is_id, prompt))):
        message = f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
        raise InvalidValueError(message, param="prompt")
    return [int(each) for each in prompt]


def params_for(batch: list[Prompt], params: Params | Sequence[Params] | None) -> list[SamplingParams]:
    """Return the params of each prompt. Raises InvalidValueError for other values, too many or too few."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [_one_params(params)] * len(batch)
    if isinstance(params, str) or not isinstance(params, Sequence):
        message = f"params are SamplingParams, a mapping, or a list of them; {type(params).__name__} is none of these"
        raise InvalidValueError(message, param="params")
    if len(params) != len(batch):
        raise InvalidValueError(f"there are {len(batch)} prompts and {len(params)} params", param="params")
    return [_one_params(each) for each in params]


def _one_params(params: Any) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        return SamplingParams(**{str(name): value for name, value in params.items()})
    if not isinstance(params, SamplingParams):
        message = f"params are SamplingParams, or a mapping of their names; {type(params).__name__} is neither"
        raise InvalidValueError(message, param="params")
    return params


@contextlib.contextmanager
def progress_bar(unit: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr. Yields a function of the numbers that are finished and that there are."""
    if not shown:
        yield lambda finished, total: None
        return
    from tqdm import tqdm  # noqa: PLC0415  few ask for a bar

    class Bar(tqdm):
        monitor_interval = 0  # tqdm's thread would outlive the engine

    with Bar(total=0, unit=unit, dynamic_ncols=True) as bar:

        def show(finished: int, total: int) -> None:
            bar.total = total
            bar.update(finished - bar.n)

        yield show
        bar.refresh()  # `update` leaves out what comes too soon after the last one
