"""Serve POST /generate, and the other routes of SGLang, vLLM and lm-eval: tokens, server information, sessions, aborts.

/generate takes one prompt or many, streamed or not. /abort_request and /flush_cache need the admin key and are off
without one (see middleware.Authentication). With `server.keys`, each key may abort its own requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.generate.generation import Generation
from jaxserve.api.generate.planner import Planner, check_ids, prompt_tokens
from jaxserve.api.generate.task import ChatMessages
from jaxserve.api.generate.wire import json_answer, json_response
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.keys import caller_of
from jaxserve.api.openai.task import check_messages, template_messages
from jaxserve.api.openapi import documented
from jaxserve.api.sessions import CloseSessionRequest, OpenSessionRequest
from jaxserve.api.sglang.answer import NativeAnswer
from jaxserve.api.sglang.protocol import (
    Aborted,
    AbortRequest,
    Detokenized,
    DetokenizeRequest,
    Generated,
    GenerateRequest,
    SessionId,
    Success,
    Tokenized,
    TokenizeRequest,
)
from jaxserve.api.sglang.task import NativeOptions, native_task
from jaxserve.api.state import ServerState, server_state
from jaxserve.client.replicas import ReplicaState
from jaxserve.config import SECRETS
from jaxserve.errors import InvalidValueError
from jaxserve.types.calls import FlushCache
from jaxserve.version import __version__

router = APIRouter()


@router.post("/generate", **documented(Generated, body=GenerateRequest, events=Generated, many=True))
@router.put("/generate", include_in_schema=False)
async def generate(request: Request) -> Response:
    """Continue a text or token ids; `meta_info` describes the generation."""
    state = server_state(request)
    body = await read_body(request, GenerateRequest)
    state.check_generates(None)
    task = await native_task(body, state)
    generation = await Planner(state, caller_of(request), task.request).texts(task.prompts)
    _check_starts(generation, task.options)
    answer = NativeAnswer(generation, task.options, state.token_texts, single=task.single)
    if body.stream:
        return EventStream(answer.events(), answer.held_bytes, state)
    return await json_answer(await until_disconnect(request, answer.whole()))


def _check_starts(generation: Generation, options: list[NativeOptions]) -> None:
    """Raise InvalidValueError if log-probabilities would begin after the end of a prompt."""
    for prompt, shown in zip(generation.prompts, options, strict=True):
        count = len(prompt.prompt_token_ids)
        if shown.start > count:
            message = f"logprob_start_len is {shown.start}, and the prompt has {count} tokens."
            raise InvalidValueError(message, param="logprob_start_len")


INLINE_TOKENS = 4096


@router.post("/tokenize", **documented(Tokenized, body=TokenizeRequest))
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, of several texts, or of a conversation rendered by the chat template."""
    state = server_state(request)
    body = await read_body(request, TokenizeRequest)
    state.check_model(body.model)
    ids = await _token_ids(body, state)
    many = isinstance(body.prompt, list)

    def answer() -> Response:
        """Build the answer."""
        content: dict[str, Any] = {
            "tokens": ids if many else ids[0],
            "count": [len(each) for each in ids] if many else len(ids[0]),
            "max_model_len": state.engine.info.max_model_len,
            "token_strs": None,
        }
        if body.return_token_strs:
            strings = [[state.engine.tokenizer.id_to_token(i) or "" for i in each] for each in ids]
            content["token_strs"] = strings if many else strings[0]
        return json_response(content)

    return await _off_loop_if_long(answer, sum(map(len, ids)), state)


async def _off_loop_if_long(work: Callable[[], Response], num_tokens: int, state: ServerState) -> Response:
    """Run work outside the event loop if it is long. Reading or writing a token takes up to 0.5 us."""
    return work() if num_tokens <= INLINE_TOKENS else await state.text_work.run(work, num_tokens)


