"""Serve the operator's routes of SGLang and vLLM: replace weights, pause the engine, free its memory.

They need the admin key (see middleware.Authentication). Every call waits until the engine has answered.
`checked_directory` decides which directories of this machine a client may name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxserve.api.fields import Body
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import parse_body, read_body
from jaxserve.api.http.errors import ClientDisconnected
from jaxserve.api.openapi import documented
from jaxserve.api.sglang.protocol import (
    ContinueRequest,
    GenerationState,
    MemoryRequest,
    MemoryState,
    PauseRequest,
    ReadWeightsRequest,
    Success,
    UpdateVersionRequest,
    UpdateWeightsRequest,
    WeightRows,
    WeightsUpdated,
)
from jaxserve.api.state import EngineProtocol, ServerState, server_state
from jaxserve.errors import ConflictError, HTTPError, InvalidValueError, PayloadTooLargeError, UnsupportedParameterError
from jaxserve.model_files import GGUF_FILES
from jaxserve.transport.socket_directory import SocketDirectory
from jaxserve.types.calls import (
    TAGS,
    EngineCall,
    FlushCache,
    Pause,
    ReadState,
    ReadWeights,
    Resume,
    SetWeightVersion,
    Sleep,
    UpdateFromDirectory,
    UpdateFromFile,
    Wake,
)

_REFUSED = "is outside server.weights_directories"


def checked_directory(path: str, roots: Iterable[Path], param: str = "model_path") -> Path:
    """Return the directory without symbolic links. A relative path is relative to each of `roots`.

    Raises InvalidValueError that names `param` unless it is in one of `roots`, and its safetensors and GGUF files are
    too. The message is the same whether something is there or not.
    """
    allowed = [Path(os.path.realpath(root.expanduser())) for root in roots]
    for root in allowed:
        try:
            found = (root / path).resolve(strict=True)
            weights = (*found.glob("*.safetensors"), *found.glob(GGUF_FILES), *found.glob("adapter_config.json"))
            if found.is_dir() and all(_is_within(each, allowed) for each in (found, *weights)):
                return found
        except (OSError, ValueError, RuntimeError):  # it does not exist, has a zero byte, or is a loop of links
            continue
    raise InvalidValueError(f"{param} {_REFUSED}", param=param)


def _is_within(path: Path, allowed: list[Path]) -> bool:
    real = path.resolve(strict=True)
    return any(real.is_relative_to(root) for root in allowed)


B = TypeVar("B", bound=Body)

MAX_HEADER = 16 * 2**20  # bytes of an uploaded file beside its values
DEFAULT_ROWS = 100  # rows that /get_weights_by_name returns
WIDEST = 8  # most bytes of a file, as a multiple of the served weights: float32 values of 4-bit weights
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_FILE: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/octet-stream": _BYTES}}}
_UPLOAD = documented(WeightsUpdated)
_UPLOAD["openapi_extra"] |= _FILE

router = APIRouter()


# --- SGLang's


@router.post("/update_weights_from_disk", **documented(WeightsUpdated, body=UpdateWeightsRequest))
async def update_from_disk(request: Request) -> Response:
    """Replace the weights by the weights of a directory. If that fails, the old weights stay."""
    state, body = server_state(request), await read_body(request, UpdateWeightsRequest)
    path = await asyncio.to_thread(checked_directory, body.model_path, allowed_roots(state))
    return await _updated(
        state,
        UpdateFromDirectory(
            path=str(path), version=body.weight_version, running="abort" if body.abort_all_requests else None
        ),
    )


@router.post("/update_weights_from_tensor", **_UPLOAD)
async def update_from_tensor(
    request: Request,
    weight_version: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    abort_all_requests: bool = False,
    partial: bool = False,
    flush_cache: Literal[True] = True,
) -> Response:
    """Replace the weights by the safetensors file in the body. partial: parameters that it lacks stay as they are.

    Raises UnsupportedParameterError for JSON.
    """
    _refuse_unknown(request, {"weight_version", "abort_all_requests", "partial", "flush_cache"})
    if "json" in request.headers.get("content-type", ""):
        raise UnsupportedParameterError(
            "Pickled tensors are not accepted. Send the bytes of a safetensors file.", param="serialized_named_tensors"
        )
    state = server_state(request)
    directory = await asyncio.to_thread(SocketDirectory)  # only this process's; removed at the next start if it dies
    try:
        file = directory.path / "model.safetensors"
        await _receive(request, file, _largest(state))
        return await _updated(
            state,
            UpdateFromFile(
                path=str(file),
                version=weight_version,
                running="abort" if abort_all_requests else None,
                partial=partial,
            ),
        )
    finally:
        await asyncio.shield(asyncio.to_thread(directory.remove))


@router.post("/update_weight_version", **documented(WeightsUpdated, body=UpdateVersionRequest))
async def update_weight_version(request: Request) -> Response:
    """Give the weights another label."""
    body = await read_body(request, UpdateVersionRequest)
    running = None if body.abort_all_requests is False else "abort"
    return await _updated(server_state(request), SetWeightVersion(body.new_version, running))


@router.get("/get_weights_by_name", include_in_schema=False)
@router.post("/get_weights_by_name", **documented(WeightRows, body=ReadWeightsRequest))
async def get_weights_by_name(request: Request) -> Response:
    """Return the first rows of a tensor of the checkpoint as nested lists, from the weights in use."""
    body = await read_body(request, ReadWeightsRequest)
    rows = body.truncate_size or DEFAULT_ROWS
    return json_response(await server_state(request).engine.call(ReadWeights(body.name, rows)))


@router.post("/pause_generation", **documented(GenerationState, body=PauseRequest))
async def pause_generation(request: Request) -> Response:
    """Run no more steps until /continue_generation. New requests wait."""
    body = await _optional_body(request, PauseRequest)
    await server_state(request).engine.call(Pause(body.mode or "abort"))
    return json_response({"success": True, "status": "ok", "message": "Generation paused."})


@router.post("/continue_generation", **documented(GenerationState, body=ContinueRequest))
async def continue_generation(request: Request) -> Response:
    """Run steps again."""
    await _optional_body(request, ContinueRequest)
    await server_state(request).engine.call(Resume())
    return json_response({"success": True, "status": "ok", "message": "Generation continued."})


@router.post("/release_memory_occupation", **documented(MemoryState, body=MemoryRequest))
async def release_memory(request: Request) -> Response:
    """Free the memory of the KV cache, and move the weights to host memory. Running requests wait."""
    body = await _optional_body(request, MemoryRequest)
    asleep = await server_state(request).engine.call(Sleep(mode="retract", tags=_tags(body.tags)))
    return json_response({"success": True, "asleep": asleep})


@router.post("/resume_memory_occupation", **documented(MemoryState, body=MemoryRequest))
async def resume_memory(request: Request) -> Response:
    """Bring back the memory that was released."""
    body = await _optional_body(request, MemoryRequest)
    asleep = await server_state(request).engine.call(Wake(_tags(body.tags)))
    return json_response({"success": True, "asleep": asleep})


# --- vLLM's


@router.post("/pause", **documented())
async def pause(
    request: Request, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
) -> Response:
    """Pause as /pause_generation does.

    wait: requests that have arrived so far end first. keep: running requests keep their KV, and clear_cache has no
    effect.
    """
    _refuse_unknown(request, {"mode", "clear_cache"})
    engine = server_state(request).engine
    await _pause(engine, mode)
    if clear_cache and mode != "keep":
        await engine.call(FlushCache())
    return json_response({"status": "paused"})


@router.post("/resume", **documented())
async def resume(request: Request) -> Response:
    """Run steps again, as /continue_generation does."""
    _refuse_unknown(request, set())
    await server_state(request).engine.call(Resume())
    return json_response({"status": "resumed"})


@router.get("/is_paused", **documented())
async def is_paused(request: Request) -> Response:
    """Show whether the engine is paused."""
    return json_response({"is_paused": (await server_state(request).engine.call(ReadState()))["paused"]})


@router.post("/sleep", **documented())
async def sleep(
    request: Request, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Literal["abort", "wait", "keep"] = "abort"
) -> Response:
    """Free memory. level: 0 only pauses; 1 keeps the weights in host memory; 2 drops them.

    wait: requests that have arrived so far end first. keep: running requests are computed again after /wake_up.
    """
    _refuse_unknown(request, {"level", "mode"})
    engine = server_state(request).engine
    if level == 0:
        await _pause(engine, mode)
        return json_response({"asleep": []})
    if mode == "wait":
        return json_response({"asleep": await _sleep_after_requests(engine, level)})
    asleep = await engine.call(Sleep(level, "abort" if mode == "abort" else "retract"))
    return json_response({"asleep": asleep})


@router.post("/wake_up", **documented())
async def wake_up(
    request: Request, tags: Annotated[list[Literal["weights", "kv_cache", "scheduling"]] | None, Query()] = None
) -> Response:
    """Undo /sleep. Weights that were dropped must be sent with the next update. scheduling: undo level 0."""
    _refuse_unknown(request, {"tags"})
    engine = server_state(request).engine
    wanted = tags or ["weights", "kv_cache", "scheduling"]
    asleep = await engine.call(Wake(tuple(tag for tag in wanted if tag != "scheduling")))
    if "scheduling" in wanted:
        await engine.call(Resume())
    return json_response({"asleep": asleep})


@router.get("/is_sleeping", **documented())
async def is_sleeping(request: Request) -> Response:
    """Show whether the engine sleeps, and which parts of its memory are not on the devices."""
    asleep = (await server_state(request).engine.call(ReadState()))["asleep"]
    return json_response({"is_sleeping": bool(asleep), "asleep": asleep})


@router.post("/reset_prefix_cache", **documented(Success))
async def reset_prefix_cache(request: Request) -> Response:
    """Drop the prefix cache, as /flush_cache does."""
    _refuse_unknown(request, set())
    await server_state(request).engine.call(FlushCache())
    return json_response({"success": True})


# --- their parts


async def _pause(engine: EngineProtocol, mode: Literal["abort", "wait", "keep"]) -> None:
    """Pause in vLLM's `mode`. Raises ConflictError if a pause that waits for requests was given up."""
    if mode == "wait":
        await _finish(engine)
    else:
        await engine.call(Pause("in_place" if mode == "keep" else mode))


