import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.errors import ConfigError
from jaxserve.runtime.memory import MIB, MemoryPlan, Sizes, device_memory, plan_memory, scratch_bytes

GIB = 2**30
SIZES = Sizes(
    weight_bytes=16 * GIB,
    state_bytes=GIB,
    scratch_bytes=2 * GIB,
    page_bytes=2 * MIB,
    page_size=16,
    max_num_seqs=512,
)


def plan(sizes: Sizes = SIZES, **changes: Any) -> MemoryPlan:
    arguments: dict[str, Any] = {
        "platform": "gpu",
        "device_bytes": 80 * GIB,
        "memory_fraction": 0.9,
        "num_pages": None,
        "max_model_len": 8192,
        "shrink_context": False,
    }
    return plan_memory(sizes, **(arguments | changes))


def test_pages_take_what_the_budget_leaves() -> None:
    result = plan()
    assert result.num_pages == (72 - 16 - 1 - 2) * 512
    assert result.kv_bytes == 53 * GIB and result.kv_tokens == result.num_pages * 16
    assert result.max_concurrency == pytest.approx(53)


def test_no_more_pages_than_all_slots_can_use_twice() -> None:
    assert plan(device_bytes=10**15).num_pages == 2 * 512 * 512


def test_a_cpu_pool_is_capped_at_the_weights_or_half_a_gibibyte() -> None:
    assert plan(platform="cpu").kv_bytes == 16 * GIB
    small = dataclasses.replace(SIZES, weight_bytes=10 * MIB)
    assert plan(small, platform="cpu", max_model_len=4096).kv_bytes == 512 * MIB


def test_a_number_of_pages_is_taken_as_given() -> None:
    assert plan(num_pages=600, max_model_len=100).num_pages == 600


@pytest.mark.parametrize("changes", [{"num_pages": 511}, {"device_bytes": 22 * GIB}, {"memory_fraction": 0.1}])
def test_too_little_for_one_request_says_what_to_do(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one request may have 8192") as caught:
        plan(**changes)
    assert "memory_fraction" in str(caught.value.fix)


def test_a_context_nobody_asked_for_shrinks_to_what_fits() -> None:
    assert plan(num_pages=100, shrink_context=True).max_model_len == 1600
    with pytest.raises(ConfigError):
        plan(num_pages=0, shrink_context=True)


def test_measured_sizes() -> None:
    assert device_memory(jax.devices("cpu")) > GIB
    compiled = jax.jit(lambda x: jnp.sin(x @ x) @ x).lower(jax.ShapeDtypeStruct((256, 256), jnp.float32)).compile()
    assert scratch_bytes(compiled) >= 256 * 256 * 4
