"""The objects of GET /v1/models."""

from __future__ import annotations

from typing import Any

from jaxserve.types.messages import EngineInfo


def model_object(name: str, info: EngineInfo, created: int) -> dict[str, Any]:
    """Build OpenAI's model object, with the fields that vLLM adds and routers read, and the model's task."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxserve",
        "shutdown_date": None,
        "root": info.model_path,
        "parent": None,
        "max_model_len": info.max_model_len,
        "task": info.task,
        "permission": [],
    }
