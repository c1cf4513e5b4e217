"""Every family against transformers' own implementation, and every feature of it against a model without that feature.

Logits are held to 1e-4 of the largest; a mutant must be off by 30 times as much.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.checkpoint.loader import LoadedModel, build, load_model
from jaxserve.models.config import LatentConfig, ModelConfig, MoEConfig
from jaxserve.models.rope import LongRopeScaling, QueryScale, RopeConfig, YarnScaling
from tests.models import paged
from tests.models.checkpoints import write_checkpoint
from tests.models.dense import dense_logits
from tests.models.families import CASES, GOLDENS, NUM_PROMPT, golden_tensors

TOLERANCE = 1e-4
FLOAT32 = jnp.dtype("float32")


@dataclass(frozen=True)
class Golden:
    """One case: its published checkpoint on disk and what transformers makes of it."""

    directory: Path
    tensors: dict[str, np.ndarray]
    ids: list[int]
    logits: np.ndarray
    greedy: list[int]
    bfloat16_error: float


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    @functools.cache
    def golden(case: str) -> Golden:
        tensors = golden_tensors(case)
        directory = write_checkpoint(tmp_path_factory.mktemp(case), CASES[case], tensors)
        arrays = np.load(GOLDENS / f"{case}.npz")
        ids, greedy = arrays["ids"].tolist(), arrays["greedy"].tolist()
        return Golden(directory, tensors, ids, arrays["logits"], greedy, float(arrays["bfloat16_error"]))

    return golden


def run(model: LoadedModel, golden: Golden) -> np.ndarray:
    """Logits [T, V] of the prompt and of transformers' greedy tokens behind it, by one program a structure."""
    ids = jnp.asarray([*golden.ids, *golden.greedy], jnp.int32)
    return np.asarray(dense_logits(model.structure, model.leaves, ids))


def served(golden: Golden) -> ModelConfig:
    """The config for a context that holds prompt and greedy tokens."""
    return read_config(golden.directory).for_context(128)


def error(logits: np.ndarray, golden: Golden) -> float:
    """On the prompt, relative to the largest logit."""
    prompt = logits[: len(golden.ids)]
    return float(np.abs(prompt - golden.logits).max() / np.abs(golden.logits).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case: str, goldens: Callable[[str], Golden]) -> None:
    golden = goldens(case)
    model = load_model(golden.directory, dtype=FLOAT32, config=served(golden))
    logits = run(model, golden)
    assert error(logits, golden) < TOLERANCE
    assert logits[len(golden.ids) - 1 : -1].argmax(axis=-1).tolist() == golden.greedy


# what reaches the cache or the attention differently; the others in the long form
PAGED = (
    "llama3",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma4_e",
    "llama4",
    "smollm3",
    "gpt_oss",
    "deepseek_v3",
    "laguna",
    "mimo_v2",
)
PAGED_CASES = [
    *((case, 16) for case in PAGED),
    *(pytest.param(case, 16, marks=pytest.mark.slow) for case in CASES if case not in PAGED),
    *(pytest.param(case, NUM_PROMPT, marks=pytest.mark.slow) for case in CASES),
]


@pytest.mark.parametrize(("case", "chunk"), PAGED_CASES)
def test_greedy_through_pages(case: str, chunk: int, goldens: Callable[[str], Golden]) -> None:
    golden = goldens(case)
    model = load_model(golden.directory, dtype=FLOAT32, config=served(golden))
    assert paged.greedy(model, golden.ids, len(golden.greedy), chunk) == golden.greedy


