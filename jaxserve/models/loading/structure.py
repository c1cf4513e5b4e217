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
from jaxserve.models.families.bert import BertModel
from jaxserve.models.families.registry import family_of
from jaxserve.models.weights import ParamSpec, param_specs


@dataclass(frozen=True)
class ModelStructure:
    """A model without its weights. A jitted function closes over it and takes the weights (leaves) as arguments."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    treedef: Any  # a jax PyTreeDef
    specs: tuple[ParamSpec, ...]  # of the leaves, in order

    def bind(self, leaves: tuple[jax.Array, ...]) -> CausalLM:
        """Make the module with these weights, one array per entry of `specs` with its [shape] and dtype.

        Inside a jitted function it costs only tracing time. Raises ModelLoadError for an encoder.
        """
        model = self._merge(leaves)
        if not isinstance(model, CausalLM):
            raise ModelLoadError(f"{self.config.architecture} is an encoder: it makes embeddings and generates no text")
        return model

    def bind_encoder(self, leaves: tuple[jax.Array, ...]) -> BertModel:
        """Make an encoder with these weights, one array per entry of `specs` with its [shape] and dtype."""
        model = self._merge(leaves)
        assert isinstance(model, BertModel), self.config.architecture
        return model

    def _merge(self, leaves: tuple[jax.Array, ...]) -> CausalLM | BertModel:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(spec.shape)) for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Bytes of one copy of the weights."""
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
    graphdef, state = nnx.split(nnx.eval_shape(lambda: cls(config, jnp.dtype(dtype))))
    return ModelStructure(config, graphdef, jax.tree.structure(state), tuple(param_specs(state)))