async def _finish(engine: EngineProtocol) -> None:
    """Pause when the requests that have arrived so far have ended. Raises ConflictError if that was given up."""
    if not await engine.finish():
        raise ConflictError("The pause was given up: generation was resumed.")


async def _sleep_after_requests(engine: EngineProtocol, level: int) -> Any:
    """Put the engine to sleep when the requests that have arrived so far have ended.

    Returns the parts of its memory that are not on the devices. If the engine cannot sleep, it goes on serving. If it
    can, the end of the sleep is the end of the pause.
    """
    was_paused = (await engine.call(ReadState()))["paused"]
    await _finish(engine)
    try:
        return await engine.call(Sleep(level, "retract"))
    finally:
        if not was_paused:
            with contextlib.suppress(HTTPError):  # the engine died, and the next one is not paused
                await engine.call(Resume())


async def _updated(state: ServerState, call: EngineCall) -> Response:
    label = await state.engine.call(call)
    answer = {"success": True, "message": "The weights are replaced.", "weight_version": label}
    return json_response(answer | {"num_paused_requests": 0})


async def _optional_body(request: Request, model: type[B]) -> B:
    """Read a body as `read_body` does. A request without a body has an empty object."""
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ClientDisconnected from None
    return await read_body(request, model) if raw else await parse_body(b"{}", model, request)


