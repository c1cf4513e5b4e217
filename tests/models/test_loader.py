"""Loading: every kind of misfit in one error, shards, slices, dtypes, random weights, damaged files."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import ModelLoadError
from jaxserve.library.dense import dense_logits
from jaxserve.models.checkpoint.checkpoint import open_checkpoint
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import CHUNK, LoadedModel, PartReader, build, load_model, random_model
from jaxserve.models.checkpoint.orbax import convert
from tests.models import test_stored_form as integers
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint, write_sharded
from tests.models.families import STATE_CASES
from tests.models.test_quantization import BLOCK_FP8, quantize_blocks

FLOAT32 = jnp.dtype("float32")


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return random_tensors(TINY_LLAMA)


def leaf(model: LoadedModel, name: str) -> np.ndarray:
    index = [spec.name for spec in model.structure.specs].index(name)
    return np.asarray(model.leaves[index])


def test_fused_parameters_hold_their_parts(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    model = load_model(write_checkpoint(tmp_path, TINY_LLAMA, tensors), dtype=FLOAT32)
    qkv = leaf(model, "model.layers.1.self_attn.qkv_proj.weight")
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert qkv.shape == (2, 16, 16)  # 2 kv heads, (2 query heads + k + v) * head_dim 4, hidden
    for head in range(2):
        assert np.array_equal(qkv[head, :8], q[head * 8 : head * 8 + 8])
        assert np.array_equal(qkv[head, 8:12], k[head * 4 : head * 4 + 4])
        assert np.array_equal(qkv[head, 12:], v[head * 4 : head * 4 + 4])
    gate_up = leaf(model, "model.layers.0.mlp.gate_up_proj.weight")
    assert np.array_equal(gate_up[:, 0], tensors["model.layers.0.mlp.gate_proj.weight"])
    assert np.array_equal(gate_up[:, 1], tensors["model.layers.0.mlp.up_proj.weight"])


def test_shards_give_the_same_and_progress_ends_at_the_total(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    seen: list[tuple[int, int]] = []
    one = load_model(write_checkpoint(tmp_path / "one", TINY_LLAMA, tensors), dtype=FLOAT32)
    many = load_model(
        write_sharded(tmp_path / "many", TINY_LLAMA, tensors, 3),
        dtype=FLOAT32,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert all(np.array_equal(a, b) for a, b in zip(one.leaves, many.leaves, strict=True))
    size = sum(t.nbytes for t in tensors.values())
    assert seen[-1] == (size, size) and seen == sorted(seen) and many.checkpoint_bytes == size


def test_a_region_reads_what_the_whole_holds(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    directory = write_checkpoint(tmp_path, TINY_LLAMA, tensors)
    model, reader = load_model(directory, dtype=FLOAT32), PartReader(open_checkpoint(directory), None)
    rng = np.random.default_rng(0)
    for spec, whole in zip(model.structure.specs, model.leaves, strict=True):
        bounds = [sorted(rng.integers(0, n + 1, 2)) for n in spec.shape]
        index = tuple(slice(int(a), int(b)) for a, b in bounds)
        assert np.array_equal(reader.read(spec, index), np.asarray(whole)[index]), spec.name


def test_experts_in_one_tensor_are_read_one_by_one(tmp_path: Path) -> None:
    """Their axes are in another order in memory, and the tensor of all of them would take as much again."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 64, "num_experts": 32, "num_hidden_layers": 1}
    hf = STATE_CASES["qwen3_5_moe"] | sizes | {"layer_types": ["full_attention"]}
    [spec] = [s for s in build(from_hf(hf), FLOAT32).specs if s.name.endswith("experts.gate_up_proj.weight")]
    tensor = np.random.default_rng(0).random(spec.parts[0].shape, np.float32)
    reader = PartReader(open_checkpoint(write_checkpoint(tmp_path, hf, {spec.parts[0].name: tensor})), None)
    tracemalloc.start()
    found = reader.read(spec, (slice(None),) * len(spec.shape))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(found, tensor.reshape(32, 2, 64, 512).swapaxes(1, 2))
    assert peak - CHUNK <= 1.3 * found.nbytes  # a thread's buffer beside it


