"""Models over eight simulated CPU devices: the same tokens, few collectives, nothing large left whole.

The devices exist only in a process of their own: its part of this file is what runs under __main__.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from jaxserve import Engine, SamplingParams
from jaxserve.errors import ModelLoadError
from jaxserve.models.adapters import AdapterShape, adapt
from jaxserve.models.checkpoint import orbax
from jaxserve.models.checkpoint.adapter import adapter_of
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import build, load_model
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.runtime.program_set import PROMPT_CHUNK
from jaxserve.runtime.sampling.logprobs import TOP_LOGPROBS
from jaxserve.runtime.sampling.sampler import CDF_LANES
from jaxserve.types.extras import MAX_CANDIDATES, MAX_LOGPROB_IDS
from tests.models import paged
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint, write_words
from tests.models.dense import dense_logits
from tests.models.families import CASES, STATE_CASES
from tests.models.lora import peft_config, peft_tensors, random_pairs
from tests.models.test_adapters import ById, adapted_logits, stacks_of
from tests.quick import QUICK_FLAGS

AXES = ("data", "tensor", "expert")
FLOAT32 = jnp.dtype("float32")
WIDE = TINY_LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 2056}
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "odd_vocab": WIDE | {"vocab_size": 97},
    "packed": CASES["phi3"],
    "qwen3_moe": CASES["qwen3_moe"],
    "gpt_oss": CASES["gpt_oss"],
    "deepseek_v3": CASES["deepseek_v3"],
    "gemma4_e": CASES["gemma4_e"]["text_config"]
    | {"architectures": ["Gemma4ForCausalLM"], "tie_word_embeddings": False},
    "llama4": CASES["llama4"]["text_config"] | {"architectures": ["Llama4ForCausalLM"]},
    "granite4": STATE_CASES["granite4"],  # a state's one group is on all devices
    "falcon_h1": STATE_CASES["falcon_h1_norm"],  # likewise, with a norm before the gate
    # norms over all heads, and a vocabulary that cannot be split
    "olmo2": CASES["olmo2"] | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 97},
}
TIMEOUT = {"short": 560, "long": 1500}  # seconds; a machine may be busy with other things
Run = tuple[str, int, int]  # model, devices of the tensor axis, of the expert axis
# whose tokens are compared with one device's, through the whole engine, also in deterministic mode, or by the model
# alone; the long form by hand
SHORT: dict[str, list[Run]] = {
    "engine": [("llama", 4, 1)],
    "deterministic": [("olmo2", 4, 1), ("deepseek_v3", 2, 2)],
    "model": [("llama", 8, 1), ("qwen3_moe", 2, 2), ("gemma4_e", 2, 1), ("llama4", 2, 2)],
    "adapters": [("llama", 8, 1)],
    "engine with adapters": [],
}
LONG: dict[str, list[Run]] = {
    "engine": [
        *(("llama", tensor, 1) for tensor in (1, 2, 8)),
        ("odd_vocab", 4, 1),
        ("packed", 4, 1),
        *(("qwen3_moe", 1, expert) for expert in (1, 2, 4)),
        ("gpt_oss", 2, 2),
        *(("deepseek_v3", 2, expert) for expert in (2, 4)),
        ("gemma4_e", 2, 1),
        ("llama4", 2, 2),
    ],
    "deterministic": [
        ("llama", 8, 1),
        ("odd_vocab", 2, 2),
        ("packed", 4, 1),
        ("qwen3_moe", 1, 4),
        ("gpt_oss", 2, 2),
        ("deepseek_v3", 2, 4),
        ("granite4", 4, 1),
    ],
    "adapters": [("packed", 4, 1), ("qwen3_moe", 2, 2), ("gpt_oss", 2, 2), ("deepseek_v3", 2, 2), ("gemma4_e", 2, 1)],
    "engine with adapters": [("llama", 4, 1), ("llama", 8, 1)],
    "model": [("granite4", 4, 1), ("granite4", 2, 2), ("falcon_h1", 4, 1)],
}


def abstract_mesh(tensor: int, expert: int) -> AbstractMesh:
    return AbstractMesh((1, tensor, expert), AXES)


# --- in eight devices ------------------------------------------------------------------------------------------


def on_devices(folder: Path, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Greedy tokens of each run beside those of one device, and the engine's programs over four devices."""
    prompt = np.random.default_rng(0).integers(3, 90, 21).tolist()
    names = sorted({name for kind in runs.values() for name, _, _ in kind} | {"llama"})
    one = {}
    for name in names:
        directory = write_checkpoint(folder / name, MODELS[name], random_tensors(MODELS[name]))
        write_words(directory, MODELS[name]["vocab_size"])
        one[name] = paged.greedy(load_model(directory, dtype=FLOAT32), prompt, 12, 8)
    tokens, programs, sums = {}, {}, {}
    for name, tensor, expert in runs["engine"]:
        many, programs[name, tensor] = through_engine(folder / name, tensor, expert, prompt)
        tokens[f"{name}-{tensor}-{expert}"] = one[name], many
    for name, tensor, expert in runs["deterministic"]:
        run = f"{name}-{tensor}-{expert} deterministic"
        many, texts = through_engine(folder / name, tensor, expert, prompt, deterministic=True)
        tokens[run], sums[run] = (one[name], many), {program: summed(text) for program, text in texts.items()}
    for name, tensor, expert in runs["model"]:
        sharded = load_model(folder / name, dtype=FLOAT32, mesh=device_mesh(tensor, expert))
        tokens[f"{name}-{tensor}-{expert} alone"] = one[name], paged.greedy(sharded, prompt, 12, 8)
    for name, tensor, expert in runs["engine with adapters"]:
        for deterministic in (False, True):
            run = f"{name}-{tensor}-{expert} engine with adapters, deterministic {deterministic}"
            tokens[run] = engine_with_adapters(folder / name, tensor, expert, prompt, deterministic)
    return {
        "adapters": {f"{run}": adapted_over(folder, *run) for run in runs["adapters"]},
        "tokens": tokens,
        "programs": programs.get(("llama", 4), {}),
        "sums": sums,
        "converted": converted_equal(folder / "llama", folder / "converted"),
    }


