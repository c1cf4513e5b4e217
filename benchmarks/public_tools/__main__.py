"""Compare logits with transformers' on checkpoints that the formats' public tools made.

    python -m venv TOOLS && TOOLS/bin/pip install llmcompressor gguf
    TOOLS/bin/python benchmarks/public_tools/make.py DIR        # and the other make_*.py
    python -m benchmarks.public_tools DIR

Prints for each checkpoint how its weights are held, the largest difference of a logit relative to the largest logit,
and how many of the tokens that transformers decodes greedily ours are. Exits with 1 if one differs, or a logit by more
than TOLERANCE.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import JaxserveError
from jaxserve.library.dense import dense_logits
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import load_model

TOLERANCE = 1e-4


def compare(directory: Path) -> bool:
    """Print one line. Returns whether the checkpoint gives transformers' numbers."""
    expected = np.load(directory / "expected.npz")
    tokens, logits, prompt = expected["tokens"], expected["logits"], int(expected["prompt"])
    config = read_config(directory)
    config = config.replace(quantization="none" if config.stored_form is None else "stored")
    model = load_model(directory, dtype=jnp.dtype("float32"), config=config)
    found = np.asarray(jax.jit(lambda leaves: dense_logits(model.structure, leaves, jnp.asarray(tokens)))(model.leaves))
    difference = np.abs(found - logits).max() / np.abs(logits).max()
    equal = int((found[prompt - 1 : -1].argmax(-1) == tokens[prompt:]).sum())
    held = sorted({jnp.dtype(spec.dtype).name for spec in model.structure.specs})
    print(f"{directory.name:12} {', '.join(held):28} {difference:.1e}  {equal} of {len(tokens) - prompt}", flush=True)
    return difference <= TOLERANCE and equal == len(tokens) - prompt


def main() -> None:
    good = True
    for file in sorted(Path(sys.argv[1]).glob("*/expected.npz")):
        try:
            good &= compare(file.parent)
        except JaxserveError as error:
            print(f"{file.parent.name:12} refused: {str(error)[:300]}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
