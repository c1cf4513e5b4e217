"""Facts about the server in SGLang's and vLLM's forms: /get_model_info, /server_info, /version."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.respond.wire import json_response
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import server_state
from jaxserve.client.replicas import ReplicaState
from jaxserve.config import SECRETS
from jaxserve.version import __version__

ENGINE_STATE_SECONDS = 2.0  # the most that the engine may take for its part of an answer

router = APIRouter()


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
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


@router.get("/server_info", **documented())
@router.get("/get_server_info", include_in_schema=False)
async def server_info(request: Request) -> Response:
    """The resolved configuration (without keys), the engine's facts and its numbers now.

    The admin key is also shown which requests wait, and why.
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
            "tp_size": state.config.mesh.tensor,
            "dp_size": state.config.mesh.replicas,
            "config": config,
            "engine": msgspec.to_builtins(info),
            "stats": _stats(msgspec.to_builtins(state.engine.stats())),
            "engines": [_engine(each) for each in state.engine.replicas],
            **await _for_admin(request),
        }
    )


async def _for_admin(request: Request) -> dict[str, Any]:
    """Which requests wait, and why: ids and loads of all tenants, for the admin key only."""
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