# one family of each kind of layer: rounding adds nothing to what float32 shows of the others
@pytest.mark.parametrize(
    "case", [case if case in PAGED else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_bfloat16_moves_no_more_than_transformers(case: str, goldens: Callable[[str], Golden]) -> None:
    """Of a model with experts, rounding decides a near tie between two of them for at most 2 of 40 tokens."""
    golden, config = goldens(case), from_hf(CASES[case])
    logits = run(load_model(golden.directory, dtype=jnp.dtype("bfloat16"), config=served(golden)), golden)
    errors = np.sort(np.abs(logits[: len(golden.ids)] - golden.logits).max(axis=-1))
    assert errors[-1 if config.moe is None else -3] <= 1.5 * golden.bfloat16_error + 0.02


@pytest.mark.parametrize("case", CASES)
def test_layers_of_a_kind_are_equal(case: str) -> None:
    config = from_hf(CASES[case])
    first, second = build(config, FLOAT32), build(config, FLOAT32)
    assert first == second
    leaves = tuple(jnp.zeros(spec.shape, spec.dtype) for spec in first.specs)
    kinds = [nnx.split(layer)[0] for layer in first.bind(leaves).model.layers]
    expected = [kind_of(config, index) for index in range(config.num_layers)]
    for a, b in itertools.combinations(range(config.num_layers), 2):
        assert (kinds[a] == kinds[b]) == (expected[a] == expected[b])


def kind_of(config: ModelConfig, index: int) -> tuple[object, ...]:
    """Return what layers differ in that are not of one kind."""
    sparse = config.moe is not None and config.moe.sparse_layers[index]
    reads = config.attention_layers[index].reads is not None
    normed = config.architecture != "Llama4ForCausalLM" or config.qk_norm == "none" or config.rope_layers[index]
    return sparse, config.at(index), reads, normed


# --- mutants ---------------------------------------------------------------------------------------------------

Change = Callable[[ModelConfig], ModelConfig]


def fields(**changes: object) -> Change:
    return lambda config: config.replace(**changes)


def moe(**changes: object) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.moe, MoEConfig)
        return config.replace(moe=replace(config.moe, **changes))  # type: ignore[arg-type]

    return change


def rope(**changes: object) -> Change:
    return lambda config: config.replace(rope=replace(config.rope, **changes))  # type: ignore[arg-type]


def yarn(**changes: object) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.rope.scaling, YarnScaling)
        return rope(scaling=replace(config.rope.scaling, **changes))(config)  # type: ignore[arg-type]

    return change


def longrope(**changes: object) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.rope.scaling, LongRopeScaling)
        return rope(scaling=replace(config.rope.scaling, **changes))(config)  # type: ignore[arg-type]

    return change