def test_every_misfit_is_in_one_error(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.extra.weight"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"] = np.zeros((4, 16), np.float32)
    write_checkpoint(tmp_path, TINY_LLAMA, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"model.embed_tokens.weight": np.zeros((32, 16), np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load_model(tmp_path, dtype=FLOAT32)
    message = str(caught.value)
    assert "missing: model.layers.0.self_attn.k_proj.weight, model.norm.weight" in message
    assert "unknown: model.layers.0.mlp.extra.weight" in message
    assert "in more than one place: model.embed_tokens.weight" in message
    assert "lm_head.weight is [4, 16], expected [32, 16]" in message
    assert "5 tensors" in message and "\n" not in message


def test_names_that_differ_in_the_layer_are_folded(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    kept = {name: t for name, t in tensors.items() if "up_proj" not in name}
    with pytest.raises(ModelLoadError, match=r"missing: model\.layers\.\{0-1\}\.mlp\.up_proj\.weight"):
        load_model(write_checkpoint(tmp_path, TINY_LLAMA, kept), dtype=FLOAT32)


def test_buffers_and_a_tied_head_are_left_aside(tmp_path: Path) -> None:
    hf = TINY_LLAMA | {"tie_word_embeddings": True}
    tensors = random_tensors(hf)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    model = load_model(write_checkpoint(tmp_path, hf, tensors), dtype=FLOAT32)
    assert model.config.tie_word_embeddings
    assert dense_logits(model.structure, model.leaves, jnp.arange(3)).shape == (3, 32)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.bool_])
def test_integers_without_a_quantization_are_refused(
    dtype: Any, tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    codes = tensors | {name: (tensors[name] * 100).astype(dtype)}
    with pytest.raises(ModelLoadError, match=rf"{name} is {np.dtype(dtype)}, expected floating point"):
        load_model(write_checkpoint(tmp_path, TINY_LLAMA, codes), dtype=FLOAT32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_head_that_differs_from_the_embeddings_is_used_though_they_are_tied(dtype: str, tmp_path: Path) -> None:
    hf = TINY_LLAMA | {"tie_word_embeddings": True}
    tensors = random_tensors(TINY_LLAMA)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(jnp.dtype(dtype))
    untied = load_model(write_checkpoint(tmp_path / "untied", TINY_LLAMA, tensors), dtype=FLOAT32)
    tied = load_model(write_checkpoint(tmp_path / "tied", hf, tensors), dtype=FLOAT32)
    convert(tied, tmp_path / "converted")
    again = load_model(tmp_path / "converted", dtype=FLOAT32)
    for model in (tied, again):
        assert np.array_equal(leaf(model, "lm_head.weight"), leaf(untied, "lm_head.weight"))
        assert not model.config.tie_word_embeddings


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("target", ["bfloat16", "float32"])
def test_dtypes_are_converted(source: str, target: str, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    stored = {name: t.astype(jnp.dtype(source)) for name, t in tensors.items()}
    model = load_model(write_checkpoint(tmp_path, TINY_LLAMA, stored), dtype=jnp.dtype(target))
    down = leaf(model, "model.layers.0.mlp.down_proj.weight")
    assert down.dtype == jnp.dtype(target)
    assert np.array_equal(down, stored["model.layers.0.mlp.down_proj.weight"].astype(jnp.dtype(target)))


def test_random_weights_need_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    models = [random_model(tmp_path, dtype=FLOAT32, seed=seed) for seed in (1, 1, 2)]
    down = [leaf(model, "model.layers.0.mlp.down_proj.weight") for model in models]
    assert np.array_equal(down[0], down[1]) and not np.array_equal(down[0], down[2])
    assert not np.array_equal(down[0], leaf(models[0], "model.layers.1.mlp.down_proj.weight"))
    assert np.array_equal(leaf(models[0], "model.norm.weight"), np.ones(16))


def test_equal_layers_are_traced_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | {"num_hidden_layers": 6}))
    model = random_model(tmp_path, dtype=FLOAT32)
    text = jax.jit(lambda leaves, ids: dense_logits(model.structure, leaves, ids)).lower(
        model.leaves, jnp.arange(4)).as_text()  # fmt: skip
    assert text.count("func.func private @call(") == 1 and text.count("call @call(") == 6


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ResNetForImages"]}))
    with pytest.raises(ModelLoadError, match="ResNetForImages") as caught:
        load_model(tmp_path, dtype=FLOAT32)
    assert caught.value.fix is not None and "LlamaForCausalLM" in caught.value.fix


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "OwnForCausalLM"])
def test_code_in_the_directory_is_never_run(architecture: str, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A supported family is served by this project's own module; any other is refused."""
    code = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM", "AutoConfig": "configuration_own.OwnConfig"}
    write_checkpoint(tmp_path, TINY_LLAMA | {"architectures": [architecture], "auto_map": code}, tensors)
    for name in ("modeling_own.py", "configuration_own.py", "__init__.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    if architecture == "LlamaForCausalLM":
        load_model(tmp_path, dtype=FLOAT32)
    else:
        with pytest.raises(ModelLoadError, match=r"'OwnForCausalLM' is not supported; the code .* is never run"):
            load_model(tmp_path, dtype=FLOAT32)
    assert not (tmp_path / "ran").exists()


# --- damaged files ---------------------------------------------------------------------------------------------


def rewrite_header(path: Path, change: Any) -> None:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    text = json.dumps(change(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def shifted(header: dict[str, Any]) -> dict[str, Any]:
    begin, end = header["model.norm.weight"]["data_offsets"]
    header["model.norm.weight"]["data_offsets"] = [begin + 4, end + 4]
    return header


def beyond(header: dict[str, Any]) -> dict[str, Any]:
    last = max(header.values(), key=lambda entry: entry["data_offsets"][1])
    last["shape"][0] *= 2
    last["data_offsets"][1] += last["data_offsets"][1] - last["data_offsets"][0]
    return header


def odd_dtype(header: dict[str, Any]) -> dict[str, Any]:
    header["model.norm.weight"]["dtype"] = "F7"
    return header


def malformed(header: dict[str, Any]) -> dict[str, Any]:
    header["model.norm.weight"]["shape"] = [-16]
    return header


@pytest.mark.parametrize(
    ("change", "cause"),
    [(shifted, "wrong offsets"), (beyond, "truncated"), (odd_dtype, "dtype 'F7'"), (malformed, "malformed"),
     (list, "no JSON object")],
)  # fmt: skip
def test_a_wrong_header_is_refused(change: Any, cause: str, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_checkpoint(tmp_path, TINY_LLAMA, tensors)
    rewrite_header(tmp_path / "model.safetensors", change)
    with pytest.raises(ModelLoadError, match=cause) as caught:
        load_model(tmp_path, dtype=FLOAT32)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_shard_is_refused(keep: int, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_sharded(tmp_path, TINY_LLAMA, tensors)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors.* is truncated"):
        load_model(tmp_path, dtype=FLOAT32)


def test_a_missing_shard_is_named(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_sharded(tmp_path, TINY_LLAMA, tensors)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00002\.safetensors is missing"):
        load_model(tmp_path, dtype=FLOAT32)


def published_as(form: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The keys of a config.json, and the tensors of its checkpoint."""
    if form == "gptq":
        stored, _ = integers.write(random_tensors(integers.MODELS["llama"]), integers.FORMS["gptq"])
        return integers.hf_of("llama", integers.FORMS["gptq"]), stored
    wide = random_tensors(TINY_LLAMA)
    if form == "fp8":
        return TINY_LLAMA | BLOCK_FP8, quantize_blocks(wide)[0]
    return TINY_LLAMA, {name: tensor.astype(jnp.dtype(form)) for name, tensor in wide.items()}


Change = Callable[[Path, dict[str, np.ndarray]], None]


def index_edited(change: Callable[[dict[str, str]], Any]) -> Change:
    def apply(directory: Path, tensors: dict[str, np.ndarray]) -> None:
        index = directory / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        change(content["weight_map"])
        index.write_text(json.dumps(content))

    return apply


def also(file: str, *, only: str = "", others: dict[str, np.ndarray] | None = None) -> Change:
    """One more file with copies of the tensors, or of those with `only` in their names, and others."""

    def apply(directory: Path, tensors: dict[str, np.ndarray]) -> None:
        copies = {name: tensor for name, tensor in tensors.items() if only in name}
        save_file(copies | (others or {}), directory / file)

    return apply


def in_turn(*changes: Change) -> Change:
    def apply(directory: Path, tensors: dict[str, np.ndarray]) -> None:
        for change in changes:
            change(directory, tensors)

    return apply


def without_index(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    (directory / "model.safetensors.index.json").unlink()


def text(name: str, content: bytes) -> Change:
    def apply(directory: Path, tensors: dict[str, np.ndarray]) -> None:
        (directory / name).write_bytes(content)

    return apply


SHARD, BUFFER = "model-00002-of-00002.safetensors", "model.layers.0.self_attn.rotary_emb.inv_freq"
LORA = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((2, 16), np.float32)}
BUFFERS = {BUFFER: np.zeros(2, np.float32)}
NORM = "model.norm.weight"
# what is changed in a directory of two shards and an index, and the words about it; as transformers they load
ASIDE: dict[str, tuple[Change, str]] = {
    "the index names a tied head": (index_edited(lambda m: m.update({"lm_head.bias": SHARD})), "lm_head.bias"),
    "the index names a buffer": (index_edited(lambda m: m.update({BUFFER: SHARD})), BUFFER),
    "the index lacks a tensor": (index_edited(lambda m: m.pop(NORM)), ""),
    "the index lacks a buffer": (in_turn(also("x.safetensors", only="norm", others=BUFFERS), index_edited(lambda m: m.update({NORM: "x.safetensors"}))), ""),  # noqa: E501
    "the index has the wrong shard": (index_edited(lambda m: m.update({NORM: SHARD, next(iter(m)): SHARD})), ""),
    "a stale index beside a whole model": (in_turn(also("model.safetensors"), index_edited(lambda m: m.update({NORM: "gone.safetensors"}))), "index.json is not read"),  # noqa: E501
    "a damaged index beside a whole model": (in_turn(also("model.safetensors"), text("model.safetensors.index.json", b"{")), "index.json is not read"),  # noqa: E501
    "old shards beside a whole model": (in_turn(also("model.safetensors"), without_index, text(SHARD, b"cut")), SHARD),
    "equal copies in two shards": (index_edited(lambda m: m.update({"a": "b.safetensors"})), "a"),
    "no index": (without_index, ""),
    "an adapter beside shards": (in_turn(without_index, also("adapter_model.safetensors", only="none", others=LORA)), "adapter_model.safetensors is not read"),  # noqa: E501
    "mlx's adapter": (in_turn(without_index, also("adapters.safetensors", only="none", others=LORA)), "adapters"),
    "macOS's files": (in_turn(without_index, text(f"._{SHARD}", b"\0\5\x16\7")), f"._{SHARD} is not read"),
    "the authors' own format": (in_turn(without_index, text("consolidated.safetensors", b"")), "consolidated"),
    "an optimizer's state": (in_turn(without_index, text("optimizer.safetensors", b"")), "optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["float32", "bfloat16", "fp8", "gptq"])
@pytest.mark.parametrize("name", ASIDE)
def test_what_is_not_the_models_is_left_aside_and_named(name: str, form: str, tmp_path: Path) -> None:
    hf, stored = published_as(form)
    change, words = ASIDE[name]
    expected = load_model(write_checkpoint(tmp_path / "plain", hf, stored), dtype=FLOAT32)
    directory = write_sharded(tmp_path / "shards", hf, stored)
    if name == "equal copies in two shards":
        also("b.safetensors", only="norm")(directory, stored)
    change(directory, stored)
    found = load_model(directory, dtype=FLOAT32)
    assert all(np.array_equal(a, b) for a, b in zip(found.leaves, expected.leaves, strict=True))
    aside = open_checkpoint(directory).aside
    assert words in "; ".join(aside) and bool(aside) == bool(words)


def test_copies_that_differ_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    directory = write_sharded(tmp_path, TINY_LLAMA, tensors)
    without_index(directory, tensors)
    also("z.safetensors", only="norm")(directory, tensors)
    load_model(directory, dtype=FLOAT32)
    also("z.safetensors", only="norm")(directory, {name: tensor + 1 for name, tensor in tensors.items()})
    with pytest.raises(ModelLoadError, match=r"5 tensors .* in more than one place"):
        load_model(directory, dtype=FLOAT32)
    also("z.safetensors", only="norm")(directory, {name: tensor[:-1] for name, tensor in tensors.items()})
    with pytest.raises(ModelLoadError, match="in more than one place"):
        load_model(directory, dtype=FLOAT32)


def test_what_a_whole_model_lacks_is_missing_though_shards_have_it(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    directory = write_sharded(tmp_path, TINY_LLAMA, tensors)
    also("model.safetensors", only="mlp")(directory, tensors)
    with pytest.raises(ModelLoadError, match=r"missing: .*model\.norm\.weight") as caught:
        load_model(directory, dtype=FLOAT32)
    assert "index.json is not read, because model.safetensors is a whole model" in str(caught.value.fix)


def test_an_adapter_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    also("adapter_model.safetensors", others=LORA)(tmp_path, {})
    with pytest.raises(ModelLoadError, match=r"only an adapter, adapter_model\.safetensors"):
        load_model(tmp_path, dtype=FLOAT32)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", 3])
def test_an_index_cannot_point_outside(file: Any, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_sharded(tmp_path, TINY_LLAMA, tensors)
    content = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="no name of a safetensors file"):
        load_model(tmp_path, dtype=FLOAT32)


def test_weights_in_another_form_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    with pytest.raises(ModelLoadError, match=r"no .*safetensors"):
        load_model(tmp_path, dtype=FLOAT32)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"only as pytorch_model\.bin"):
        load_model(tmp_path, dtype=FLOAT32)
