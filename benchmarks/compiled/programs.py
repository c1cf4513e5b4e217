"""The programs to compile: those of the 8B shape that serve most steps, two of every published family, and towers.

Models are cut to a few layers: a program's kernels per layer do not change with their number, and its temporary memory
hardly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.adapters import AdapterShape
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.structure import LoadedModel, build
from jaxserve.models.sharding import param_sharding
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.program_set import ProgramSet
from jaxserve.runtime.runner_config import RunnerConfig, resolve_cache_dtype
from jaxserve.runtime.runner_setup import RunnerSetup
from tests.models.published import PUBLISHED

LLAMA = "Llama-3.1-8B"
FAMILIES = (
    "Qwen3-8B",
    "Qwen3-30B-A3B",
    "Qwen3-235B-A22B",
    "Mixtral-8x7B",
    "Gemma-2-9B",
    "Gemma-3-1B",
    "gpt-oss-120b",
    "DeepSeek-V3",
)
# Models whose layers are of other kinds than those above, with the keys that leave one layer of each of their kinds
KINDS: dict[str, dict[str, Any]] = {
    "Gemma-4-31B": {},  # a window, then heads of 512 whose V is K
    "Llama-4-Scout": {"no_rope_layers": [1, 0]},  # chunks, then all tokens without positions
    "MiMo-V2-Flash": {"hybrid_layer_pattern": [0, 1]},  # heads by layer, V narrower than K, sinks in windows
    "Gemma-4-E2B": {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2},  # one cache
    "Laguna-XS": {"num_attention_heads_per_layer": [48, 64]},  # a gate for each head, of which windows have more
    "GLM-4.7-Flash": {},  # latent attention of 20 heads, V wider than the part of K without positions
    "Mistral-Small-4": {},  # latent attention, all layers with experts
    "MiniMax-M2": {},  # 256 experts, half of each head without positions
}
# Models with a tower, which runs in programs of its own. Qwen3.5's blocks are those of PICTURES
PICTURES = "Qwen3-VL-8B"
TOWERS = ("Qwen3-VL-2B", PICTURES, "Qwen2.5-VL-7B")
_PATCHES = (4096, 16384)  # of pictures of 1 and of 4 million pixels
_DEEP = 3  # layers that states of the tower are added to
# Models whose layers have recurrent states, likewise
STATES: dict[str, dict[str, Any]] = {
    "LFM2-1.2B": {"full_attn_idxs": [1]},
    "Qwen3.5-9B": {"layer_types": ["linear_attention", "full_attention"]},
    "Granite-4.0-h-tiny": {"layer_types": ["mamba", "attention"]},
    "Nemotron-3-Nano-30B-A3B": {"hybrid_override_pattern": "ME*E", "num_hidden_layers": 4},  # two layers here
    "Kimi-Linear-48B-A3B": {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}},
    "Falcon-H1-0.5B": {"num_hidden_layers": 1},  # which has both
}
# quantization_config of checkpoints that were made for activations of 8 bits
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["lm_head"]}
# A model of the same vocabulary that drafts for Qwen3-8B: the sizes in which Qwen3-0.6B differs from it
DRAFTED, DRAFT = "Qwen3-8B", "Qwen3-0.6B"
DRAFT_SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_DRAFTS = 4
_BFLOAT16 = jnp.dtype("bfloat16")
_SEQS, _TOKENS, _CONTEXT, _PAGES, _PAGE = 512, 8192, 16384, 16384, 16
_NUM_STATES = 2 * _SEQS


def make_set(
    name: str,
    target: DeviceMesh,
    *,
    attention: str = "triton",
    layers: int = 2,
    pages: str = "bfloat16",
    weights: str | dict[str, Any] = "none",
    products: str = "auto",
    adapters: int = 0,
    drafts: bool = False,
) -> ProgramSet:
    """Return the program set of a published model, cut to `layers` layers. Allocates nothing.

    pages: as cache.dtype. weights: as model.quantization, or the quantization_config of a checkpoint that is kept.
    products: as runtime.activations. adapters: as lora.slots, of rank 16. drafts: with a draft model of DRAFT_SIZES,
    cut too
    """
    sizes = {"num_hidden_layers": layers, "first_k_dense_replace": max(0, layers - 2)}
    hf: dict[str, Any] = PUBLISHED[name].hf | sizes | KINDS.get(name, {}) | STATES.get(name, {})
    if isinstance(weights, dict):
        hf["quantization_config"], weights = weights, "stored"
    if "layer_types" in hf:
        hf["layer_types"] = hf["layer_types"][:layers]
    loaded = _loaded(hf, weights, target)
    draft = _loaded(hf | DRAFT_SIZES | {"num_hidden_layers": layers}, weights, target) if drafts else None
    config = RunnerConfig(
        max_num_seqs=_SEQS,
        max_num_batched_tokens=_TOKENS,
        max_model_len=min(_CONTEXT, loaded.config.max_position_embeddings),
        page_size=_PAGE,
        cache_dtype=resolve_cache_dtype(pages, _BFLOAT16),
        attention=attention,
        activations=products,
        num_pages=_PAGES,
        lora=AdapterShape(adapters, 16) if adapters else None,
        max_drafts=_DRAFTS if drafts else 0,
    )
    setup = RunnerSetup.of(loaded, config, target, draft)
    of_states = (_NUM_STATES,) if setup.steps.states else ()
    return setup.program_set((_PAGES, *(_PAGES // 2 for _ in setup.groups), *of_states), config.max_model_len)


def _loaded(hf: dict[str, Any], weights: str, target: DeviceMesh) -> LoadedModel:
    """Return a model whose weights are structs only."""
    structure = build(from_hf(hf).replace(quantization=weights, activation_dtype="bfloat16"), _BFLOAT16)
    leaves: Any = tuple(
        jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=param_sharding(spec, target.mesh))
        for spec in structure.specs
    )
    return LoadedModel(structure, leaves, Path(), 0, 0.0)


def all_programs(target: DeviceMesh) -> Iterator[tuple[str, Program]]:
    """Yield (name in the table, program)."""
    llama = make_set(LLAMA, target)
    for rows in (1, 2, 8, 32, 128, 512):
        yield from _named(LLAMA, llama.decode(rows))
    yield from _named(LLAMA, llama.decode_hidden(128), llama.extend(2048), llama.extend(8192), llama.head_sample(64))
    by_cublas = [_by_cublas(llama.decode(rows)) for rows in (8, 128, 512)]
    yield from _named(f"{LLAMA} by cuBLASLt", *by_cublas, _by_cublas(llama.extend(2048)))
    yield from _named(f"{LLAMA} on mosaic_gpu", make_set(LLAMA, target, attention="mosaic_gpu").decode(128))
    mosaic = make_set(LLAMA, target, attention="mosaic_gpu", pages="int8")
    yield from _named(f"{LLAMA} on mosaic_gpu with int8 pages", mosaic.decode(128), mosaic.extend(2048))
    for pages in ("int8", "fp8"):
        scaled = make_set(LLAMA, target, pages=pages)
        yield from _named(f"{LLAMA} with {pages} pages", scaled.decode(128), scaled.extend(2048))
    for weights in ("int8", "int4", "fp8"):
        few = make_set(LLAMA, target, weights=weights)
        yield from _named(f"{LLAMA} in {weights}", few.decode(1), few.decode(128), few.extend(2048))
    nvfp4 = make_set(LLAMA, target, weights="nvfp4")
    yield from _named(f"{LLAMA} in nvfp4", nvfp4.decode(1), nvfp4.decode(128))
    yield from _named("Qwen3-30B-A3B in nvfp4", make_set("Qwen3-30B-A3B", target, weights="nvfp4").decode(64))
    mxfp8 = make_set(LLAMA, target, weights=MXFP8)
    yield from _named(f"{LLAMA} in mxfp8", mxfp8.decode(1), mxfp8.decode(128))
    mxfp4 = make_set("gpt-oss-120b", target, weights={"quant_method": "mxfp4"})
    yield from _named("gpt-oss-120b in mxfp4", mxfp4.decode(64), mxfp4.extend(512))
    for form, config in (("W8A8", w8a8("int8")), ("FP8 of rows", w8a8("fp8")), ("FP8 in blocks", FP8_BLOCKS)):
        for products in ("exact", "rounded"):
            made = make_set(LLAMA, target, weights=config, products=products)
            yield from _named(f"{LLAMA} {form} {products}", made.decode(512), made.extend(2048))
    for slots in (1, 8, 32):
        many = make_set(LLAMA, target, adapters=slots)
        yield from _named(f"{LLAMA} with {slots} adapters", many.decode(8), many.decode(128), many.extend(2048))
    pair = make_set(DRAFTED, target, drafts=True)
    steps = [pair.decode(8), pair.decode_hidden(8), pair.verify(8), pair.draft(1), pair.draft(16)]
    yield from _named(f"{DRAFTED} with {DRAFT}", *steps, pair.decode_hidden(64), pair.verify(64))
    for name in (*FAMILIES, *KINDS, *STATES):
        family = make_set(name, target)
        yield from _named(name, family.decode(64), family.extend(512))
    yield from _named(PICTURES, make_set(PICTURES, target, layers=_DEEP).extend(512))
    yield from tower_programs(target)


def tower_programs(target: DeviceMesh, **options: Any) -> Iterator[tuple[str, Program]]:
    """Yield (name in the table, program) of the towers, of PICTURES the mergers too. options: as of `make_set`"""
    for name in TOWERS:
        parts = ("project", "queries", "mlp", *(("deep", "end") if name == PICTURES else ()))
        wanted = {f"encode_{part}[{size}]" for part in parts for size in _PATCHES}
        encode = make_set(name, target, layers=_DEEP, **options).encode()
        yield from _named(name, *(each for each in encode if each.name in wanted))


def w8a8(form: str) -> dict[str, Any]:
    """Return the quantization_config of a compressed-tensors checkpoint with one scale for a row: int8 or fp8."""
    kind = {"num_bits": 8, "type": "int" if form == "int8" else "float"}
    layers = {
        "targets": ["Linear"],
        "weights": kind | {"strategy": "channel"},
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }
    stored = "int-quantized" if form == "int8" else "float-quantized"
    config = {"format": stored, "config_groups": {"group_0": layers}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors"} | config


def _by_cublas(program: Program) -> Program:
    """Return the program with all products by cuBLASLt, one of the two that XLA's autotuner chooses from on a GPU."""
    return dataclasses.replace(program, options={**program.options, "xla_gpu_enable_triton_gemm": False})


