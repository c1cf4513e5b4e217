"""Request bodies of the routes that replace weights, pause the engine and free its memory: SGLang's.

A field that allows only one value here gives an error that names it for any other.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxserve.api.protocol.common import Body

MAX_PATH = 4096  # characters
Label = Annotated[str, Field(min_length=1, max_length=128)]
Tags = Annotated[list[Literal["weights", "kv_cache"]], Field(min_length=1, max_length=8)]
_NO_TORCH = "No effect: there is no torch."


class UpdateWeightsRequest(Body):
    model_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)] = Field(
        description="A directory with safetensors files, in one of server.weights_directories or the model's own."
    )
    weight_version: Label | None = Field(
        None, description="Label of the weights. Default: the number of updates since the start."
    )
    abort_all_requests: bool | None = Field(
        None, description="End running requests. Default false: they are computed again with the new weights."
    )
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: Literal[True] | None = Field(None, description="Only true: no prefix of old weights is ever used.")
    keep_pause: Literal[False] | None = Field(None, description="Only false: pause before, and continue later.")
    is_async: Literal[False] | None = Field(None, description="Only false: the answer comes after the update.")
    token_step: Literal[0] | None = Field(None, description="Only 0: give a weight_version.")
    manifest: None = Field(None, description="Only null.")
    recapture_cuda_graph: bool | None = Field(None, description="No effect: compiled programs stay as they are.")
    torch_empty_cache: bool | None = Field(None, description=_NO_TORCH)


class UpdateVersionRequest(Body):
    new_version: Label
    abort_all_requests: bool | None = Field(None, description="End running requests. Default true.")


class ReadWeightsRequest(Body):
    name: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="A tensor of the checkpoint, such as model.norm.weight."
    )
    truncate_size: Annotated[int, Field(ge=1, le=2**19)] | None = Field(
        None, description="Most rows (indices of the first axis). Default 100."
    )


class PauseRequest(Body):
    mode: Literal["abort", "retract", "in_place"] | None = Field(
        None, description="Running requests end (abort, the default), or are computed again, or keep their KV."
    )


class ContinueRequest(Body):
    torch_empty_cache: bool | None = Field(None, description=_NO_TORCH)


class MemoryRequest(Body):
    tags: Tags | None = Field(None, description="Default: both.")
