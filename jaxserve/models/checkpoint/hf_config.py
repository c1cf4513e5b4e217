"""Translate a published config.json (and generation_config.json), or a GGUF file's header, into ModelConfig.

It reads the keys common to all families, which `read_config.completed` has completed; the family adds its own. No code
of a checkpoint is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import as_integer
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.quantization import compressed_block, read_stored_form
from jaxserve.models.checkpoint.read_config import (
    Json,
    architecture_of,
    boolean,
    completed,
    flattened,
    integer,
    number,
    optional_integer,
    rope_by_layer_type,
    rope_config,
    shown,
)
from jaxserve.models.config import EagleHead, GenerationDefaults, ModelConfig
from jaxserve.models.families.registry import ARCHITECTURES, NESTED, family_of
from jaxserve.models.family import OF_TOWER, Nested
from jaxserve.models.rope import LongRopeScaling, RopeConfig
from jaxserve.models.unserved import refuse_unserved
from jaxserve.models.vision.read import with_processor

T = TypeVar("T")
MAX_EOS = 1024  # token ids; published lists have three
MAX_TOKEN_ID = 2**24  # same limit as bos_token_id


def read_config(model: Path | ModelFiles) -> ModelConfig:
    """Read the ModelConfig of a model: a directory, a GGUF file or its opened files.

    Raises ModelLoadError with the file and the key.
    """
    files = ModelFiles.open(model)
    file = files.config_file
    found = _named(file, lambda: flattened(files.config))
    hf = _with_head(found, (files.directory / "modules.json").is_file())
    if hf.get("quantization_config") is None and files.quantization:
        hf = hf | {"quantization_config": files.quantization}
    generation = files.generation
    _named(file, lambda: _check_architecture(hf, file))  # first: an unknown family may lack the keys below
    config = _named(file, lambda: from_hf(hf))
    if (vision := config.vision) is not None:
        config = config.replace(vision=_named(file, lambda: with_processor(vision, file.parent)))
    return _named(file.with_name("generation_config.json"), lambda: with_generation(config, generation))


EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_IN_EAGLE = (("model.layers.0.", "midlayer."), ("layers.0.", "midlayer."), ("model.", ""))


def read_eagle(files: ModelFiles) -> ModelConfig:
    """Read the ModelConfig of a head in EAGLE-3's form. Raises ModelLoadError with the file and the key."""
    return _named(files.config_file, lambda: _eagle(files.config))


def _eagle(hf: Json) -> ModelConfig:
    if (name := architecture_of(hf)) not in EAGLE3:
        raise ValueError(f"architecture {shown(name)} is no head of EAGLE-3 (supported: {', '.join(EAGLE3)})")
    if optional_integer(hf, "num_hidden_layers", 1) != 1:
        raise ValueError("an EAGLE-3 head of several layers is not supported")
    for key in ("norm_before_fc", "fc_norm", "parallel_drafting"):
        if hf.get(key):
            raise ValueError(f"{key!r} {shown(hf[key])} is not supported")
    config = from_hf({"num_hidden_layers": 1, **hf, "architectures": ["LlamaForCausalLM"]})
    head = EagleHead(
        width=optional_integer(hf, "target_hidden_size", config.hidden_size),
        vocab_size=optional_integer(hf, "draft_vocab_size", config.vocab_size),
        taps=_eagle_taps(hf),
        norm_first=boolean(hf, "norm_before_residual", False),
    )
    return config.replace(
        head=head,
        tie_word_embeddings=False,
        tensor_names=_IN_EAGLE,
        ignored_tensors=(r"^t2d$", r"^embed_tokens\."),  # the reverse of d2t, and a copy of the model's
    )


def _eagle_taps(hf: Json) -> tuple[int, ...]:
    """Return `EagleHead.taps`. In `eagle_config` a number is the index of the layer that makes the hidden state.

    Elsewhere it is one more: the number of layers before the hidden state. Raises ValueError for another form than
    three layers, ascending.
    """
    inner = hf.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state") is False:
        raise ValueError("'use_aux_hidden_state' false is not supported")
    key = "eagle_aux_hidden_state_layer_ids"
    found, after = (inner.get(key), 1) if inner.get(key) is not None else (hf.get(key), 0)
    if found is None:
        return ()
    taps = tuple(number + after for each in found if (number := as_integer(each)) is not None)
    if len(taps) != 3 or len(found) != 3 or list(taps) != sorted(set(taps)) or taps[0] < 1:
        raise ValueError(f"{key!r} must be three layers, ascending, not {shown(found)}")
    return taps