async def _token_ids(body: TokenizeRequest, state: ServerState) -> list[list[int]]:
    """Return the token ids of each text.

    By default special tokens are added to plain texts, not to rendered conversations.
    """
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidValueError("Give prompt or messages, one of them.", param=given[-1] if given else "prompt")
    if body.messages is None:
        text = body.prompt if body.prompt is not None else body.text
        texts = [text] if isinstance(text, str) else list(text or [])
        special = body.add_special_tokens is not False
        return [await state.encoder.encode(each, add_special_tokens=special, param=given[0]) for each in texts]
    check_messages(body.messages, takes_pictures=state.takes_pictures)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    messages = ChatMessages(
        make=template_messages(body.messages, system_in_middle=state.takes_late_system),
        size=body.size,
        tools=tools,
        variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    found = await prompt_tokens(messages, state, special=bool(body.add_special_tokens), limit=None)
    return [found.token_ids]


@router.post("/detokenize", **documented(Detokenized, body=DetokenizeRequest))
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(request: Request) -> Response:
    """Return the text of token ids. Special tokens are shown unless skip_special_tokens is true.

    Raises InvalidValueError if the ids are missing.
    """
    state = server_state(request)
    body = await read_body(request, DetokenizeRequest)
    state.check_model(body.model)
    tokens = body.tokens if body.tokens is not None else body.ids
    if tokens is None:
        raise InvalidValueError("tokens is missing.", param="tokens", code="missing_required_parameter")
    many = bool(tokens) and isinstance(tokens[0], list)
    lists: list[list[int]] = tokens if many else [tokens]  # type: ignore[list-item]
    for each in lists:
        check_ids(each, state.engine.info, "tokens" if body.tokens is not None else "ids")
    decode = state.engine.tokenizer.decode

    def answer() -> Response:
        texts = [decode(each, skip_special_tokens=bool(body.skip_special_tokens)) for each in lists]
        text: Any = texts if many else texts[0]
        return json_response({"prompt": text, "text": text})

    return await _off_loop_if_long(answer, sum(map(len, lists)), state)


@router.get("/tokenizer_info", **documented())
async def tokenizer_info(request: Request) -> Response:
    """Return the special tokens and the chat template, so that lm-eval needs no tokenizer of its own."""
    state = server_state(request)
    tokenizer = state.engine.tokenizer
    template = state.chat_template
    return json_response(
        {
            "tokenizer_class": tokenizer.config.get("tokenizer_class"),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": state.engine.info.max_model_len,
            "chat_template": template.source if template is not None else None,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
        }
        | tokenizer.special_tokens_map()
    )


ENGINE_STATE_SECONDS = 2.0  # the longest time that the engine may take for its part of an answer


@router.get("/model_info", **documented())
@router.get("/get_model_info", include_in_schema=False)
async def model_info(request: Request) -> Response:
    """Show the model: its path, its names, its context length."""
    state = server_state(request)
    info = state.engine.info
    return json_response(
        {
            "model_path": info.model_path,
            "tokenizer_path": state.config.model.tokenizer or info.model_path,
            "served_model_name": info.served_names[0],
            "served_model_names": info.served_names,
            "architecture": info.architecture,
            "is_generation": info.task == "generate",
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "dtype": info.dtype,
            "preferred_sampling_params": info.generation_defaults or None,
            "weight_version": state.engine.stats().weight_version,
            "has_image_understanding": state.takes_pictures,
            "has_audio_understanding": False,
        }
    )


@router.get("/server_info", **documented())
@router.get("/get_server_info", include_in_schema=False)
async def server_info(request: Request) -> Response:
    """Show the resolved configuration without keys, the engine's properties and its current numbers.

    A request with the admin key also gets the requests that wait, and the reasons.
    """
    state = server_state(request)
    info = state.engine.info
    config = state.config.model_dump(mode="json")
    for name in SECRETS:
        config["server"][name] = "set" if config["server"][name] else None
    return json_response(
        {
            "version": __version__,
            "model_path": info.model_path,
            "served_model_name": info.served_names[0],
            "context_length": info.max_model_len,
            "max_running_requests": info.max_num_seqs,
            "max_total_num_tokens": info.num_kv_tokens,
            "tp_size": info.tensor,
            "dp_size": state.config.mesh.replicas,
            "config": config,
            "engine": msgspec.to_builtins(info),
            "stats": _stats(msgspec.to_builtins(state.engine.stats())),
            "engines": [_engine(each) for each in state.engine.replicas],
            **await _for_admin(request),
        }
    )


async def _for_admin(request: Request) -> dict[str, Any]:
    """Return the requests that wait and why, for the admin key only: they show ids and loads of all tenants."""
    if not caller_of(request).admin:
        return {}
    try:
        async with asyncio.timeout(ENGINE_STATE_SECONDS):
            waiting = await server_state(request).engine.waiting()
    except TimeoutError:  # the engine is in a long step, or hangs
        waiting = None
    return {"waiting_requests": msgspec.to_builtins(waiting)}


def _engine(replica: ReplicaState) -> dict[str, Any]:
    info = replica.info
    return {
        "engine": replica.engine,
        "role": replica.role,
        "status": replica.status.phase,
        "alive": replica.alive,
        "restarts": replica.restarts,
        "num_live": replica.num_live,
        "devices": info.devices if info is not None else [],
        "num_pages": info.num_pages if info is not None else 0,
        "stats": _stats(msgspec.to_builtins(replica.stats)),
    }


def _stats(stats: dict[str, Any]) -> dict[str, Any]:
    return {"num_running": 0, "num_waiting": 0} | stats


@router.get("/version", **documented())
async def version() -> Response:
    """Show the version of jaxserve."""
    return json_response({"version": __version__})


@router.post("/open_session", **documented(SessionId, body=OpenSessionRequest))
async def open_session(request: Request) -> Response:
    """Open a session; requests continue it with `session_params`."""
    body = await read_body(request, OpenSessionRequest)
    return json_response(server_state(request).sessions.open(body, caller_of(request).owner))


@router.post("/close_session", **documented(Success, body=CloseSessionRequest))
async def close_session(request: Request) -> Response:
    """Close a session and drop its tokens."""
    body = await read_body(request, CloseSessionRequest)
    server_state(request).sessions.close(body.session_id, caller_of(request).owner)
    return json_response({"success": True})


@router.post("/flush_cache", **documented(Success))
@router.get("/flush_cache", include_in_schema=False)
async def flush_cache(request: Request) -> Response:
    """Drop the prefix cache. Running requests keep their pages."""
    await server_state(request).engine.call(FlushCache())
    return json_response({"success": True})


@router.get("/key_usage", **documented())
async def key_usage(request: Request) -> Response:
    """Show the usage of each API key of `server.keys` since the start, and its open requests."""
    usages = server_state(request).key_usages.all()
    return json_response({"object": "list", "data": [usage.as_dict() for usage in usages]})


@router.post("/abort_request", **documented(Aborted, body=AbortRequest))
async def abort_request(request: Request) -> Response:
    """Abort the key's requests whose id begins with `rid`, or all of them. Each ends with finish_reason abort.

    Raises InvalidValueError if neither is given.
    """
    state = server_state(request)
    body = await read_body(request, AbortRequest)
    if not body.abort_all and not body.rid:
        raise InvalidValueError("Give rid or abort_all.", param="rid")
    prefix, sees = "" if body.abort_all else body.rid or "", caller_of(request).sees
    aborted = state.live.abort(prefix, sees)
    if state.peers is not None:
        aborted = sorted({*aborted, *await state.peers.abort(prefix, sees)})
    return json_response({"success": True, "aborted": aborted})
