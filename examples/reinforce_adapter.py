"""The same with an adapter (LoRA): python examples/reinforce_adapter.py [STEPS] [SEED] [CURVE.svg]

The weights stay as they are. The policy gradient changes the two matrices of a few layers, and `engine.load_adapter`
replaces the adapter between two steps. Every answer has its version, NAME@NUMBER. Needs the extra `train`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from reinforce import Leaves, Trainer, main

from jaxserve import Engine

TARGETS = ("o_proj.weight", "down_proj.weight")  # each is an array of its own in the engine; q, k and v are one
NAME, RANK, ALPHA = "policy", 8, 16

Tensors = dict[str, jax.Array]  # by peft's names


class AdapterTrainer(Trainer):
    """Trains A [RANK, in] and B [out, RANK] of the targets, float32. B begins as zeros: the answers are the model's."""

    adapter = NAME
    learning_rate = 3e-3

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.publish(engine)

    def first_parameters(self) -> Tensors:
        rng, found = np.random.default_rng(0), {}
        for spec in self.structure.specs:
            if spec.name.endswith(TARGETS):
                out, size = spec.shape
                found[_name(spec.name, "A")] = jnp.asarray(rng.normal(0, size**-0.5, (RANK, size)), jnp.float32)
                found[_name(spec.name, "B")] = jnp.zeros((out, RANK), jnp.float32)
        return found

    def leaves(self, parameters: Tensors) -> Leaves:
        """Return the weights with the adapter added."""

        def added(name: str, leaf: jax.Array) -> jax.Array:
            if not name.endswith(TARGETS):
                return leaf
            return leaf + ALPHA / RANK * parameters[_name(name, "B")] @ parameters[_name(name, "A")]

        return tuple(added(spec.name, leaf) for spec, leaf in zip(self.structure.specs, self.base, strict=True))

    def publish(self, engine: Engine) -> None:
        engine.load_adapter(NAME, self.parameters, config={"r": RANK, "lora_alpha": ALPHA})


def _name(weight: str, half: str) -> str:
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_{half}.weight"


if __name__ == "__main__":
    main(AdapterTrainer, slots=1, max_rank=RANK)