def _with_head(hf: dict[str, Any], embeds: bool) -> dict[str, Any]:
    """Return a config.json in which a decoder that `embeds` has the name of the class with an output head.

    sentence-transformers saves it without the head, as Qwen3Model.
    """
    names = hf.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    whole = f"{name.removesuffix('Model')}ForCausalLM"
    known = name.endswith("Model") and name not in ARCHITECTURES and whole in ARCHITECTURES
    return hf | {"architectures": [whole]} if embeds and known else hf


def _named(file: Path, read: Callable[[], T]) -> T:
    """Call `read` and turn its errors into a ModelLoadError with the file's name."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        cause = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelLoadError(f"{file}: {cause[:300]}") from error


def _check_architecture(hf: Json, file: Path) -> None:
    try:
        if architecture_of(hf) not in NESTED:
            family_of(architecture_of(hf))
        refuse_unserved(hf)
    except ModelLoadError as error:
        code = "; the code that its directory brings is never run" if hf.get("auto_map") else ""
        raise ModelLoadError(f"{file}: {error}{code}", fix=error.fix) from None


def from_hf(hf: Json, generation: Json | None = None) -> ModelConfig:
    """Translate a parsed config.json, and optionally a generation_config.json. A nested one gives its language model.

    Raises KeyError, TypeError or ValueError if a required key is absent or wrong, ModelLoadError for an unsupported
    architecture.
    """
    hf, nested = flattened(hf), NESTED.get(architecture_of(hf))
    if nested is not None:
        hf = {**hf, "architectures": [nested.text_architecture(hf)]}
    architecture = architecture_of(hf)
    family = family_of(architecture)
    hf = family.published(hf)
    left_out = () if hf.get("rope_scaling") is None else ("rope_parameters",)  # two names of one entry
    defaults = {key: value for key, value in family.defaults.items() if key not in left_out}
    hf = completed({**defaults, **hf}, family.rope_theta, family.supported)
    if not isinstance(hf.get("quantization_config") or {}, dict):
        raise ValueError(f"'quantization_config' must be an object, not {shown(hf['quantization_config'])}")
    heads = integer(hf, "num_attention_heads")
    hidden = integer(hf, "hidden_size")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": integer(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer(hf, "intermediate_size"),
        "num_layers": integer(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": optional_integer(hf, "num_key_value_heads", heads),
        "head_dim": optional_integer(hf, "head_dim", hidden // heads),
        "max_position_embeddings": integer(hf, "max_position_embeddings"),
        "norm_eps": number(hf, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": boolean(hf, "tie_word_embeddings", False),
        "qkv_bias": boolean(hf, "attention_bias", False),
        "out_bias": boolean(hf, "attention_bias", False),
        "mlp_bias": boolean(hf, "mlp_bias", False),
        "activation": _activation(hf),
        "logit_soft_cap": number(hf, "final_logit_softcapping", None),
        "eos_token_ids": _eos_token_ids(hf),
        "bos_token_id": optional_integer(hf, "bos_token_id", None),
        "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
    }
    if not rope_by_layer_type(hf):
        fields["rope"] = rope_config(hf, fields["head_dim"])
    fields |= family.changes(hf, fields)
    if hf.get("tensors_apart"):
        fields |= {"packed_gate_up": False, "packed_experts": "none"}
    if nested is not None:
        fields |= _nested_fields(nested, hf, fields)
    block = _weight_block(hf)
    stored = read_stored_form(hf.get("quantization_config") or {}, block)
    if stored is not None:
        stored = stored.with_names(fields.get("tensor_names", ()))
    config = ModelConfig(**fields, weight_block=block, stored_form=stored)
    _check(config)
    return config if generation is None else with_generation(config, generation)


def _nested_fields(nested: Nested, hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a language model inside another architecture: of its tower, and the names of its tensors."""
    tower: dict[str, Any] = {}
    unused, prefixes = nested.unused, nested.prefixes
    if nested.pictures is not None and hf.get("vision_config") is not None:
        tower = nested.pictures(hf, fields)
        unused, prefixes = (), (*nested.prefixes, *OF_TOWER)
    return tower | {
        "ignored_tensors": (*unused, *fields.get("ignored_tensors", ())),
        "tensor_names": (*prefixes, *fields.get("tensor_names", ())),
    }


def with_generation(config: ModelConfig, generation: Json) -> ModelConfig:
    """Return `config` with the values of a parsed generation_config.json. Raises ValueError for one out of range."""
    return config.replace(
        eos_token_ids=_eos_token_ids(generation) or config.eos_token_ids,
        bos_token_id=optional_integer(generation, "bos_token_id", config.bos_token_id),
        generation=_generation_defaults(generation),
    )


SERVED_QUANTIZATION = (
    *("fp8", "fbgemm_fp8", "mxfp4", "modelopt", "compressed-tensors", "quark"),
    *("gptq", "awq", "gguf"),
)


