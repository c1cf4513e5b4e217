"""Measure how far quantized weights move a model's distributions, beside the change of perplexity.

    python -m benchmarks.divergence MODEL [--stories 300] [--forms int8 fp8 int4 nvfp4 mxfp4] [--rounded]

--rounded: with the products of `runtime.activations: rounded`, also for bfloat16 weights.

The divergence is that of Kullback and Leibler from the float32 model, a mean over tokens in nats. A perplexity may fall
by chance where a model's numbers change, and does so for a small model; the divergence may not.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from examples.demo_model.stories import CHARACTERS, tell
from jaxserve.library.dense import dense_attend
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.ops import native
from jaxserve.ops.linear import Products

WINDOW = 256  # tokens of a text
FLOAT32 = jnp.dtype("float32")


def log_probabilities(model: LoadedModel, windows: jax.Array, linear: Products) -> np.ndarray:
    """Return those of each token after the first: windows int32 [N, WINDOW] -> [N, WINDOW - 1, vocabulary]."""
    positions, attend = jnp.arange(WINDOW, dtype=jnp.int32), dense_attend(model.config)
    caches = (None,) * model.config.num_layers

    @jax.jit
    def of(leaves: tuple[jax.Array, ...], window: jax.Array) -> jax.Array:
        """Compute one window int32 [WINDOW]."""
        decoder = model.structure.bind(leaves)
        hidden, _ = decoder(window, positions, caches, attend, linear)
        logits = decoder.logits(hidden, linear)[:-1]
        return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)

    return np.stack([of(model.leaves, window) for window in windows])


def stories(model: Path, count: int) -> jax.Array:
    """Return the tokens of stories in windows, int32 [N, WINDOW]."""
    rng = random.Random(0)
    text = " ".join(tell(rng, rng.choice(CHARACTERS)) for _ in range(count))
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return jnp.array([ids[first : first + WINDOW] for first in range(0, len(ids) - WINDOW, WINDOW)])


def compared(plain: np.ndarray, found: np.ndarray, windows: jax.Array) -> str:
    """Return the change of perplexity and the divergence of log-probabilities [N, WINDOW - 1, vocabulary] in words."""
    change = np.take_along_axis(plain - found, np.asarray(windows)[:, 1:, None], 2).mean()
    divergence = (np.exp(plain) * (plain - found)).sum(-1).mean()
    return f"perplexity {math.expm1(change):+.2%}, divergence {divergence:.5f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stories", type=int, default=300)
    parser.add_argument("--forms", nargs="+", default=["int8", "fp8", "int4", "nvfp4", "mxfp4"])
    parser.add_argument("--rounded", action="store_true")
    options = parser.parse_args()
    config, windows = read_config(options.model), stories(options.model, options.stories)
    following = np.asarray(windows)[:, 1:, None]
    plain = log_probabilities(load_model(options.model, dtype=FLOAT32, config=config), windows, Products())
    linear = Products()
    if options.rounded:
        native.load()
        linear = Products(native=True, rounded="cpu")
    print(f"float32: perplexity {math.exp(-np.take_along_axis(plain, following, 2).mean()):.4f}")
    for form in options.forms:
        wide = form == "bfloat16"
        kept = config.replace(activation_dtype="float32") if wide else config.replace(quantization=form)
        model = load_model(options.model, dtype=jnp.dtype("bfloat16") if wide else FLOAT32, config=kept)
        found = log_probabilities(model, windows, linear)
        print(f"{form}: {compared(plain, found, windows)}", flush=True)


if __name__ == "__main__":
    main()
