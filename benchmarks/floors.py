"""Measure the memory bandwidth and the matrix rate of a machine, and compute the least time of a step from them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import build
from jaxserve.ops import native

_READ_BYTES = 2**28  # several times any cache
_SQUARE = 2048
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes per second of a matrix-vector product, and operations per second of a square float32 product."""

    bandwidth: float
    rate: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """parameters: those that a step reads; an embedding counts only if it is also the head."""

    parameters: int
    kv_values: int  # numbers per token in the KV cache
    itemsize: int = 4
    state_values: int = 0  # numbers of a row's recurrent states, in float32


def measure_machine() -> Machine:
    """Return the best rates of XLA's products and, on a CPU, of the C kernels. Other work can only lower them."""
    matrix, vector = jnp.ones((_READ_BYTES // 4 // _SQUARE, _SQUARE), jnp.float32), jnp.ones((1, _SQUARE), jnp.float32)
    square = jnp.ones((_SQUARE, _SQUARE), jnp.float32)
    forms = {"xla": (lambda x, w: w @ x[0], lambda x, w: x @ w)}
    if jax.default_backend() == "cpu":
        with contextlib.suppress(ConfigError):
            native.load()
            forms["native"] = native.matmul_few, native.matmul
    read = min(_best(jax.jit(reader), vector, matrix) for reader, _ in forms.values())
    product = min(_best(jax.jit(multiplier), square, square) for _, multiplier in forms.values())
    return Machine(_READ_BYTES / read, 2 * _SQUARE**3 / product)


def _best(function: Callable[..., jax.Array], *args: jax.Array) -> float:
    function(*args).block_until_ready()
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        function(*args).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def model_size(directory: Path) -> ModelSize:
    """Return the size of a model in float32."""
    config = read_config(directory)
    parameters = build(config, jnp.dtype("float32")).num_parameters
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size
    states = [state for state in config.layer_states if state is not None]
    of_states = sum(state.heads * state.k_dim * state.v_dim for state in states if state.kind != "convolution")
    attention = config.num_layers - len(states)
    return ModelSize(parameters, 2 * attention * config.num_kv_heads * config.head_dim, state_values=of_states)


def decode_floor(machine: Machine, model: ModelSize, rows: int, context: int) -> float:
    """Return the least seconds of a step of `rows` tokens over `context` tokens each: the longer of weights and
    arithmetic, plus the KV cache, plus the states once in and once out.
    """
    weights = model.parameters * model.itemsize / machine.bandwidth
    arithmetic = 2 * model.parameters * rows / machine.rate
    cache = rows * context * model.kv_values * model.itemsize / machine.bandwidth
    states = 2 * 4 * rows * model.state_values / machine.bandwidth
    return max(weights, arithmetic) + cache + states


def prefill_floor(machine: Machine, model: ModelSize, tokens: int) -> float:
    """Return the least seconds of `tokens` prompt tokens: their products, without attention."""
    return 2 * model.parameters * tokens / machine.rate
