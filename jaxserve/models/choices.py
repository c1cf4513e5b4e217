"""Which experts a forward pass chose: kept on the module that chose, taken by whoever asks.

Where nobody asks, nothing is computed for it: XLA drops what no program returns.
"""

from __future__ import annotations

import jax
from flax import nnx


class KeepsChoices(nnx.Module):
    """A module that chooses, or that holds some that do."""

    choices: nnx.Intermediate

    def keep_choices(self, choices: jax.Array) -> None:
        """int32 [T, K], or [T, L, K] of L layers; what was kept before is forgotten."""
        self.choices = nnx.Intermediate(choices)


def take_choices(module: nnx.Module) -> jax.Array | None:
    """What was kept on a module or below it, once; None where nothing was chosen."""
    kept = jax.tree.leaves(nnx.pop(module, nnx.Intermediate))
    return kept[0] if kept else None
