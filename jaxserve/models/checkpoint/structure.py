"""A model without its weights (ModelStructure), and with them (LoadedModel), as the loader returns it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM
from jaxserve.models.draft_head import DraftHead, Predictors, make_head
from jaxserve.models.encoder import Encoder
from jaxserve.models.families.registry import family_of
from jaxserve.models.quantized_weight import keep_stored, quantize
from jaxserve.models.weights import ParamSpec, param_specs


@dataclass(frozen=True)
class ModelStructure:
    """A model without its weights. A jitted function closes over it and takes the weights (leaves) as arguments."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    treedef: Any  # a jax PyTreeDef
    specs: tuple[ParamSpec, ...]  # of the leaves, in order

    def bind(self, leaves: tuple[jax.Array, ...]) -> CausalLM:
        """Make the module with these weights: arrays [*spec.shape] of spec.dtype, one for each of `specs`.

        Inside a jitted function it costs only tracing time. Raises ModelLoadError for an encoder.
        """
        model = self._merge(leaves)
        assert not isinstance(model, DraftHead | Predictors), self.config.architecture
        if not isinstance(model, CausalLM):
            raise ModelLoadError(f"{self.config.architecture} is an encoder: it makes embeddings and generates no text")
        return model

    def bind_encoder(self, leaves: tuple[jax.Array, ...]) -> Encoder:
        """Make an encoder with these weights: arrays [*spec.shape] of spec.dtype, one for each of `specs`."""
        model = self._merge(leaves)
        assert isinstance(model, Encoder), self.config.architecture
        return model

    def bind_head(self, leaves: tuple[jax.Array, ...]) -> tuple[DraftHead, ...]:
        """Make the layers of a head with these weights: arrays [*spec.shape] of spec.dtype, one for each of `specs`."""
        model = self._merge(leaves)
        if isinstance(model, Predictors):
            return tuple(model.layers)
        assert isinstance(model, DraftHead), self.config.architecture
        return (model,)

    def _merge(self, leaves: tuple[jax.Array, ...]) -> CausalLM | Encoder | DraftHead | Predictors:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    @property
    def activation_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.activation_dtype or self.specs[0].dtype)  # the first leaf is the embedding

    @property
    def num_parameters(self) -> int:
        return sum(spec.num_parameters for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Return the size of one copy of the weights, in bytes."""
        return sum(int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize for spec in self.specs)


@dataclass(frozen=True)
class LoadedModel:
    """A model and its weights. `leaves` are in the order of `structure.specs`."""

    structure: ModelStructure
    leaves: tuple[jax.Array, ...]
    directory: Path
    checkpoint_bytes: int  # read; 0 for random weights
    seconds: float

    @property
    def config(self) -> ModelConfig:
        return self.structure.config

    def bind(self, leaves: tuple[jax.Array, ...]) -> CausalLM:
        """Make the module with these weights, see `ModelStructure.bind`: one array [shape] per entry of `specs`."""
        return self.structure.bind(leaves)


def build(config: ModelConfig, dtype: jnp.dtype) -> ModelStructure:
    """Make the structure of a model by shape evaluation, which allocates nothing whatever the size."""
    cls = family_of(config.architecture).model

    def make() -> nnx.Module:
        """Make the model in the form that its weights have on the device."""
        model = cls(config, jnp.dtype(dtype)) if config.head is None else make_head(config, cls, jnp.dtype(dtype))
        if config.quantization == "stored":
            assert config.stored_form is not None
            keep_stored(model, config.stored_form)
        elif config.quantization != "none":
            quantize(model, config.quantization, head=config.quantized_head)
        return model

    graphdef, state = nnx.split(nnx.eval_shape(make))
    return ModelStructure(config, graphdef, jax.tree.structure(state), tuple(param_specs(state)))