def tpu_programs(target: DeviceMesh) -> Iterator[tuple[str, Program]]:
    """Yield (name in the table, program) of a TPU."""
    llama = make_set(LLAMA, target, attention="tpu")
    yield from _named(LLAMA, llama.decode(1), llama.decode(64), llama.extend(512))
    int8 = make_set(LLAMA, target, attention="tpu", weights="int8")
    yield from _named(f"{LLAMA} in int8", int8.decode(1), int8.decode(64), int8.extend(512))
    for products in ("exact", "rounded"):
        made = make_set(LLAMA, target, attention="tpu", weights=w8a8("int8"), products=products)
        yield from _named(f"{LLAMA} W8A8 {products}", made.extend(2048))
    yield from _named(f"{LLAMA} in int4", make_set(LLAMA, target, attention="tpu", weights="int4").decode(64))
    yield from _named(f"{LLAMA} with int8 pages", make_set(LLAMA, target, attention="tpu", pages="int8").decode(64))
    yield from _named(f"{LLAMA} in nvfp4", make_set(LLAMA, target, attention="tpu", weights="nvfp4").decode(64))
    yield from _named(f"{LLAMA} in mxfp8", make_set(LLAMA, target, attention="tpu", weights=MXFP8).decode(64))
    for weights in ("int8", "int4", "nvfp4"):
        experts = make_set("Qwen3-30B-A3B", target, attention="tpu", weights=weights)
        yield from _named(f"Qwen3-30B-A3B in {weights}", experts.decode(64))
    mxfp4 = make_set("gpt-oss-120b", target, attention="tpu", weights={"quant_method": "mxfp4"})
    yield from _named("gpt-oss-120b in mxfp4", mxfp4.decode(64))
    for name in FAMILIES:
        layers = 1 if name == "DeepSeek-V3" else 2  # two have weights of 42 GiB, and the larger chip has 31
        yield from _named(name, make_set(name, target, attention="tpu", layers=layers).decode(64))
    for name in KINDS:
        kind = make_set(name, target, attention="tpu", layers=1 if name == "MiniMax-M2" else 2)  # two are 15 GB
        yield from _named(name, kind.decode(64), kind.extend(512))
    yield from tower_programs(target, attention="tpu")
    for name in STATES:
        yield from _named(name, make_set(name, target, attention="tpu").decode(64))


def _named(model: str, *programs: Program) -> Iterator[tuple[str, Program]]:
    for program in programs:
        yield f"{model} {program.name}", program