def whole_heads_rotated(config: ModelConfig) -> ModelConfig:
    """LongRoPE without the partial rotation: the dimensions that it leaves alone get a divisor of one."""
    scaling = config.rope.scaling
    assert isinstance(scaling, LongRopeScaling)
    more = (1.0,) * ((config.head_dim - config.rope.rotary_dim) // 2)
    scaling = replace(scaling, short_factor=scaling.short_factor + more, long_factor=scaling.long_factor + more)
    return rope(rotary_dim=config.head_dim, scaling=scaling)(config)


def latent_rope_as_halves(config: ModelConfig) -> ModelConfig:
    assert isinstance(config.latent, LatentConfig)
    return rope(interleaved=False)(config)


GRANITE = ("granite_dense4", "granite_moe")

CONFIG_MUTANTS: list[tuple[str, str, Change]] = [
    ("llama3", "rope scaling", rope(scaling=None)),
    ("llama3", "rope theta", rope(theta=10000.0)),
    ("smollm2", "size of epsilon", fields(norm_eps=0.1)),
    ("mistral", "window", fields(layer_windows=())),
    ("mistral", "window one longer", fields(layer_windows=(13, 13, 13))),
    ("qwen2_window", "window", fields(layer_windows=())),
    ("qwen2_window", "window only in later layers", fields(layer_windows=(12, 12, 12))),
    ("mixtral", "rope theta", rope(theta=10000.0)),
    ("mixtral", "second expert", moe(experts_per_token=1)),
    ("mixtral", "weights add up to one", moe(normalize=False)),
    ("qwen3_moe", "third expert", moe(experts_per_token=2)),
    ("qwen3_moe", "weights add up to one", moe(normalize=False)),
    ("gemma2", "score cap", fields(attention_soft_cap=None)),
    ("gemma2", "logit cap", fields(logit_soft_cap=None)),
    ("gemma2", "window", fields(layer_windows=())),
    ("gemma2", "which layers have the window", fields(layer_windows=(None, 12, None))),
    ("gemma2", "embedding scale", fields(embed_scale=1.0)),
    ("gemma2", "score scale", fields(attention_scale=None)),
    ("gemma2", "norms around zero", fields(norm_offset=0.0)),
    ("gemma2", "activation", fields(activation="silu")),
    ("gemma3", "local base", fields(local_rope=None)),
    ("gemma3", "linear scaling", rope(scaling=None)),
    ("gemma3", "window", fields(layer_windows=())),
    ("gemma3", "rope theta", rope(theta=10000.0)),
    ("gemma3", "embedding scale", fields(embed_scale=1.0)),
    ("gemma3", "score scale", fields(attention_scale=None)),
    ("gemma3", "norms around zero", fields(norm_offset=0.0)),
    ("gemma3", "activation", fields(activation="silu")),
    ("gemma4_e", "which layer is read", fields(layer_reads=(None, None, None, 1, 0, 1))),
    ("gemma4_e", "window", fields(layer_windows=(13, None) * 3)),
    ("gemma4_e", "which layers have the window", fields(layer_windows=(None, 12) * 3)),
    ("gemma4_e", "pairs that rotate", rope(scaling=None)),
    ("gemma4_e", "distance of a pair", rope(scaling=None, rotary_dim=6)),
    ("gemma4_e", "rope theta", rope(theta=10000.0)),
    ("gemma4_e", "local base", fields(local_rope=RopeConfig(16, 1000.0))),
    ("gemma4_e", "scores without scale", fields(attention_scale=None)),
    ("gemma4_e", "embedding scale", fields(embed_scale=1.0)),
    ("gemma4_e", "logit cap", fields(logit_soft_cap=None)),
    ("gemma4_e", "norms around one", fields(norm_offset=1.0)),
    ("gemma4_e", "activation", fields(activation="silu")),
    ("gemma4_moe", "third expert", moe(experts_per_token=2)),
    ("gemma4_moe", "weights add up to one", moe(normalize=False)),
    ("llama4", "chunks", fields(layer_chunks=())),
    ("llama4", "size of chunks", fields(layer_chunks=(13, None) * 2)),
    ("llama4", "chunks and not a window", fields(layer_chunks=(), layer_windows=(12, None) * 2)),
    ("llama4", "layers without positions", fields(rope_layers=(True,) * 4)),
    ("llama4", "scale of queries", fields(unrotated=None)),
    ("llama4", "where the scale grows", fields(unrotated=RopeConfig(0, query_scale=QueryScale(0.8, 10)))),
    ("llama4", "queries and keys over their rms", fields(qk_norm="none")),
    ("llama4", "interleaved rotation", rope(interleaved=False)),
    ("llama4", "rope scaling", rope(scaling=None)),
    ("llama4", "rope theta", rope(theta=10000.0)),
    ("llama4", "sigmoid", moe(router="softmax")),
    ("llama4", "weights of the input", moe(weights_input=False)),
    ("llama4_top2", "second expert", moe(experts_per_token=1)),
    ("llama4_top2", "weights as they are", moe(normalize=True)),
    ("muse_glimmer", "window", fields(layer_windows=())),
    ("muse_glimmer", "layers without positions", fields(rope_layers=())),
    ("muse_glimmer", "queries and keys over their rms", fields(qk_norm="none")),
    ("muse_glimmer", "score scale", fields(attention_scale=None)),
    ("muse_glimmer", "epsilon after the blocks", fields(post_norm_eps=None)),
    ("muse_glimmer", "logit scale", fields(logit_scale=1.0)),
    ("muse_glimmer", "logit cap", fields(logit_soft_cap=None)),
    ("muse_glimmer", "rope theta", rope(theta=10000.0)),
    ("phi3", "window", fields(layer_windows=())),
    ("phi4_mini_long", "long factors", longrope(long=False)),
    ("phi4_mini_short", "short factors", longrope(long=True)),
    ("phi4_mini_long", "factor on cos and sin", longrope(attention_factor=1.0)),
    ("phi4_mini_long", "scaling", rope(scaling=None)),
    ("phi4_mini_short", "partial rotation", whole_heads_rotated),
    ("olmo3", "window", fields(layer_windows=())),
    ("olmo3", "which layers have the window", fields(layer_windows=(None, 12, None))),
    ("olmo3", "rotation without scaling in windowed layers", fields(local_rope=None)),
    ("olmo3", "yarn", rope(scaling=None)),
    ("olmo3", "rope theta", rope(theta=10000.0)),
    ("smollm3", "layers without positions", fields(rope_layers=())),
    ("smollm3", "rope theta", rope(theta=10000.0)),
    ("gpt_oss", "window", fields(layer_windows=())),
    ("gpt_oss", "rope theta", rope(theta=10000.0)),
    ("gpt_oss", "which layers have the window", fields(layer_windows=(None, 12, None))),
    ("gpt_oss", "second expert", moe(experts_per_token=1)),
    ("gpt_oss", "clamp", fields(activation_limit=100.0)),
    ("gpt_oss", "activation", fields(activation="silu")),
    ("gpt_oss", "softmax over the chosen", moe(router="softmax", normalize=False)),
    ("gpt_oss", "yarn", rope(scaling=None)),
    ("gpt_oss", "yarn not truncated", yarn(truncate=True)),
    ("gpt_oss", "factor on cos and sin", yarn(attention_factor=1.0)),
    ("deepseek_v3", "yarn", rope(scaling=None)),
    ("deepseek_v3", "third expert", moe(experts_per_token=2)),
    ("deepseek_v3", "sigmoid", moe(router="softmax")),
    ("deepseek_v3", "groups", moe(num_groups=1)),
    ("deepseek_v3", "groups kept", moe(topk_groups=1)),
    ("deepseek_v3", "scale of routed experts", moe(scale=1.0)),
    ("deepseek_v3", "weights add up to one", moe(normalize=False)),
    ("deepseek_v3", "yarn's factor on scores", fields(attention_scale=None)),
    ("deepseek_v3", "interleaved rotation", latent_rope_as_halves),
    ("seed_oss", "rope theta", rope(theta=10000.0)),
    ("granite", "embedding scale", fields(embed_scale=1.0)),
    ("granite", "score scale", fields(attention_scale=None)),
    ("granite", "residual scale", fields(residual_scale=1.0)),
    ("granite", "logit scale", fields(logit_scale=1.0)),
    ("ernie4_5", "interleaved rotation", rope(interleaved=False)),
    ("ernie4_5", "rope theta", rope(theta=10000.0)),
    *((case, "embedding scale", fields(embed_scale=1.0)) for case in GRANITE),
    *((case, "score scale", fields(attention_scale=None)) for case in GRANITE),
    *((case, "residual scale", fields(residual_scale=1.0)) for case in GRANITE),
    *((case, "logit scale", fields(logit_scale=1.0)) for case in GRANITE),
    ("granite_dense4", "positions", fields(rope_layers=(False, False, False))),
    ("granite_moe", "third expert", moe(experts_per_token=2)),
    ("granite_moe", "softmax over the chosen", moe(router="softmax", normalize=False)),
    ("qwen2_moe", "third expert", moe(experts_per_token=2)),
    ("qwen2_moe", "weights add up to one", moe(normalize=False)),
    ("qwen2_moe", "window", fields(layer_windows=())),
    ("olmoe", "third expert", moe(experts_per_token=2)),
    ("olmoe", "weights add up to one", moe(normalize=False)),
    ("ernie4_5_moe", "third expert", moe(experts_per_token=2)),
    ("ernie4_5_moe", "weights add up to one", moe(normalize=False)),
    ("ernie4_5_moe", "interleaved rotation", rope(interleaved=False)),
    ("ernie4_5_moe", "rope theta", rope(theta=10000.0)),
    *((case, "third expert", moe(experts_per_token=2)) for case in ("dots1", "exaone_moe")),
    *((case, "groups", moe(num_groups=1)) for case in ("dots1", "exaone_moe")),
    *((case, "sigmoid of scores", moe(router="softmax")) for case in ("dots1", "exaone_moe")),
    *((case, "groups kept", moe(topk_groups=1)) for case in ("dots1", "exaone_moe")),
    *((case, "scale of routed experts", moe(scale=1.0)) for case in ("dots1", "exaone_moe")),
    *((case, "weights add up to one", moe(normalize=False)) for case in ("dots1", "exaone_moe")),
    *((case, "window", fields(layer_windows=())) for case in ("dots1", "exaone_moe")),
    ("exaone_moe", "layers without positions", fields(rope_layers=())),
    ("exaone_moe", "rope theta", rope(theta=10000.0)),
    ("helium", "interleaved rotation", rope(interleaved=False)),
    ("helium", "rope theta", rope(theta=10000.0)),
    ("hunyuan", "stretched rotation", rope(theta=10000.0)),
    ("hunyuan", "norms after the rotation", fields(qk_norm="head")),
    ("nemotron", "partial rotation", rope(rotary_dim=8)),
    ("nemotron", "activation", fields(activation="silu")),
    ("nemotron", "norms around zero", fields(norm_offset=0.0)),
    ("arcee", "activation", fields(activation="silu")),
    ("apertus", "rope theta", rope(theta=10000.0)),
    ("apertus", "rope scaling", rope(scaling=None)),
    ("starcoder2", "window", fields(layer_windows=())),
    ("starcoder2", "activation", fields(activation="silu")),
    ("cohere", "interleaved rotation", rope(interleaved=False)),
    ("cohere", "rope theta", rope(theta=10000.0)),
    ("cohere", "logit scale", fields(logit_scale=1.0)),
    ("cohere", "norm minus the mean", fields(norm="rms")),
    ("cohere2", "interleaved rotation", rope(interleaved=False)),
    ("cohere2", "rope theta", rope(theta=10000.0)),
    ("cohere2", "logit scale", fields(logit_scale=1.0)),
    ("cohere2", "norm minus the mean", fields(norm="rms")),
    ("cohere2", "window", fields(layer_windows=())),
    ("cohere2", "layers without positions", fields(rope_layers=())),
    *((case, "interleaved rotation", rope(interleaved=False)) for case in ("glm", "glm4")),
    *((case, "partial rotation", rope(rotary_dim=16)) for case in ("glm", "glm4")),
    ("exaone4", "rope theta", rope(theta=10000.0)),
    ("exaone4", "rope scaling", rope(scaling=None)),
    ("exaone4", "window", fields(layer_windows=())),
    ("exaone4", "layers without positions", fields(rope_layers=())),
    ("glm4_moe", "rope theta", rope(theta=10000.0)),
    ("glm4_moe", "partial rotation", rope(rotary_dim=16)),
    ("glm4_moe", "third expert", moe(experts_per_token=2)),
    ("glm4_moe", "sigmoid", moe(router="softmax")),
    ("glm4_moe", "scale of routed experts", moe(scale=1.0)),
    ("glm4_moe_lite", "rope theta", rope(theta=10000.0)),
    ("glm4_moe_lite", "interleaved rotation", rope(interleaved=False)),
    ("glm4_moe_lite", "third expert", moe(experts_per_token=2)),
    ("glm4_moe_lite", "sigmoid", moe(router="softmax")),
    ("glm4_moe_lite", "scale of routed experts", moe(scale=1.0)),
    ("glm4_moe_lite", "score scale", fields(attention_scale=None)),
    ("minimax_m2", "rope theta", rope(theta=10000.0)),
    ("minimax_m2", "partial rotation", rope(rotary_dim=16)),
    ("minimax_m2", "third expert", moe(experts_per_token=2)),
    ("minimax_m2", "sigmoid", moe(router="softmax")),
    ("ministral3", "rope theta", rope(theta=10000.0)),
    ("ministral3", "yarn", rope(scaling=None)),
    ("ministral3", "queries scaled by position", rope(query_scale=None)),
    ("mistral4", "rope theta", rope(theta=10000.0)),
    ("mistral4", "yarn", rope(scaling=None)),
    ("mistral4", "queries scaled by position", rope(query_scale=None)),
    ("mistral4", "interleaved rotation", rope(interleaved=False)),
    ("mistral4", "yarn's factor on scores", fields(attention_scale=None)),
    ("mistral4", "third expert", moe(experts_per_token=2)),
    ("mistral4", "groups", moe(num_groups=1)),
    ("mistral4", "groups kept", moe(topk_groups=1)),
    ("mistral4", "scale of routed experts", moe(scale=1.0)),
    ("hy_v3", "rope theta", rope(theta=10000.0)),
    ("hy_v3", "third expert", moe(experts_per_token=2)),
    ("hy_v3", "sigmoid", moe(router="softmax")),
    ("hy_v3", "scale of routed experts", moe(scale=1.0)),
    ("step3p7", "window", fields(layer_windows=())),
    ("step3p7", "local base", fields(local_rope=None)),
    ("step3p7", "rope theta", rope(theta=10000.0)),
    ("step3p7", "partial rotation", rope(rotary_dim=16)),
    ("step3p7", "clamps", fields(layer_limits=())),
    ("step3p7", "clamp of the experts", fields(layer_limits=((0.0, 0.2), (0.0, 0.0), (0.0, 0.15)))),
    ("step3p7", "clamps of the shared expert and the MLP", fields(layer_limits=((0.0, 0.0), (0.0, 0.0), (0.1, 0.0)))),
    ("step3p7", "norms around zero", fields(norm_offset=0.0)),
    ("step3p7", "third expert", moe(experts_per_token=2)),
    ("step3p7", "sigmoid", moe(router="softmax")),
    ("step3p7", "scale of routed experts", moe(scale=1.0)),
    ("laguna", "rope theta", rope(theta=10000.0)),
    ("laguna", "partial rotation", rope(rotary_dim=16)),
    ("laguna", "local base", fields(local_rope=None)),
    ("laguna", "window", fields(layer_windows=())),
    ("laguna", "third expert", moe(experts_per_token=2)),
    ("laguna", "sigmoid", moe(router="softmax")),
    ("laguna", "cap of scores", moe(soft_cap=None)),
    ("laguna", "scale of routed experts", moe(scale=1.0)),
    ("mimo_v2", "rope theta", rope(theta=10000.0)),
    ("mimo_v2", "partial rotation", rope(rotary_dim=24)),
    ("mimo_v2", "local base", fields(local_rope=None)),
    ("mimo_v2", "window", fields(layer_windows=(None, 1000, None))),
    ("mimo_v2", "window one longer", fields(layer_windows=(None, 13, None))),
    ("mimo_v2", "scale of values", fields(value_scale=1.0)),
    ("mimo_v2", "third expert", moe(experts_per_token=2)),
    ("mimo_v2", "sigmoid", moe(router="softmax")),
    ("mimo_v2", "scale of routed experts", moe(scale=1.0)),
]


@pytest.mark.slow  # they hold the goldens above, not the models
@pytest.mark.parametrize(("case", "feature", "change"), CONFIG_MUTANTS, ids=lambda v: v if isinstance(v, str) else "")
def test_without_the_feature_logits_differ(
    case: str, feature: str, change: Change, goldens: Callable[[str], Golden]
) -> None:
    golden = goldens(case)
    config = served(golden)
    mutant = change(config)
    assert mutant != config
    assert error(run(load_model(golden.directory, dtype=FLOAT32, config=mutant), golden), golden) > 30 * TOLERANCE


# tensors whose neutral value takes a feature away: name pattern and value
TENSOR_MUTANTS: list[tuple[str, str, float]] = [
    ("llama3", r"q_proj\.bias", 0.0),
    ("llama3", r"k_proj\.bias", 0.0),
    ("llama3", r"v_proj\.bias", 0.0),
    ("llama3", r"o_proj\.bias", 0.0),
    ("qwen2", r"q_proj\.bias", 0.0),
    ("qwen2", r"k_proj\.bias", 0.0),
    ("qwen2", r"v_proj\.bias", 0.0),
    ("qwen3", r"q_norm", 1.0),
    ("qwen3", r"k_norm", 1.0),
    ("olmo2", r"q_norm", 1.0),
    ("olmo2", r"k_norm", 1.0),
    ("olmo2", r"post_feedforward_layernorm", 1.0),
    ("olmo2", r"post_attention_layernorm", 1.0),
    ("olmo3", r"q_norm", 1.0),
    ("gemma2", r"post_attention_layernorm", 0.0),
    ("gemma2", r"pre_feedforward_layernorm", 0.0),
    ("gemma2", r"post_feedforward_layernorm", 0.0),
    ("gemma3", r"q_norm", 0.0),
    ("gemma3", r"k_norm", 0.0),
    ("gemma4_e", r"q_norm", 0.25),
    ("gemma4_e", r"k_norm", 1.0),
    ("gemma4_e", r"layer_scalar", 1.0),
    ("gemma4_e", r"embed_tokens_per_layer", 0.0),
    ("gemma4_e", r"per_layer_model_projection", 0.0),
    ("gemma4_e", r"per_layer_projection_norm", 1.0),
    ("gemma4_e", r"post_per_layer_input_norm", 0.0),
    ("gemma4_moe", r"router\.proj", 0.0),
    ("gemma4_moe", r"router\.scale", 1.0),
    ("gemma4_moe", r"per_expert_scale", 1.0),
    ("gemma4_moe", r"post_feedforward_layernorm_1", 0.0),
    ("gemma4_moe", r"post_feedforward_layernorm_2", 0.0),
    ("gemma4_moe", r"pre_feedforward_layernorm_2", 1.0),
    ("gemma4_moe", r"q_norm", 0.25),
    ("llama4", r"feed_forward\.router", 0.0),
    ("llama4", r"shared_expert\.down_proj", 0.0),
    ("muse_glimmer", r"self_attn\.gate_proj", 0.0),
    ("muse_glimmer", r"post_attention_layernorm", 0.0),
    ("mixtral", r"block_sparse_moe\.gate", 0.0),
    ("qwen3_moe", r"mlp\.gate\.", 0.0),
    ("qwen3_moe", r"q_norm", 1.0),
    ("gpt_oss", r"[qkv]_proj\.bias", 0.0),
    ("gpt_oss", r"o_proj\.bias", 0.0),
    ("gpt_oss", r"sinks", -1e9),
    ("gpt_oss", r"router\.bias", 0.0),
    ("gpt_oss", r"gate_up_proj_bias", 0.0),
    ("gpt_oss", r"down_proj_bias", 0.0),
    ("deepseek_v3", r"e_score_correction_bias", 0.0),
    ("deepseek_v3", r"shared_experts\.down_proj", 0.0),
    ("deepseek_v3", r"kv_a_layernorm", 1.0),
    ("deepseek_v3", r"q_a_layernorm", 1.0),
    ("seed_oss", r"[qkv]_proj\.bias", 0.0),
    ("seed_oss", r"o_proj\.bias", 0.0),
    ("ernie4_5", r"[qkv]_proj\.bias", 0.0),
    ("ernie4_5", r"o_proj\.bias", 0.0),
    ("ernie4_5", r"(gate|up|down)_proj\.bias", 0.0),
    ("internlm3", r"[qkv]_proj\.bias", 0.0),
    ("internlm3", r"o_proj\.bias", 0.0),
    ("internlm3", r"(gate|up|down)_proj\.bias", 0.0),
    ("granite_moe", r"router\.layer", 0.0),
    ("qwen2_moe", r"[qkv]_proj\.bias", 0.0),
    ("qwen2_moe", r"shared_expert\.down_proj", 0.0),
    ("qwen2_moe", r"shared_expert_gate", 0.0),
    ("olmoe", r"q_norm", 1.0),
    ("olmoe", r"k_norm", 1.0),
    ("ernie4_5_moe", r"e_score_correction_bias", 0.0),
    ("ernie4_5_moe", r"shared_experts\.down_proj", 0.0),
    *((case, r"e_score_correction_bias", 0.0) for case in ("dots1", "exaone_moe")),
    *((case, r"shared_experts\.down_proj", 0.0) for case in ("dots1", "exaone_moe")),
    *((case, r"q_norm", 1.0) for case in ("dots1", "exaone_moe")),
    *((case, r"k_norm", 1.0) for case in ("dots1", "exaone_moe")),
    ("hunyuan", r"[qkv]_proj\.bias", 0.0),
    ("hunyuan", r"o_proj\.bias", 0.0),
    ("hunyuan", r"query_layernorm", 1.0),
    ("hunyuan", r"key_layernorm", 1.0),
    ("nemotron", r"norm\.bias", 0.0),
    ("arcee", r"(up|down)_proj\.bias", 0.0),
    ("apertus", r"alpha_p", 0.0),
    ("apertus", r"alpha_n", 0.0),
    ("apertus", r"beta", 0.5),
    ("apertus", r"eps", 0.0),
    ("apertus", r"q_norm", 1.0),
    ("apertus", r"k_norm", 1.0),
    ("starcoder2", r"norm\.bias", 0.0),
    ("starcoder2", r"[qkv]_proj\.bias", 0.0),
    ("starcoder2", r"o_proj\.bias", 0.0),
    ("starcoder2", r"c_(fc|proj)\.bias", 0.0),
    ("glm", r"[qkv]_proj\.bias", 0.0),
    ("glm4", r"[qkv]_proj\.bias", 0.0),
    ("glm4", r"post_self_attn_layernorm", 1.0),
    ("glm4", r"post_attention_layernorm", 1.0),
    ("glm4", r"post_mlp_layernorm", 1.0),
    ("exaone4", r"q_norm", 1.0),
    ("exaone4", r"k_norm", 1.0),
    ("glm4_moe", r"[qkv]_proj\.bias", 0.0),
    ("glm4_moe", r"q_norm", 1.0),
    ("glm4_moe", r"k_norm", 1.0),
    ("glm4_moe", r"e_score_correction_bias", 0.0),
    ("glm4_moe", r"shared_experts\.down_proj", 0.0),
    ("glm4_moe_lite", r"e_score_correction_bias", 0.0),
    ("glm4_moe_lite", r"shared_experts\.down_proj", 0.0),
    ("minimax_m2", r"q_norm", 1.0),
    ("minimax_m2", r"k_norm", 1.0),
    ("minimax_m2", r"e_score_correction_bias", 0.0),
    ("mistral4", r"shared_experts\.down_proj", 0.0),
    ("hy_v3", r"q_norm", 1.0),
    ("hy_v3", r"k_norm", 1.0),
    ("hy_v3", r"expert_bias", 0.0),
    ("hy_v3", r"shared_mlp\.down_proj", 0.0),
    ("step3p7", r"[qk]_norm", 0.0),
    ("step3p7", r"g_proj", 0.0),
    ("step3p7", r"router_bias", 0.0),
    ("step3p7", r"share_expert\.down_proj", 0.0),
    ("laguna", r"q_norm", 1.0),
    ("laguna", r"k_norm", 1.0),
    ("laguna", r"g_proj", 0.0),
    ("laguna", r"e_score_correction_bias", 0.0),
    ("laguna", r"shared_expert\.down_proj", 0.0),
    ("mimo_v2", r"attention_sink_bias", -1e9),
    ("mimo_v2", r"e_score_correction_bias", 0.0),
]


@pytest.mark.parametrize(("case", "pattern", "neutral"), TENSOR_MUTANTS)
def test_without_the_tensor_logits_differ(
    case: str, pattern: str, neutral: float, goldens: Callable[[str], Golden], tmp_path: Path
) -> None:
    golden = goldens(case)
    chosen = [name for name in golden.tensors if re.search(pattern, name)]
    assert chosen
    tensors = golden.tensors | {name: np.full_like(golden.tensors[name], neutral) for name in chosen}
    model = load_model(write_checkpoint(tmp_path, CASES[case], tensors), dtype=FLOAT32)
    assert error(run(model, golden), golden) > 30 * TOLERANCE


# --- no feature without a mutant -------------------------------------------------------------------------------

# what shapes and names say already: a model without it does not load, or is another model
STRUCTURE = {
    *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "max_position_embeddings", "kv_repeat", "eos_token_ids", "bos_token_id", "tie_word_embeddings"),
    *("gated_mlp", "norm_bias", "gemma4", "tensor_names"),
    "predictor",  # tests/models/test_draft_head.py
    *("packed_qkv", "packed_gate_up", "packed_experts", "ignored_tensors", "dtype", "generation", "latent", "norm_eps"),
    *("moe.num_experts", "moe.ffn", "moe.sparse_layers", "moe.names", "moe.normalize_eps", "layer_heads", "value_dim"),
}
OF_TENSORS = {
    r"[qkv]_proj\.bias": "qkv_bias",
    r"o_proj\.bias": "out_bias",
    r"(gate|up|down)_proj\.bias": "mlp_bias",
    r"(up|down)_proj\.bias": "mlp_bias",
    r"c_(fc|proj)\.bias": "mlp_bias",
    r"norm\.bias": "norm",
    r"alpha_p": "activation",
    r"[qk]_norm": "qk_norm",
    r"sinks|sink_bias": "attention_sinks",
    r"router\.bias": "moe.router_bias",
    r"e_score_correction_bias|expert_bias|router_bias": "moe.correction",
    r"(gate_up|down)_proj_bias": "moe.expert_bias",
    r"shared?_(experts?|mlp)": "moe.shared_ffn",
    r"shared_expert_gate": "moe.shared_gate",
    r"g_proj": "output_gate",
}


