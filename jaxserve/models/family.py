"""The declaration of a model family: its name in config.json, its module class, the meaning of its config keys.

Each module of `families` declares its architectures in a tuple FAMILIES; `families.registry` collects them.
A `Nested` one is a language model inside an architecture that also takes pictures or sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import Json, shown
from jaxserve.models.config import ModelConfig

Fields = dict[str, Any]  # fields of ModelConfig by name


def no_changes(hf: Json, fields: Fields) -> Fields:
    """Return no fields: the common keys describe the whole config."""
    return {}


@dataclass(frozen=True)
class Family:
    """An architecture that can be served.

    architecture  its name in config.json
    model         the module's class
    changes       (parsed config.json, fields read from the common keys) -> ModelConfig fields to add or replace.
                  Applies the family's own keys and the defaults that published files leave out. Raises ValueError for
                  a value that is not supported
    rope_theta    base of the rotation if config.json has none
    defaults      values of keys that config.json lacks, where they are not those of most families
    published     (parsed config.json) -> the same with the keys of transformers' class, for files that have others
    supported     the values of a key that are computed; others are refused. Null and an absent key are supported
    """

    architecture: str
    model: Callable[[ModelConfig, jnp.dtype], nnx.Module]
    changes: Callable[[Json, Fields], Fields] = no_changes
    rope_theta: float = 10000.0
    defaults: Json = field(default_factory=dict)
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    published: Callable[[Json], Json] = lambda hf: hf


# Beginnings of the language model's tensors inside an architecture with towers -> without them.
IN_TOWERS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
# A tower that is served has the names of its modules under `visual`.
OF_TOWER = (
    ("model.visual.", "visual."),
    (".merger.ln_q.", ".merger.norm."),
    (".merger.mlp.0.", ".merger.linear_fc1."),
    (".merger.mlp.2.", ".merger.linear_fc2."),
)
_TOWER = "visual|vision_tower|vision_model|multi_modal_projector|mm_projector|audio_tower|embed_vision|embed_audio"
TOWERS = (rf"^(model\.)?({_TOWER})\.",)


@dataclass(frozen=True)
class Nested:
    """An architecture with a language model inside. Without `pictures` it is served alone: as text.

    Its config.json has the language model's keys in `text_config`.

    architectures  its names in config.json: the published one and the one of transformers' class, if they differ
    texts          `model_type` of `text_config` -> the language model's architecture. The first one is the default
    unused         regular expressions of the published names of tensors that text does not need
    prefixes       rules of ModelConfig.tensor_names
    pictures       (parsed config.json, fields read so far) -> fields of a model whose tower is served too. None: its
                   tower is not known here
    """

    architectures: tuple[str, ...]
    texts: Mapping[str, str]
    unused: tuple[str, ...] = TOWERS
    prefixes: tuple[tuple[str, str], ...] = IN_TOWERS
    pictures: Callable[[Json, Fields], Fields] | None = None

    def text_architecture(self, text: Json) -> str:
        """Return the language model's architecture. text: the parsed `text_config`. Raises ValueError if unknown."""
        kind = text.get("model_type") or next(iter(self.texts))
        if kind not in self.texts:
            names = ", ".join(self.texts)
            raise ValueError(
                f"'model_type' of 'text_config' is {shown(kind)}, which is not supported (supported: {names})"
            )
        return self.texts[kind]
