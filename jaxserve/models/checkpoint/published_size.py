"""Compute the size of a published checkpoint in bytes, from its configuration and the shapes of its tensors.

A quantized checkpoint leaves some tensors unquantized: the ones that its configuration lists, and _NEVER.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxserve.models.checkpoint.float_formats import float_bytes
from jaxserve.models.checkpoint.quantization import code_bytes
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.config import ModelConfig
from jaxserve.models.stored_form import HELD_BLOCKS
from jaxserve.models.weights import Part

# embeddings, head, norms, routers and convolutions are not quantized
_NEVER = ("embed_tokens", "lm_head", "norm", ".gate.", "conv1d")
_HALF_BYTES = 2  # bytes of an unquantized value in a quantized checkpoint; gpt-oss does not state it


@dataclass(frozen=True)
class PublishedSize:
    """The size of a checkpoint.

    num_bytes: of all tensors that the model reads. form: format of the quantized tensors; "" if none is quantized
    """

    num_bytes: int
    form: str


def published_size(structure: ModelStructure) -> PublishedSize:
    """Compute the size of the checkpoint that the model's configuration describes."""
    parts = {part.name: part for spec in structure.specs for part in spec.parts}
    config = structure.config
    plain = jnp.dtype(config.dtype).itemsize if config.stored_form is None else _HALF_BYTES
    return PublishedSize(sum(_num_bytes(part, config, plain) for part in parts.values()), _form(config))


def _form(config: ModelConfig) -> str:
    form, block = config.stored_form, config.weight_block
    if form is None or form.not_held():
        return ""
    return form.description if block is None else f"FP8 in blocks of {block[0]} x {block[1]}"


def _num_bytes(part: Part, config: ModelConfig, plain: int) -> int:
    """Return the bytes of a part's tensors. plain: bytes of an unquantized value"""
    form, count = config.stored_form, math.prod(part.shape)
    if form is not None and (kind := form.type_of(_module(part))) is not None:
        held = HELD_BLOCKS.get(kind)
        return count * plain if held is None else int(count * held.stored / 8)
    if part.mxfp4:
        return float_bytes(part, "gpt-oss", config.weight_block)
    own = None if form is None or form.method == "gpt-oss" else form.of(_module(part))
    one_of_all_experts = own is not None and own.is_integer and len(part.shape) != 2
    if own is None or one_of_all_experts or not _is_quantized(part, head=form is not None and form.method == "mixed"):
        return count * plain
    return float_bytes(part, own.method, config.weight_block) if own.is_float else code_bytes(part, own)


def _module(part: Part) -> str:
    return part.name.removesuffix(".weight")


def _is_quantized(part: Part, *, head: bool) -> bool:
    """Return whether a part may be quantized. head: a mixture may name the output head"""
    never = any(word in part.name for word in _NEVER if not (head and word == "lm_head"))
    return len(part.shape) >= 2 and not never