def flat(config: ModelConfig) -> dict[str, object]:
    """Every field by name, those of rope and experts as rope.theta, moe.scale."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        inner = isinstance(value, RopeConfig | MoEConfig) and field.name != "local_rope"
        found |= {f"{field.name}.{k}": v for k, v in vars(value).items()} if inner else {field.name: value}
    return found


def plain_values(config: ModelConfig) -> dict[str, object]:
    """What `flat` gives for a model without features."""
    defaults: dict[str, object] = {
        f.name: f.default for f in dataclasses.fields(ModelConfig) if f.default is not dataclasses.MISSING
    }
    inner: dict[str, object] = {f"rope.{f.name}": f.default for f in dataclasses.fields(RopeConfig)}
    inner |= {f"moe.{f.name}": f.default for f in dataclasses.fields(MoEConfig)}
    return defaults | inner | {"rope.rotary_dim": config.latent.rope_dim if config.latent else config.head_dim}


def features(config: ModelConfig) -> set[str]:
    plain, own = plain_values(config), flat(config)
    return {name for name, value in own.items() if value != plain.get(name)} - STRUCTURE


def mutated(case: str) -> set[str]:
    """The features that a mutant of the case takes away."""
    config = from_hf(CASES[case]).for_context(128)
    before, found = flat(config), set()
    for _, _, change in (mutant for mutant in CONFIG_MUTANTS if mutant[0] == case):
        after = flat(change(config))
        found |= {name for name in before if before[name] != after.get(name)}
    patterns = [pattern for name, pattern, _ in TENSOR_MUTANTS if name == case]
    return found | {feature for known, feature in OF_TENSORS.items() for p in patterns if covers(known, p)}


def covers(known: str, pattern: str) -> bool:
    """Whether a mutant's pattern is of the known kind: q_proj of [qkv]_proj."""
    return known == pattern or re.search(known, pattern.replace("\\.", ".")) is not None


ARCHITECTURES = {case: from_hf(hf).architecture for case, hf in CASES.items()}


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES.values())))
def test_every_feature_of_a_family_has_a_mutant(architecture: str) -> None:
    cases = [case for case, own in ARCHITECTURES.items() if own == architecture]
    needed = set().union(*(features(from_hf(CASES[case]).for_context(128)) for case in cases))
    missing = needed - set().union(*map(mutated, cases))
    assert not missing, f"{architecture}: no mutant without {sorted(missing)}"
