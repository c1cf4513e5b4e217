"""Serve vLLM's and SGLang's routes that load and unload adapters. They need the admin key.

An adapter is a model name afterwards. Every call waits until all engines have answered, and all workers know the name.
With `lora.keep` the store keeps what was loaded, for the next start.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxserve.api.answers import Answer
from jaxserve.api.fields import Body
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import read_body
from jaxserve.api.openapi import documented
from jaxserve.api.sglang.protocol import MAX_PATH
from jaxserve.api.sglang.weights import allowed_roots, checked_directory
from jaxserve.api.state import ServerState, server_state
from jaxserve.errors import InvalidValueError
from jaxserve.types.calls import LoadAdapter, UnloadAdapter
from jaxserve.types.messages import AdapterStatus

logger = logging.getLogger(__name__)

_KEPT = msgspec.json.Decoder(AdapterStatus)

Name = Annotated[str, Field(min_length=1, max_length=128)]
_DIRECTORY = Field(
    min_length=1,
    max_length=MAX_PATH,
    description="A directory of peft's save_pretrained, in one of server.weights_directories or the model's own.",
)


class LoadLoraRequest(Body):
    """The body of vLLM's route."""

    lora_name: Name = Field(description="The name that requests send as `model`.")
    lora_path: Annotated[str, _DIRECTORY]
    load_inplace: bool = Field(False, description="Replace an adapter of this name. Requests that have begun keep it.")
    is_3d_lora_weight: Literal[False] | None = Field(None, description="Only false: adapters of experts are refused.")


class UnloadLoraRequest(Body):
    """The body of vLLM's route."""

    lora_name: Name
    lora_int_id: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        None, description="No effect: an adapter has no number."
    )


class LoadAdapterRequest(Body):
    """The body of SGLang's route."""

    lora_name: Name = Field(description="The name that requests send as `model`.")
    lora_path: Annotated[str, _DIRECTORY]
    pinned: bool = Field(False, description="Keep it on the devices. At most lora.slots - 1 are.")


class UnloadAdapterRequest(Body):
    """The body of SGLang's route."""

    lora_name: Name


class AdaptersLoaded(Answer):
    success: bool
    message: str
    loaded_adapters: dict[str, str]


router = APIRouter()


@router.post("/v1/load_lora_adapter", **documented(None, body=LoadLoraRequest))
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter, as vLLM does. The answer is one line of text."""
    state, body = server_state(request), await read_body(request, LoadLoraRequest)
    await _load(state, body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", **documented(None, body=UnloadLoraRequest))
async def unload_lora_adapter(request: Request) -> Response:
    """Forget an adapter, as vLLM does. Requests that have begun with it go on."""
    state, body = server_state(request), await read_body(request, UnloadLoraRequest)
    await _call(state, UnloadAdapter(body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/load_lora_adapter", **documented(AdaptersLoaded, body=LoadAdapterRequest))
async def load_adapter(request: Request) -> Response:
    """Load an adapter, as SGLang does."""
    state, body = server_state(request), await read_body(request, LoadAdapterRequest)
    await _load(state, body.lora_name, body.lora_path, pinned=body.pinned)
    return json_response(_loaded(state, "The adapter is loaded."))


@router.post("/unload_lora_adapter", **documented(AdaptersLoaded, body=UnloadAdapterRequest))
async def unload_adapter(request: Request) -> Response:
    """Forget an adapter, as SGLang does. Requests that have begun with it go on."""
    state, body = server_state(request), await read_body(request, UnloadAdapterRequest)
    await _call(state, UnloadAdapter(body.lora_name))
    return json_response(_loaded(state, "The adapter is unloaded."))


async def _load(state: ServerState, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> None:
    if name in state.engine.info.served_names:
        raise InvalidValueError(f"{name!r} is the name of the model.", param="lora_name")
    roots = allowed_roots(state)
    directory = await asyncio.to_thread(checked_directory, path, roots, param="lora_path")
    await _call(state, LoadAdapter(name, str(directory), replace, pinned))


async def _call(state: ServerState, call: LoadAdapter | UnloadAdapter) -> None:
    store = state.store if state.config.lora.keep else None
    if store is not None and isinstance(call, UnloadAdapter):  # it may be one that could not be loaded again
        call = UnloadAdapter(call.adapter, missing_ok=await store.forget_adapter(call.adapter))
    try:
        answer = await state.engine.call(call)
    finally:  # of several engines some may have carried it out
        if state.peers is not None:
            await state.peers.tell()
    if store is not None and isinstance(call, LoadAdapter):
        status = msgspec.structs.replace(msgspec.convert(answer, AdapterStatus), num_running=0, num_waiting=0)
        await store.keep_adapter(status.name, msgspec.json.encode(status))


async def kept_adapters(state: ServerState) -> list[AdapterStatus]:
    """Return the adapters that the store has kept. One whose directory may not be loaded from is a line in the log."""
    if not state.config.lora.keep or state.store is None:
        return []
    found, roots = [], allowed_roots(state)
    for body in await state.store.kept_adapters():
        adapter = _KEPT.decode(body)
        try:
            await asyncio.to_thread(checked_directory, adapter.path, roots, param="lora_path")
        except InvalidValueError as error:
            logger.error("the adapter %r is not loaded again: %s", adapter.name, error)
        else:
            found.append(adapter)
    return found


def _loaded(state: ServerState, message: str) -> dict[str, Any]:
    adapters = {name: each.path for name, each in state.adapters.items()}
    return {"success": True, "message": message, "loaded_adapters": adapters}
