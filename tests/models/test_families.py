"""Every family against transformers' own implementation, and every feature of it against a model without that feature.

Logits are held to 1e-4 of the largest; a mutant must be off by 30 times as much.
"""

import dataclasses
import functools
import itertools
import json
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
from jaxserve.models.rope import LongRopeScaling, RopeConfig, YarnScaling
from tests.models import paged
from tests.models.checkpoints import write_checkpoint
from tests.models.dense import dense_logits
from tests.models.families import CASES, NUM_PROMPT, tensors_of

GOLDENS = Path(__file__).parent / "goldens"
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
        shapes = json.loads((GOLDENS / f"{case}.json").read_text())["shapes"]
        tensors = tensors_of(case, {name: tuple(shape) for name, shape in shapes.items()})
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
PAGED = ("llama3", "mistral", "gemma2", "gemma3", "smollm3", "gpt_oss", "deepseek_v3")
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


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_moves_no_more_than_transformers(case: str, goldens: Callable[[str], Golden]) -> None:
    golden = goldens(case)
    logits = run(load_model(golden.directory, dtype=jnp.dtype("bfloat16"), config=served(golden)), golden)
    assert np.abs(logits[: len(golden.ids)] - golden.logits).max() <= 1.5 * golden.bfloat16_error + 0.02


@pytest.mark.parametrize("case", CASES)
def test_layers_of_a_kind_are_equal(case: str) -> None:
    config = from_hf(CASES[case])
    first, second = build(config, FLOAT32), build(config, FLOAT32)
    assert first == second
    leaves = tuple(jnp.zeros(spec.shape, spec.dtype) for spec in first.specs)
    kinds = [nnx.split(layer)[0] for layer in first.bind(leaves).model.layers]
    sparse = config.moe.sparse_layers if config.moe else (False,) * config.num_layers
    for a, b in itertools.combinations(range(config.num_layers), 2):
        assert (kinds[a] == kinds[b]) == (sparse[a] == sparse[b])


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
    ("deepseek_v3", "groups", moe(num_groups=1)),
    ("deepseek_v3", "groups kept", moe(topk_groups=1)),
    ("deepseek_v3", "scale of routed experts", moe(scale=1.0)),
    ("deepseek_v3", "weights add up to one", moe(normalize=False)),
    ("deepseek_v3", "yarn's factor on scores", fields(attention_scale=None)),
    ("deepseek_v3", "interleaved rotation", latent_rope_as_halves),
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
    *("packed_projections", "packed_experts", "ignored_tensors", "dtype", "generation", "latent", "norm_eps"),
    *("moe.num_experts", "moe.ffn", "moe.sparse_layers"),
}
OF_TENSORS = {
    r"[qkv]_proj\.bias": "qkv_bias",
    r"o_proj\.bias": "out_bias",
    r"[qk]_norm": "qk_norm",
    r"sinks": "attention_sinks",
    r"router\.bias": "moe.router_bias",
    r"e_score_correction_bias": "moe.router",
    r"shared_experts": "moe.shared_ffn",
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


@pytest.mark.parametrize("architecture", sorted({hf["architectures"][0] for hf in CASES.values()}))
def test_every_feature_of_a_family_has_a_mutant(architecture: str) -> None:
    cases = [case for case, hf in CASES.items() if hf["architectures"][0] == architecture]
    needed = set().union(*(features(from_hf(CASES[case]).for_context(128)) for case in cases))
    missing = needed - set().union(*map(mutated, cases))
    assert not missing, f"{architecture}: no mutant without {sorted(missing)}"