def _weight_block(hf: Json) -> tuple[int, int] | None:
    """Return the rows and columns that share an FP8 scale. Raises ValueError for an unsupported quantization."""
    quantization = hf.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method is not None and method not in SERVED_QUANTIZATION:
        raise ValueError(f"quantization {method!r} is not supported (supported: {', '.join(SERVED_QUANTIZATION)})")
    block = quantization.get("weight_block_size") or compressed_block(quantization)
    if block is None:
        return None
    sizes = [size for each in block if (size := as_integer(each))] if isinstance(block, list) else []
    if len(sizes) != 2 or len(block) != 2 or not all(0 < size < 2**20 for size in sizes):
        raise ValueError(f"'weight_block_size' and 'block_structure' must be two sizes, not {shown(block)}")
    return sizes[0], sizes[1]


def _check(config: ModelConfig) -> None:
    if config.gated_mlp and config.activation == "xielu":
        raise ValueError("activation 'xielu' is not supported in an MLP with a gate")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} attention heads are no multiple of {config.num_kv_heads} kv heads")
    if len(config.windows) != config.num_layers:
        raise ValueError(f"{len(config.windows)} layer types are given for {config.num_layers} layers")
    _check_layers(config)
    if len(config.rope_layers) not in (0, config.num_layers):
        raise ValueError(f"'no_rope_layers' has {len(config.rope_layers)} entries for {config.num_layers} layers")
    for rope in () if config.bidirectional else (config.rope, config.local_rope):
        if rope is not None:
            _check_rope(rope)


def _check_layers(config: ModelConfig) -> None:
    """Raise ValueError unless the fields of single layers are for all layers and fit each other."""
    for name in ("layer_chunks", "layer_reads", "layer_heads", "layer_states", "mlp_layers"):
        if len(values := getattr(config, name)) not in (0, config.num_layers):
            raise ValueError(f"{len(values)} {name} are given for {config.num_layers} layers")
    if config.layer_states and None not in config.layer_states:
        raise ValueError("all layers have a state, and models without attention are not supported")
    for heads in config.layer_heads:
        if heads.num_heads % heads.num_kv_heads:
            raise ValueError(f"{heads.num_heads} attention heads are no multiple of {heads.num_kv_heads} kv heads")
    for index, source in enumerate(config.layer_reads):
        if source is not None and not (source < index and config.layer_reads[source] is None):
            raise ValueError(f"layer {index} cannot read the cache of layer {source}")


def _check_rope(rope: RopeConfig) -> None:
    if rope.rotary_dim % 2 or rope.rotary_dim < 2:
        raise ValueError(f"{rope.rotary_dim} numbers of a head are rotated, which must be pairs")
    lists = (rope.scaling.short_factor, rope.scaling.long_factor) if isinstance(rope.scaling, LongRopeScaling) else ()
    if any(len(factors) != rope.rotary_dim // 2 for factors in lists):
        raise ValueError(f"'short_factor' and 'long_factor' must have {rope.rotary_dim // 2} numbers")
    for field in dataclasses.fields(rope.scaling) if rope.scaling is not None else ():
        value = getattr(rope.scaling, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if not 0 <= each <= 1e9:  # false for NaN
                raise ValueError(f"{field.name!r} of the rotation's scaling must be from 0 to 1e9, not {each}")


def _activation(hf: Json) -> str:
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
    known |= {"gelu": "gelu", "relu2": "relu2", "xielu": "xielu"}
    if name not in known:
        raise ValueError(f"activation {shown(name)} is not supported (supported: {', '.join(sorted(known))})")
    return known[name]


def _eos_token_ids(hf: Json) -> tuple[int, ...]:
    """Return the token ids that end an output. The key has one id or a list."""
    value = hf.get("eos_token_id")
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids = tuple(number for each in given if (number := as_integer(each)) is not None)
    if len(given) > MAX_EOS or len(ids) < len(given) or not all(0 <= each <= MAX_TOKEN_ID for each in ids):
        what = f"a token id up to {MAX_TOKEN_ID} or a list of at most {MAX_EOS}"
        raise ValueError(f"'eos_token_id' must be {what}, not {shown(value)}")
    return ids


def _generation_defaults(generation: Json) -> GenerationDefaults:
    if generation.get("do_sample") is False:  # then only the values that hold without sampling are meant to be used
        return GenerationDefaults(repetition_penalty=number(generation, "repetition_penalty", None))
    names = [each.name for each in dataclasses.fields(GenerationDefaults) if each.name != "top_k"]
    found = {name: number(generation, name, None) for name in names}
    return GenerationDefaults(**found, top_k=optional_integer(generation, "top_k", None))
