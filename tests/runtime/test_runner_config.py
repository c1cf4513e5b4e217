import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.runtime.runner_config import RunnerConfig, resolve_dtypes
from tests.models.checkpoints import TINY_LLAMA
from tests.models.families import STATE_CASES

FLOAT32 = jnp.dtype("float32")


def resolve(platform: str = "cpu", **sections: dict[str, Any]) -> RunnerConfig:
    return RunnerConfig.resolve(Config().replace(**sections), from_hf(TINY_LLAMA), platform, FLOAT32)


@pytest.mark.parametrize(
    ("platform", "deterministic", "seqs", "tokens", "page_size"),
    [("cpu", False, 64, 512, 16), ("cpu", True, 64, 512, 16), ("gpu", False, 512, 8192, 16),
     ("gpu", True, 128, 128, 16), ("tpu", False, 512, 8192, 128)],
)  # fmt: skip
def test_defaults(platform: str, deterministic: bool, seqs: int, tokens: int, page_size: int) -> None:
    config = resolve(platform, runtime={"deterministic": deterministic})
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.page_size) == (seqs, tokens, page_size)
    assert config.max_model_len == 64 and config.shrink_context and config.num_pages is None
    assert config.cache_dtype == FLOAT32


def test_what_is_configured_is_taken() -> None:
    config = resolve(
        model={"max_model_len": 32},
        scheduler={"max_num_seqs": 1000},
        cache={"page_size": 4, "num_pages": 77, "dtype": "bfloat16", "memory_fraction": 0.5},
    )
    assert (config.max_model_len, config.shrink_context) == (32, False)
    assert config.max_num_batched_tokens == 1000  # every running request fits into one step
    assert (config.page_size, config.num_pages, config.memory_fraction) == (4, 77, 0.5)
    assert config.cache_dtype == jnp.dtype("bfloat16")


def test_dtypes_of_the_cache() -> None:
    assert resolve(cache={"dtype": "int8"}).cache_dtype == jnp.dtype("int8")
    assert resolve(cache={"dtype": "fp8"}).cache_dtype == jnp.dtype("float8_e4m3fn")


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="was made for 64 tokens"):
        resolve(model={"max_model_len": 65})


def test_dtypes() -> None:
    bfloat16, float16 = jnp.dtype("bfloat16"), jnp.dtype("float16")
    assert resolve_dtypes("auto", "cpu") == (FLOAT32, FLOAT32)
    assert resolve_dtypes("auto", "cpu", keeps_bfloat16=True) == (bfloat16, FLOAT32)
    assert resolve_dtypes("bfloat16", "cpu") == (bfloat16, FLOAT32)
    assert resolve_dtypes("auto", "gpu") == resolve_dtypes("bfloat16", "gpu") == (bfloat16, bfloat16)
    assert resolve_dtypes("float16", "cpu") == (float16, float16)


def of_states(case: str, platform: str = "cpu", **sections: dict[str, Any]) -> RunnerConfig:
    return RunnerConfig.resolve(Config().replace(**sections), from_hf(STATE_CASES[case]), platform, FLOAT32)


@pytest.mark.parametrize(
    ("case", "platform", "cache", "found"),
    [
        ("qwen3_5", "cpu", {}, (512, 64)),
        ("qwen3_5", "gpu", {}, (2048, 64)),
        ("qwen3_5", "tpu", {}, (2048, 128)),
        ("qwen3_5", "cpu", {"page_size": 48, "state_interval": 200}, (384, 192)),
        ("lfm2", "cpu", {}, (128, 16)),
        ("lfm2", "gpu", {"state_interval": 1}, (16, 16)),
    ],
)
def test_where_states_are_kept(case: str, platform: str, cache: dict[str, Any], found: tuple[int, int]) -> None:
    config = of_states(case, platform, cache=cache)
    assert (config.state_interval, config.state_border) == found
    assert (resolve().state_interval, resolve().state_border) == (0, 0)


def test_states_are_the_same_behind_several_api_processes() -> None:
    """The engine's process knows of one client only, the main process."""
    assert of_states("lfm2", server={"workers": 4}) == of_states("lfm2")


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("cache.host_memory", {"cache": {"host_memory": 2**20}}),
        ("mesh.hosts", {"mesh": {"hosts": 2}}),
        ("runtime.bundle", {"runtime": {"bundle": "."}}),
    ],
)
def test_what_does_not_work_with_states_is_refused_by_name(name: str, sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{name} does not work yet with a model whose layers have a recurrent state"):
        of_states("lfm2", **sections)


def test_adapters_are_refused_by_name_where_they_are_not_served() -> None:
    encoder = dataclasses.replace(from_hf(TINY_LLAMA), bidirectional=True)
    with pytest.raises(ConfigError, match="adapters are not served with an encoder yet"):
        RunnerConfig.resolve(Config.of(slots=1), encoder, "cpu", FLOAT32)
