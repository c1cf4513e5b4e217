"""The routed experts of a forward pass: a module stores the ids it chose, and a caller may take them.

If no caller takes them, they cost nothing: XLA removes what a program does not return.
"""

from __future__ import annotations

import jax
from flax import nnx


class KeepsChoices(nnx.Module):
    """A module that chooses experts, or that contains modules that do."""

    choices: nnx.Intermediate

    def keep_choices(self, choices: jax.Array) -> None:
        """Store the chosen expert ids, int32 [T, K], or [T, L, K] for L layers. Replaces what was stored before."""
        self.choices = nnx.Intermediate(choices)


def take_choices(module: nnx.Module) -> jax.Array | None:
    """Remove and return the expert ids stored on a module or below it. None if there are none."""
    kept = jax.tree.leaves(nnx.pop(module, nnx.Intermediate))
    return kept[0] if kept else None