def through_engine(
    directory: Path, tensor: int, expert: int, prompt: list[int], *, deterministic: bool = False
) -> tuple[list[int], dict[str, str]]:
    """Greedy tokens by scheduler, pages, prefill in chunks and sampler; and the text of the programs."""
    engine = Engine(
        str(directory),
        deterministic=deterministic,
        tensor=tensor,
        expert=expert,
        device="cpu",
        compile_cache=None,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        num_pages=8,
    )
    [[answer]] = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    return answer.token_ids, {name: program.as_text() for name, program in engine.runner.compiled.items()}


def adapted_over(folder: Path, name: str, tensor: int, expert: int) -> dict[str, Any]:
    """Logits of an adapter over devices against merged weights on one, and how many sums over devices there are."""
    ids, shape = jnp.asarray(np.random.default_rng(1).integers(3, 90, 12), jnp.int32), AdapterShape(2, 4)
    one = load_model(folder / name, dtype=FLOAT32)
    many = load_model(folder / name, dtype=FLOAT32, mesh=device_mesh(tensor, expert))
    own, adapted = adapt(one.structure, shape), adapt(many.structure, shape)
    pairs = random_pairs({module: place.shape for module, place in own.tensors.items()}, 3, 1, 0.2)
    updates = adapter_of(peft_tensors(pairs), peft_config(3, 6), own).updates
    expected = np.asarray(dense_logits(one.structure, own.merge(one.leaves, updates), ids))
    stacks = stacks_of(adapted, {1: adapter_of(peft_tensors(pairs), peft_config(3, 6), adapted).updates})
    mesh = device_mesh(tensor, expert)
    each = zip(adapted.stacks, stacks, strict=True)
    placed = tuple(jax.device_put(stack, param_sharding(spec, mesh)) for spec, stack in each)
    program = adapted_logits.lower(ById(adapted), (*many.leaves, *placed), ids, jnp.int32(1)).compile()
    found = np.asarray(program((*many.leaves, *placed), ids, jnp.int32(1)))
    whole = dense_logits.lower(many.structure, many.leaves, ids).compile().as_text()
    return {
        "error": float(np.abs(found - expected).max() / np.abs(expected).max()),
        "sums": (summed(program.as_text() or ""), summed(whole or "")),
    }


def engine_with_adapters(
    directory: Path, tensor: int, expert: int, prompt: list[int], deterministic: bool
) -> tuple[list[int], list[int]]:
    """Greedy tokens of an adapter by one device and by several, through whole engines."""
    found = []
    for split in ((1, 1), (tensor, expert)):
        engine = Engine(
            str(directory),
            deterministic=deterministic,
            tensor=split[0],
            expert=split[1],
            device="cpu",
            compile_cache=None,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            num_pages=16,
            slots=2,
            max_rank=4,
        )
        assert engine.runner.adapters is not None
        places = engine.runner.adapters.adapted.tensors
        pairs = random_pairs({name: place.shape for name, place in places.items()}, 3, 1, 0.3)
        engine.load_adapter("a", peft_tensors(pairs), config=peft_config(3, 6))
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        [[answer]] = engine.generate([prompt], params, adapter="a")
        [[plain]] = engine.generate([prompt], params)
        assert answer.token_ids != plain.token_ids
        found.append(answer.token_ids)
    return found[0], found[1]


def converted_equal(source: Path, target: Path) -> dict[str, bool]:
    """A checkpoint converted on 8 devices, where kv heads are copied, is the same on fewer as loaded there directly."""
    orbax.convert(load_model(source, dtype=FLOAT32, mesh=device_mesh(8, 1)), target)
    equal = {}
    for size in (1, 2, 8):
        mesh = device_mesh(size, 1)
        direct, back = (load_model(d, dtype=FLOAT32, mesh=mesh).leaves for d in (source, target))
        pairs = list(zip(direct, back, strict=True))
        equal[str(size)] = all(np.array_equal(a, b) and a.sharding == b.sharding for a, b in pairs)
    return equal


