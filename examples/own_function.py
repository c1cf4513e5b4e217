"""Jit a function of your own around the model's forward: python examples/own_function.py [MODEL_DIR]

The weights are a flat tuple of arrays and the forward is a plain function over pytrees, so jit, grad, vmap and
shardings work on it as on any other JAX function. Here: how surprised is the model by each token of a text?
"""

import sys

import jax
import jax.numpy as jnp

from jaxserve import Engine
from jaxserve.library.dense import dense_logits


def main() -> None:
    engine = Engine(sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=8)
    structure = engine.runner.structure

    @jax.jit
    def surprise(leaves: tuple[jax.Array, ...], token_ids: jax.Array) -> jax.Array:
        """Negative log-probability in nats of each token after the first. token_ids: int32 [T] -> float32 [T - 1]."""
        logits = dense_logits(structure, leaves, token_ids)
        logprobs = jax.nn.log_softmax(logits[:-1], axis=-1)
        return -jnp.take_along_axis(logprobs, token_ids[1:, None], axis=-1)[:, 0]

    text = "The capital of France is Paris. The capital of France is cheese."
    token_ids = engine.tokenizer.encode(text)
    values = surprise(engine.runner.leaves, jnp.asarray(token_ids, jnp.int32))
    for token_id, value in zip(token_ids[1:], values.tolist(), strict=True):
        print(f"{engine.tokenizer.decode([token_id])!r:12} {value:6.2f} {'#' * round(2 * value)}")


if __name__ == "__main__":
    main()