def _tags(tags: list[Any] | None) -> tuple[str, ...]:
    return TAGS if tags is None else tuple(tags)


def _refuse_unknown(request: Request, known: set[str]) -> None:
    """Raise UnsupportedParameterError for a field of the query that the route does not have."""
    for name in request.query_params:
        if name not in known:
            raise UnsupportedParameterError(f"{name[:64]} is not supported.", param=name[:64])


def allowed_roots(state: ServerState) -> list[Path]:
    """Return the directories whose contents a client may name."""
    model = state.config.model.path
    own = [Path(model)] if model is not None and Path(model).expanduser().is_dir() else []
    return [*state.config.server.weights_directories, *own]


def _largest(state: ServerState) -> int:
    """Return the most bytes that an uploaded file may have."""
    plan: Mapping[str, Any] = state.engine.info.memory_plan
    return WIDEST * int(plan.get("weight_bytes", 0)) + MAX_HEADER


async def _receive(request: Request, file: Path, limit: int) -> None:
    """Write the body to a file. Raises PayloadTooLargeError."""
    message = f"The file is larger than the limit of {limit} bytes."
    announced = request.headers.get("content-length", "")
    size = 0
    if announced.isdigit() and int(announced) > limit:
        raise PayloadTooLargeError(message)
    with file.open("xb", buffering=0) as out:
        try:
            async for data in request.stream():
                size += len(data)
                if size > limit:
                    raise PayloadTooLargeError(message)
                await asyncio.to_thread(_write, out, data)
        except ClientDisconnect:
            raise ClientDisconnected from None
    if not size:
        raise InvalidValueError("The body is empty. Send the bytes of a safetensors file.")


def _write(out: Any, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[out.write(left) :]
