"""Published models by shape evaluation alone: their size, what each device holds, and nothing large left whole."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import build
from jaxserve.runtime.memory import Sizes, plan_memory
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.shape_plan import ShapePlan, ShapePlanner, splits
from jaxserve.types.scheduling import Reach, Span
from tests.conftest import SharedData
from tests.models.published import PUBLISHED

BFLOAT16 = jnp.dtype("bfloat16")
MIB, GIB = 2**20, 2**30
LARGE = 64 * MIB  # a weight that may not stay whole on a device
# most devices over which the attention heads can be split, or kv heads copied at little cost
SPLIT = {
    "Gemma-2-2B": 8,
    "Gemma-3-1B": 4,
    "EXAONE-4.0-32B": 8,
    "ERNIE-4.5-0.3B": 2,
    "GLM-4.7-Flash": 4,
    "Gemma-4-E2B": 8,
    "AFM-4.5B": 4,
    "Granite-4.0-micro": 8,
    "StarCoder2-3B": 2,
    "Helium-1-2B": 4,
    "Qwen2.5-VL-7B": 4,
    "LFM2-1.2B": 8,
    "Qwen3.5-0.8B": 2,
    "Falcon-H1-0.5B": 2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    model = PUBLISHED[name]
    config = from_hf(model.hf)
    planner = ShapePlanner(config, BFLOAT16)
    for devices in (1, 8, 16):
        tensor, expert = splits(config, devices)[0]
        if tensor > SPLIT.get(name, 128):
            tensor = SPLIT[name]
        plan = planner.plan(tensor, expert)
        assert plan.num_parameters / 1e9 == pytest.approx(model.billions, abs=5e-4)
        ideal = 2 * plan.num_parameters / plan.num_devices
        assert plan.num_devices == 1 or plan.largest_whole[1] < LARGE, plan.largest_whole
        groups = [state.key_heads for state in config.layer_states if state is not None]  # B and C are copied as K is
        fewest = min([config.num_kv_heads, *(heads.num_kv_heads for heads in config.layer_heads), *groups])
        copied_kv = tensor > fewest  # fewer than devices; over "expert" attention is copied as well
        assert plan.weight_bytes - plan.whole_bytes >= 0.98 * ideal - plan.whole_bytes
        most = 1.15 if copied_kv or expert > 1 else 1.001
        if any(config.layer_states) and expert > 1:  # layers with a state are larger than attention, and copied as well
            most = 1.3
        assert plan.weight_bytes < ideal * most + plan.whole_bytes


@pytest.mark.parametrize("name", [name for name, model in PUBLISHED.items() if model.file])
def test_these_are_the_published_files(name: str, shared_data: SharedData) -> None:
    model = PUBLISHED[name]
    path = shared_data / f"hf_configs/{model.file}_config.json"
    whole = json.loads(path.read_text())
    plain = {key: value for key, value in whole.items() if key != "quantization_config"}
    theirs, ours = build(from_hf(plain), BFLOAT16).specs, build(from_hf(model.hf), BFLOAT16).specs
    assert [(spec.name, spec.shape, spec.axes) for spec in theirs] == [(s.name, s.shape, s.axes) for s in ours]


def test_kv_bytes_and_tokens() -> None:
    config = from_hf(PUBLISHED["Llama-3.1-8B"].hf)
    planner = ShapePlanner(config, BFLOAT16)
    one, eight, sixteen = (planner.plan(tensor, 1) for tensor in (1, 8, 16))
    assert one.kv_token_bytes == 32 * 2 * 8 * 128 * 2
    assert eight.kv_token_bytes == sixteen.kv_token_bytes == one.kv_token_bytes // 8  # 8 kv heads: each twice on 16
    assert one.kv_tokens(8 * GIB) == 0
    room = int(80 * GIB * 0.9) - one.weight_bytes
    assert one.kv_tokens(80 * GIB) == room // (16 * one.kv_token_bytes) * 16, "whole pages"


def test_what_is_counted_is_what_lies_there() -> None:
    """A small model on one device, against arrays."""
    config = from_hf(PUBLISHED["Gemma-3-1B"].hf).replace(num_layers=2, layer_windows=(512, None), vocab_size=1000)
    plan = ShapePlanner(config, BFLOAT16).plan(1, 1)
    arrays = [np.zeros(spec.shape, np.uint16) for spec in build(config, BFLOAT16).specs]
    assert isinstance(plan, ShapePlan) and plan.weight_bytes == sum(array.nbytes for array in arrays)


def test_windowed_layers_leave_room_for_more_tokens() -> None:
    """gpt-oss-120b on four devices: half of its layers see 128 tokens."""
    config = from_hf(PUBLISHED["gpt-oss-120b"].hf | {"sliding_window": 128})
    plan = ShapePlanner(config, BFLOAT16).plan(4, 1)
    window = Reach("window", 128)
    assert plan.reaches == [window] and plan.token_bytes[window][0] * 2 == plan.kv_token_bytes
    kept = plan.kv_tokens(80 * GIB)
    tokens, contexts = plan.room(80 * GIB, 131072)
    assert 1.8 * kept < tokens < 2 * kept and contexts == tokens / 131072
    many = plan.room(80 * GIB, 128, max_num_seqs=2**16)
    assert many == (kept, kept / 128), "no sequence is longer than the window"
    assert plan.room(80 * GIB, 128) == (2 * 512 * 128, 2 * 512), "no more pages than 512 requests use"


def test_layers_that_read_another_layers_cache_take_nothing() -> None:
    """Gemma 4 E2B has caches in 15 of 35 layers: 12 with a window and heads of 256, 3 without and heads of 512."""
    plan = ShapePlanner(from_hf(PUBLISHED["Gemma-4-E2B"].hf), BFLOAT16).plan(1, 1)
    assert {reach: size for reach, (size, _) in plan.token_bytes.items()} == {
        Reach("window", 512): 12 * 2 * 256 * 2,
        None: 3 * 2 * 512 * 2,
    }


@pytest.mark.parametrize(("name", "tensor"), [("Gemma-4-26B-A4B", 1), ("Gemma-4-31B", 2), ("Llama-4-Scout", 8)])
def test_windows_and_chunks_leave_room_for_more_tokens(name: str, tensor: int) -> None:
    config = from_hf(PUBLISHED[name].hf)
    everything = config.replace(layer_windows=(), layer_chunks=(), local_rope=None)
    some, all_ = (ShapePlanner(each, BFLOAT16).plan(tensor, 1).room(80 * GIB, 131072) for each in (config, everything))
    assert some[0] > 1.5 * all_[0] and some[1] > 1.5 * all_[1]


def test_the_plan_without_windows_is_the_old_one() -> None:
    plan = ShapePlanner(from_hf(PUBLISHED["Llama-3.1-8B"].hf), BFLOAT16).plan(1, 1)
    assert plan.room(80 * GIB, 131072) == (plan.kv_tokens(80 * GIB), plan.kv_tokens(80 * GIB) / 131072)


def test_pages_of_8_bits_are_counted_with_their_scales() -> None:
    model = from_hf(PUBLISHED["Llama-3.1-8B"].hf)
    wide, narrow = (ShapePlanner(model, BFLOAT16, cache_dtype=dtype).plan(1, 1) for dtype in (None, jnp.dtype("int8")))
    assert wide.kv_token_bytes == 32 * 2 * 8 * 128 * 2
    assert narrow.kv_token_bytes == 32 * 2 * 8 * (128 + 4)


def test_the_plan_counts_the_8_bit_pages_that_the_server_makes() -> None:
    """On 131 GiB more than 2 GiB of a layer would fit, of which the Triton kernels do not read all."""
    model, int8 = from_hf(PUBLISHED["Llama-3.1-8B"].hf), jnp.dtype("int8")
    plan = ShapePlanner(model, BFLOAT16, cache_dtype=int8).plan(1, 1)
    fit = int(131 * GIB * 0.9 - plan.weight_bytes) // (16 * plan.kv_token_bytes)
    reached = 2**31 // (16 * 2 * 8 * 128)
    assert reached < fit < 2 * reached
    assert plan.kv_tokens(131 * GIB) == 16 * reached == plan.room(131 * GIB, 131072)[0]
    assert plan.largest_batch(131 * GIB, 16000) == reached // 1000 < fit // 1000
    config = RunnerConfig(
        max_num_seqs=512, max_num_batched_tokens=8192, max_model_len=131072, page_size=16, cache_dtype=int8
    )
    sizes = Sizes(
        weight_bytes=plan.weight_bytes,
        state_bytes=0,
        scratch_bytes=0,
        page_bytes=16 * plan.kv_token_bytes,
        page_size=16,
        max_num_seqs=512,
        reached=(plan.token_bytes[None][1],),
    )
    assert plan_memory(sizes, config, platform="gpu", device_bytes=131 * GIB).num_pages == reached
    assert plan.kv_tokens(260 * GIB) > 32 * reached, "more than 4 GiB of a layer are read with offsets of 64 bits"


def test_the_plan_counts_the_8_bit_pages_of_windows() -> None:
    hf = PUBLISHED["gpt-oss-120b"].hf | {"sliding_window": 128}
    plan = ShapePlanner(from_hf(hf), BFLOAT16, cache_dtype=jnp.dtype("int8")).plan(1, 1)
    page, reached = 16 * 2 * 8 * 64, 2**17
    assert [largest for _, largest in plan.token_bytes.values()] == [page, page] and reached * page == 2**31
    memory = int((plan.weight_bytes + 60 * GIB) / 0.9)
    assert plan.room(memory, 131072)[0] == 16 * reached, "18 of 36 layers keep all"
    windows = Span(Reach("window", 128), 16, prompt_tokens=8192)
    assert reached < windows.for_requests(2**13) < 2 * reached
    assert plan.room(10 * memory, 2**11, max_num_seqs=2**13)[1] == reached / windows.most(2**11)


def test_a_weight_that_the_server_refuses_is_refused_by_the_plan() -> None:
    config = from_hf(PUBLISHED["DeepSeek-V3"].hf).replace(quantization="fp8", num_layers=4)
    planner = ShapePlanner(config, BFLOAT16)
    with pytest.raises(ConfigError, match=r"experts\S* has 3\.50 GiB on a device, and the Triton kernels read"):
        planner.plan(1, 2)
    assert planner.plan(1, 4).weight_bytes > GIB
