"""Read an adapter in the form of the peft library: adapter_config.json and adapter_model.safetensors.

Only safetensors is read. `adapter_of` makes an `Adapter` of tensors that are in memory. A key or tensor that would
change the result and is not computed here is refused by name.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import re2

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import check_directory, read_object
from jaxserve.models.adapters import AdaptedStructure
from jaxserve.models.checkpoint.checkpoint import file_state
from jaxserve.models.checkpoint.safetensors_file import TensorInfo, read_contents, read_rows
from jaxserve.models.tensor_names import renamed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Bytes; 4,000 matrices have 0.6 million. The engine runs no step while it reads a file that a client has named, and
# JSON takes up to 30 times its size in memory.
_LARGEST_HEADER = _LARGEST_CONFIG = 4 * 2**20
# keys that say how an adapter was trained, or how its library runs it
_HARMLESS = frozenset(
    """auto_mapping base_model_name_or_path revision inference_mode task_type peft_type peft_version lora_dropout
    target_modules exclude_modules layers_to_transform layers_pattern megatron_config megatron_core loftq_config
    eva_config corda_config lora_ga_config runtime_config ensure_weight_tying qalora_group_size r lora_alpha use_rslora
    rank_pattern alpha_pattern init_lora_weights bias fan_in_fan_out""".split()
)
# these begin with other base weights than the checkpoint's
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_OTHER_TENSORS = {
    "lora_magnitude_vector": "DoRA is not served",
    "lora_embedding_A": "adapters of embeddings are not served",
    "lora_embedding_B": "adapters of embeddings are not served",
    "modules_to_save": "modules_to_save is not served: merge the adapter into the checkpoint",
}


@dataclass(frozen=True)
class Adapter:
    """An adapter in the memory of the host.

    digest: 32 hexadecimal digits of its tensors and scales. rank: the highest of its layers
    updates: one slot's columns of every stack, see `AdaptedStructure.updates`
    """

    digest: str
    rank: int
    updates: tuple[np.ndarray, ...]

    @property
    def num_bytes(self) -> int:
        return sum(update.nbytes for update in self.updates)


def read_adapter(directory: Path, adapted: AdaptedStructure) -> Adapter:
    """Read an adapter of the served model. Raises ModelLoadError.

    If a file is replaced while it is read, nothing of it is used.
    """
    files = directory / CONFIG, directory / WEIGHTS
    check_directory(directory)
    before = [file_state(file) for file in files]
    for file, state in zip(files, before, strict=True):
        if state is None:
            raise ModelLoadError(f"{directory} has no {file.name}", fix="name a directory of peft's save_pretrained")
    if before[0] is not None and before[0].size > _LARGEST_CONFIG:
        raise ModelLoadError(f"{files[0]} has {before[0].size} bytes; at most {_LARGEST_CONFIG} are read")
    config = read_object(files[0])
    infos: dict[str, TensorInfo] = {}
    for name, info in read_contents(files[1], _LARGEST_HEADER):
        if name in infos:
            raise ModelLoadError(f"{files[1]}: {name} is there twice")
        if info.dtype.kind in "iub":
            raise ModelLoadError(f"{files[1]}: {name} is {info.dtype}, expected floating point")
        infos[name] = info
    _halves({name: info.shape for name, info in infos.items()}, adapted)  # before memory is taken for them
    tensors = {
        name: read_rows(info, 0, info.shape[0], np.empty(info.num_bytes, np.uint8)) for name, info in infos.items()
    }
    if [file_state(file) for file in files] != before:
        raise ModelLoadError(f"{directory} changed while it was read", fix="load it again")
    return adapter_of(tensors, config, adapted)


def highest_rank(directory: Path) -> int:
    """Return the highest rank that an adapter's configuration names. Raises ModelLoadError."""
    check_directory(directory)
    config = read_object(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    ranks = [_positive(rank, f"rank_pattern of {name}") for name, rank in _pattern(config, "rank_pattern").items()]
    return max([_positive(config.get("r", 8), "r"), *ranks])


def adapter_of(tensors: Mapping[str, Any], config: Mapping[str, Any], adapted: AdaptedStructure) -> Adapter:
    """Make an adapter of arrays by peft's names, which are copied. config: the fields of adapter_config.json.

    Raises ModelLoadError that names the tensor or key, for numbers that are not finite too: one NaN would reach the
    rows of all other adapters.
    """
    scaling = _Scaling(config)
    pairs, rank, digest = {}, 0, hashlib.sha256()
    for name, (a, b) in sorted(_pairs(tensors, adapted).items()):
        scale = scaling.of(name, a.shape[0])
        rank = max(rank, a.shape[0])
        for array in (a, b):
            digest.update(f"{name} {array.shape} {scale!r}\0".encode() + array.tobytes())
        with np.errstate(over="ignore"):
            scaled = b * np.float32(scale)
        if not np.isfinite(scaled).all():
            raise ModelLoadError(f"{name}: lora_B times its scale {scale:g} is not finite")
        pairs[name] = a, scaled
    if not pairs:
        raise ModelLoadError("the adapter has no tensors")
    with np.errstate(over="ignore"):  # in float16
        updates = adapted.updates(pairs)
    if not all(np.isfinite(update.astype(np.float32)).all() for update in updates):
        raise ModelLoadError(f"the adapter has numbers that are not finite in {adapted.stacks[0].dtype}")
    return Adapter(digest.hexdigest()[:32], rank, updates)


def _pairs(tensors: Mapping[str, Any], adapted: AdaptedStructure) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return copies of A [r, in] and B [out, r], float32, by the name of their module in the checkpoint."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for module, names in _halves({name: np.shape(array) for name, array in tensors.items()}, adapted).items():
        a, b = (np.array(tensors[names[half]], np.float32, order="C") for half in "AB")
        for half, array in (("A", a), ("B", b)):
            if not np.isfinite(array).all():
                raise ModelLoadError(f"{module}: lora_{half} has numbers that are not finite")
        found[module] = a, b
    return found


def _halves(shapes: Mapping[str, tuple[int, ...]], adapted: AdaptedStructure) -> dict[str, dict[str, str]]:
    """Return the names of the tensors A and B by the name of their module. Raises ModelLoadError if one does not fit.

    shapes: of the tensors by name
    """
    rules, places = adapted.structure.config.tensor_names, adapted.tensors
    found: dict[str, dict[str, str]] = {}
    for name in shapes:
        match = re.fullmatch(r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight", name)
        module = "" if match is None else match[1].removeprefix(_PREFIX)
        module = renamed(f"{module}.weight", rules).removesuffix(".weight")
        if match is None or module not in places:
            raise _no_place(name, adapted) or ModelLoadError(f"{name[:200]}: the model has no such linear layer")
        half = found.setdefault(module, {})
        if match[2] in half:
            raise ModelLoadError(f"{name}: {module} is there twice")
        half[match[2]] = name
    for module, half in found.items():
        if len(half) < 2:
            raise ModelLoadError(f"{module}: lora_{'B' if 'A' in half else 'A'} is missing")
        _check(module, shapes[half["A"]], shapes[half["B"]], adapted)
    return found


def _check(module: str, a: tuple[int, ...], b: tuple[int, ...], adapted: AdaptedStructure) -> None:
    """Raise ModelLoadError unless the shapes of A and B fit the layer and the room."""
    out, size = adapted.tensors[module].shape
    rank, most = a[0] if a else 0, adapted.shape.rank
    if a != (rank, size) or b != (out, rank) or not rank:
        expected = f"expected [r, {size}] and [{out}, r]"
        raise ModelLoadError(f"{module}: lora_A is {list(a)} and lora_B {list(b)}, {expected}")
    if rank > most:
        raise ModelLoadError(f"{module}: rank {rank} is above lora.max_rank, {most}", fix="set lora.max_rank")


def _no_place(name: str, adapted: AdaptedStructure) -> ModelLoadError | None:
    """Return why a tensor has no place, if there is more to say than that the model lacks the layer."""
    shown = name[:200]
    for sign, why in _OTHER_TENSORS.items():
        if sign in name:
            return ModelLoadError(f"{shown}: {why}")
    if ".experts." in name:
        return ModelLoadError(f"{shown}: adapters of experts are not served yet")
    if "lm_head" in name or "embed_tokens" in name:
        return ModelLoadError(f"{shown}: adapters of embeddings and of the head are not served")
    if name.endswith(".bias"):
        return ModelLoadError(f"{shown}: biases are not served")
    module = re.sub(r"\.lora_[AB].*", "", name).removeprefix(_PREFIX)
    own = {part.name for spec in adapted.structure.specs for part in spec.parts}
    if renamed(f"{module}.weight", adapted.structure.config.tensor_names) in own:
        return ModelLoadError(f"{shown}: this layer of {adapted.structure.config.architecture} takes no adapters yet")
    return None


class _Scaling:
    """The scale of each layer by an adapter's configuration. Raises ModelLoadError for keys that are not served."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse(config)
        self._rank = _positive(config.get("r", 8), "r")
        self._alpha = config.get("lora_alpha", 8)
        self._rs = bool(config.get("use_rslora"))
        self._ranks, self._alphas = _pattern(config, "rank_pattern"), _pattern(config, "alpha_pattern")

    def of(self, module: str, rank: int) -> float:
        """Return the scale of a layer whose matrices have this rank."""
        expected = _positive(_matching(self._ranks, module, self._rank), "rank_pattern")
        if rank != expected:
            raise ModelLoadError(f"{module}: its rank is {rank}, and {CONFIG} says {expected}")
        alpha = _matching(self._alphas, module, self._alpha)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
            raise ModelLoadError(f"lora_alpha of {module} is {alpha!r:.80}, expected a number")
        return alpha / (math.sqrt(rank) if self._rs else rank)


def _refuse(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelLoadError(f"peft_type is {kind!r}; LORA is served")
    if config.get("use_dora"):
        raise ModelLoadError("use_dora: DoRA is not served", fix="merge the adapter into the checkpoint")
    if config.get("bias", "none") != "none":
        raise ModelLoadError(f"bias is {config['bias']!r}; adapters with biases are not served")
    if config.get("fan_in_fan_out"):
        raise ModelLoadError("fan_in_fan_out is not served: no model here stores its weights so")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise ModelLoadError(
            f"init_lora_weights is {begun!r}, which changes the weights of the base",
            fix="convert it with peft's path_initial_model_for_weight_conversion",
        )
    for key, value in config.items():
        if value and key not in _HARMLESS:
            raise ModelLoadError(f"{key} of {CONFIG} is not served", fix="merge the adapter into the checkpoint")


def _positive(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{key} is {value!r}, expected a positive integer")
    return value


def _pattern(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise ModelLoadError(f"{key} is {found!r:.80}, expected an object")
    return dict(found)


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as peft does."""
    return next((value for pattern, value in patterns.items() if _matches(pattern, module)), default)


def _matches(pattern: str, module: str) -> bool:
    options = re2.Options()
    options.log_errors = False
    try:
        matcher = re2.compile(rf"(?:.*\.)?(?:{pattern})", options)  # linear in time, whatever the pattern
    except re2.error:
        raise ModelLoadError(f"the pattern {pattern[:80]!r} is not read") from None
    return matcher.fullmatch(module) is not None
