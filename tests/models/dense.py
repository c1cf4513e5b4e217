"""The plain forwards as references: compiled as a whole, once for each length, without optimising for speed.

Without jit each operation would be compiled for itself and each length, which takes ten times as long.
"""

from __future__ import annotations

import jax

from jaxserve.library import dense
from tests.quick import QUICK

dense_logits = jax.jit(dense.dense_logits, static_argnums=0, compiler_options=QUICK)
dense_hidden = jax.jit(dense.dense_hidden, static_argnums=0, compiler_options=QUICK)
dense_embedding = jax.jit(dense.dense_embedding, static_argnums=(0, 1), compiler_options=QUICK)
dense_scores = jax.jit(dense.dense_scores, static_argnums=0, compiler_options=QUICK)