def device_mesh(tensor: int, expert: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: tensor * expert]).reshape(1, tensor, expert), AXES)


def run_on_devices(folder: Path, form: str) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count=8 {QUICK_FLAGS}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.models.test_sharding", str(folder), form]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        command, env=env, cwd=root, capture_output=True, text=True, timeout=TIMEOUT[form], check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("form", ["short", pytest.param("long", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_on_eight_devices(form: str, tmp_path: Path) -> None:
    """The same tokens as one device, and in a decode step two all-reduces a layer and no gathered weight or cache."""
    result = run_on_devices(tmp_path, form)
    for name, (one, many) in result["tokens"].items():
        assert one == many and len(set(one)) > 3, name
    for name, programs in result["sums"].items():
        check_sums(name, programs)
    for name, found in result["adapters"].items():
        assert found["error"] < 1e-5 and found["sums"][0] <= found["sums"][1], (name, found)
    assert all(result["converted"].values()), result["converted"]
    if form == "short":
        check_decode(result["programs"]["decode[1]"])
        check_head(result["programs"]["head_sample[1]"], rows=1, told=MAX_CANDIDATES)
        check_head(result["programs"]["prompt_logprobs"], rows=PROMPT_CHUNK, told=TOP_LOGPROBS)


COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def collectives(program: str) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of the results of each collective in a program's text, those in branches and loops included."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for results, name in re.findall(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", program):
        for dims in re.findall(r"\w+\[([\d,]*)\]", results):
            found.setdefault(name, []).append(tuple(map(int, filter(None, dims.split(",")))))
    return found


def summed(program: str) -> int:
    """How many numbers that are not integers an all-reduce or a reduce-scatter of a program's text adds up."""
    return len(re.findall(r"= [^=]*\b(?:bf16|f16|f32)\[[^=]* (?:all-reduce|reduce-scatter)(?:-start)?\(", program))


def check_sums(name: str, programs: dict[str, int]) -> None:
    """In deterministic mode no sum over devices is left to a collective, whose order of addition is not fixed.

    Except the lookup in a split table of embeddings: one device has the row, and the others add zeros.
    """
    split = MODELS[name.partition("-")[0]].get("vocab_size", 96) % 2 == 0
    steps = {program: count for program, count in programs.items() if program.startswith("extend")}
    assert len(steps) > 1 and set(steps.values()) == {int(split)}, (name, steps)
    assert not any(count for program, count in programs.items() if program not in steps), (name, programs)


def check_decode(program: str) -> None:
    """A step of one row: each layer adds up its two outputs, and sampling gathers values, lanes and candidates."""
    found, hidden = collectives(program), WIDE["hidden_size"]
    reduced = [math.prod(shape) for shape in found["all-reduce"]]
    assert reduced.count(hidden) == 2 * WIDE["num_hidden_layers"] + 1  # and the sharded embedding's
    assert max(reduced) == hidden
    check_head(program, rows=1, told=TOP_LOGPROBS)


def check_head(program: str, *, rows: int, told: int) -> None:
    """Over four devices nothing crosses but, by row and device: a value, watched ids' values, 128 lanes' sums and as
    many candidates as are told; never a row or a device's part of it, a weight or a cache."""
    found = collectives(program)
    assert found.keys() <= {"all-reduce", "all-gather"}
    widths = (1, CDF_LANES, MAX_LOGPROB_IDS)
    allowed = {(4, rows)} | {(4, rows, width) for width in widths} | {(rows, 4 * k) for k in (TOP_LOGPROBS, told)}
    assert found["all-gather"] and set(found["all-gather"]) <= allowed
    assert 4 * max(*widths, told) < WIDE["vocab_size"] and max(widths) < WIDE["vocab_size"] // 4


# --- by shape --------------------------------------------------------------------------------------------------


def test_kv_heads_are_copied_where_there_are_fewer_than_devices() -> None:
    config = for_mesh(from_hf(WIDE), abstract_mesh(8, 1))
    assert (config.num_kv_heads, config.kv_repeat) == (8, 2)
    assert for_mesh(from_hf(WIDE), abstract_mesh(2, 1)).kv_repeat == 1


@pytest.mark.parametrize(
    ("hf", "tensor", "expert", "cause"),
    [
        (WIDE, 3, 1, "8 attention heads cannot be split over 3"),
        (
            WIDE | {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 2},
            2,
            1,
            "3 kv heads can be neither split",
        ),
        (WIDE | {"intermediate_size": 25}, 2, 1, "ffn of 25 cannot be split over 2"),
        (CASES["qwen3_moe"], 1, 3, "expert of 8 cannot be split over 3"),
    ],
)
def test_what_cannot_be_split_is_named(hf: dict[str, Any], tensor: int, expert: int, cause: str) -> None:
    mesh = abstract_mesh(tensor, expert)
    with pytest.raises(ModelLoadError, match=cause):
        for spec in build(for_mesh(from_hf(hf), mesh), jnp.dtype("float32")).specs:
            param_sharding(spec, mesh)


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    print(json.dumps(on_devices(Path(sys.argv[1]), SHORT if sys.argv[2] == "short" else LONG)))
