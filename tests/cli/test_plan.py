"""`jaxserve plan` and `jaxserve convert`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.plan_configurations import configurations, plan
from jaxserve.cli.main import main
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import load_model
from jaxserve.models.checkpoint.orbax_reader import MANIFEST_NAME
from jaxserve.models.checkpoint.published_size import published_size
from jaxserve.models.checkpoint.structure import build
from tests.conftest import SharedData
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.families import ENCODERS
from tests.models.published import PUBLISHED
from tests.models.test_quantization import gpt_oss_mxfp4


def test_a_plan_of_three_meshes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["Llama-3.1-70B"].hf))
    assert main(["plan", str(config)]) == 0
    head, _, _, columns, *rows = capsys.readouterr().out.splitlines()
    assert head == "LlamaForCausalLM: 70.554 billion parameters, as bfloat16"
    assert columns.split()[:4] == ["devices", "tensor", "expert", "weights"]
    assert [row.split()[:5] for row in rows] == [
        ["1", "1", "1", "131.42", "GiB"],
        ["8", "8", "1", "16.43", "GiB"],
        ["16", "16", "1", "8.37", "GiB"],  # kv heads twice
    ]
    assert "does not fit" in rows[0] and float(rows[1].split()[-1]) > 10
    assert main(["plan", str(config), "--mesh", "4x1", "--memory", "141"]) == 0
    assert capsys.readouterr().out.splitlines()[4].split()[:3] == ["4", "4", "1"]


def test_a_mesh_that_cannot_be_says_why_and_the_others_are_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}
    config.write_text(json.dumps(TINY_LLAMA | heads))
    assert main(["plan", "--mesh", "1", "8x1", "9", "3x1", str(config)]) == 0  # the last word is the model
    rows = capsys.readouterr().out.splitlines()[4:]
    assert rows[1].endswith("9 attention heads cannot be split over 8 devices")
    assert rows[2].endswith("lm_head.weight: embed of 16 cannot be split over 9 devices")
    assert rows[3].endswith("lm_head.weight: embed of 16 cannot be split over 3 devices")
    assert "GiB" in rows[0]


def test_a_plan_tells_what_a_request_costs_and_the_largest_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["Llama-3.1-8B"].hf))
    assert main(["plan", str(config), "--mesh", "1", "--length", "4096", "--max-model-len", "8192"]) == 0
    columns, row = capsys.readouterr().out.splitlines()[3:]
    assert columns.endswith("batch of 4096")
    weights, full, batch = row.split()[3], row.split()[9], int(row.split()[-1])
    token = 2 * 32 * 8 * 128 * 2  # K and V of 32 layers, 8 heads of 128 numbers, 2 bytes each
    assert full == f"{8192 * token / 2**30:.3f}"
    assert batch == int((72 - float(weights)) * 2**30 / (4096 * token))


def test_windows_are_in_what_a_request_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["gpt-oss-120b"].hf | {"sliding_window": 128}))
    assert main(["plan", str(config), "--mesh", "4", "--length", "128"]) == 0
    short = int(capsys.readouterr().out.splitlines()[-1].split()[-2])
    assert main(["plan", str(config), "--mesh", "4", "--length", "12800"]) == 0
    long = int(capsys.readouterr().out.splitlines()[-1].split()[-2])
    assert 45 < short / long < 55  # half of the layers keep the window alone


@pytest.mark.parametrize(
    ("quantization", "beside", "form"),
    [
        ({"quant_method": "fp8", "weight_block_size": [32, 32]}, None, "FP8 in blocks of 32 x 32"),
        (None, {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, "FP8"),
    ],
)
def test_a_quantized_checkpoint_is_told_by_its_own_bytes(
    quantization: Any, beside: Any, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = TINY_LLAMA | {"hidden_size": 2048, "intermediate_size": 4096, "vocab_size": 128}
    (tmp_path / "config.json").write_text(
        json.dumps(hf | ({"quantization_config": quantization} if quantization else {}))
    )
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    sizes = []
    for words, told in (
        (["--quantization", "none"], "decoded at load to (.*) GiB as bfloat16"),
        ([], "held in (.*) GiB as 8 bits and bfloat16"),
    ):
        assert main(["plan", str(tmp_path), *words]) == 0
        line = capsys.readouterr().out.splitlines()[1]
        found = re.fullmatch(rf"the checkpoint is (\S+) GiB of (.*), {told}", line)
        assert found is not None and found[2] == form
        sizes += [float(found[1]), float(found[3])]
    assert sizes[0] == sizes[2] and 0.5 <= sizes[0] / sizes[1] < 0.55
    assert sizes[2] <= sizes[3] < 0.65 * sizes[1]


def test_the_size_of_a_quantized_checkpoint_is_that_of_its_tensors(tmp_path: Path) -> None:
    hf, stored, _ = gpt_oss_mxfp4()
    hf |= {"quantization_config": {"quant_method": "mxfp4"}}
    directory = write_checkpoint(tmp_path, hf, stored)
    size = published_size(build(read_config(directory), jnp.dtype("bfloat16")))
    halves = sum(tensor.size * (1 if tensor.dtype == np.uint8 else 2) for tensor in stored.values())
    assert (size.num_bytes, size.form) == (halves, "MXFP4")


def test_a_plan_says_what_windows_spare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["gpt-oss-120b"].hf | {"sliding_window": 128}))
    assert main(["plan", str(config), "--mesh", "4x1", "--max-num-seqs", "64"]) == 0
    columns, row = capsys.readouterr().out.splitlines()[3:]
    assert columns.endswith("all kept")
    tokens, _, kept = row.split()[-3:]
    assert 1.9 < int(tokens) / int(kept) < 2


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--mesh", "0"], "--mesh 0 is neither"),
        (["--mesh", "8x2x1"], "--mesh 8x2x1 is neither"),
        (["--mesh", "3"], "cannot be split over 3 devices"),
        (["--max-model-len", "131073"], "the model was made for 131072 tokens"),
    ],
)
def test_a_wrong_plan_is_explained(
    words: list[str], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["Llama-3.1-8B"].hf))
    assert main(["plan", str(config), *words]) == 2
    assert cause in capsys.readouterr().err
    for content, cause in (
        ({"architectures": ["LlamaForCausalLM"]}, "is missing"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "is not served"),
        (PUBLISHED["Llama-3.1-8B"].hf | {"quantization_config": {"quant_algo": "INT3"}}, "'INT3' is not supported"),
    ):
        config.write_text(json.dumps(content))
        assert main(["plan", str(config)]) == 2
        assert cause in capsys.readouterr().err


def test_an_encoder_has_nothing_to_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ENCODERS["bert"]))
    assert main(["plan", str(tmp_path)]) == 2
    assert "has no KV cache" in capsys.readouterr().err


def test_convert_then_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "source", TINY_LLAMA, random_tensors(TINY_LLAMA))
    target = tmp_path / "target"
    assert main(["convert", str(source), str(target), "--device", "cpu", "--dtype", "bfloat16"]) == 0
    assert "LlamaForCausalLM, 0.00 GB as bfloat16" in capsys.readouterr().out
    loaded, before = (load_model(d, dtype=jnp.dtype("bfloat16")) for d in (target, source))
    assert all(np.array_equal(a, b) for a, b in zip(loaded.leaves, before.leaves, strict=True))
    assert main(["convert", str(source), str(target), "--device", "cpu"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_conversion_that_finds_no_room_tells_the_cause(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY_LLAMA, random_tensors(TINY_LLAMA))
    command = f"ulimit -f 2; {sys.executable} -m jaxserve convert {source} {tmp_path / 'target'} --device cpu"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    told = f"jaxserve: {tmp_path / 'target'} cannot be written: "
    assert done.returncode == 2, done.stderr
    # Threads of tensorstore write tracebacks meanwhile, whose last line may end without a line break.
    assert done.stderr.count(told) == done.stderr.count("jaxserve: ") == 1, done.stderr
    assert not (tmp_path / "target" / MANIFEST_NAME).exists()


def test_the_command_is_found() -> None:
    done = subprocess.run([sys.executable, "-m", "jaxserve", "--help"], capture_output=True, text=True, check=True)
    assert "convert" in done.stdout and "plan" in done.stdout


@pytest.mark.parametrize(("kind", "part"), [("int8", 0.52), ("int4", 0.32)])
def test_a_quantized_model_is_planned(
    kind: str, part: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the bytes of bfloat16, with the scales; embeddings and head are small here."""
    (tmp_path / "config.json").write_text(
        json.dumps(TINY_LLAMA | {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 8})
    )

    def gib(*flags: str) -> float:
        assert main(["plan", str(tmp_path), "--mesh", "1", *flags]) == 0
        words = capsys.readouterr().out
        assert ("as bfloat16\n" in words) != (f"as {kind} and bfloat16\n" in words)
        return float(words.splitlines()[-1].split()[3])

    assert gib("--quantization", kind) / gib() == pytest.approx(part, abs=0.01)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--memory", value) for value in ("0", "-1", "nan", "inf", "much")),
        *(("--max-num-seqs", value) for value in ("0", "-1", "4097")),
        *(("--max-model-len", value) for value in ("0", "-5")),
        ("--length", "0"),
    ],
)
def test_a_number_that_cannot_be_meant_is_named(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", str(tmp_path), flag, value])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"jaxserve plan: error: argument {flag}: should be ")


def test_requests_longer_than_the_context_are_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    assert main(["plan", str(tmp_path), "--mesh", "1", "--length", "64"]) == 0
    assert main(["plan", str(tmp_path), "--mesh", "1", "--length", "65"]) == 2
    assert "--length is 65, and a full context has 64 tokens" in capsys.readouterr().err


def test_a_form_that_launch_refuses_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    hf = TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 128, "quantization_config": form}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert main(["plan", str(tmp_path), "--mesh", "1", "--quantization", "int8"]) == 2
    assert "already -> set model.quantization: auto" in capsys.readouterr().err


def test_tokens_are_no_more_than_the_server_makes_pages_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    assert main(["plan", str(tmp_path), "--mesh", "1", "--max-num-seqs", "3", "--max-model-len", "40"]) == 0
    assert capsys.readouterr().out.split()[-2:] == [str(2 * 3 * 48), f"{2 * 3 * 48 / 40:.1f}"]


def test_every_split_of_a_mixture_is_tried_and_the_best_is_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scales of blocks cannot be split over four devices and by experts they can: Qwen3-30B-A3B-FP8, smaller."""
    form = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    hf = PUBLISHED["Qwen3-30B-A3B"].hf | {"num_hidden_layers": 2, "quantization_config": form}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert main(["plan", str(tmp_path), "--mesh", "8"]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[5:]]
    assert [row[:3] for row in rows] == [["8", "2", "4"], ["8", "1", "8"]]
    assert int(rows[0][-2]) >= int(rows[1][-2])
    assert main(["plan", str(tmp_path), "--mesh", "4x2"]) == 2
    assert "expert_ffn of 6 cannot be split over 4 devices -> use 1 device (--mesh 1x1)" in capsys.readouterr().err


def test_a_shared_expert_whose_groups_cannot_be_split_over_all_devices_is_split_over_fewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 3.7 Flash in FP8, smaller: its rows of 1,280 are 10 groups. Over the heads' two devices there are 5 each."""
    hf = {
        "architectures": ["Step3p7FlashForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128896,
        "max_position_embeddings": 65536,
        "intermediate_size": 11264,
        "sliding_window": 512,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "first_k_dense_replace": 3,
        "num_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert main(["plan", str(tmp_path), "--mesh", "8"]) == 0
    rows = [row.split()[:3] for row in capsys.readouterr().out.splitlines()[5:]]
    assert rows == [["8", "2", "4"], ["8", "1", "8"]]


def test_gpt_oss_over_eight_devices_is_split_by_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = PUBLISHED["gpt-oss-120b"].hf | {"num_hidden_layers": 2, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert main(["plan", str(tmp_path), "--mesh", "8"]) == 0
    assert [row.split()[:3] for row in capsys.readouterr().out.splitlines()[5:]] == [["8", "2", "4"], ["8", "1", "8"]]


def test_the_fewest_devices_that_would_do_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["Llama-3.1-70B"].hf))
    would = ", for which {} would do"
    for words, told in (
        (["--mesh", "1"], would.format("4 devices (--mesh 4x1)")),
        (["--mesh", "1", "--memory", "141", "--max-model-len", "8192"], would.format("2 devices (--mesh 2x1)")),
        (["--mesh", "4", "8"], ""),
        (["--mesh", "1", "--memory", "0.001"], ""),  # none of any number
    ):
        assert main(["plan", str(config), *words]) == 0
        line = capsys.readouterr().out.splitlines()[1]
        assert line.partition(" tokens")[2] == told, words
    assert main(["plan", str(config), "--mesh", "3"]) == 2
    assert "-> use 4 devices (--mesh 4x1)" in capsys.readouterr().err


def test_a_dense_model_whose_heads_cannot_be_split_is_split_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(TINY_LLAMA | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16})
    )
    assert main(["plan", str(tmp_path), "--mesh", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["8", "1", "8"]


def test_a_forgotten_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--mesh", "8", "16"], ["--mesh", "4x2", "8x1"], ["--memory", "80", "--mesh", "16"]):
        with pytest.raises(SystemExit):
            main(["plan", *words])
        assert "the model is missing" in capsys.readouterr().err


def test_long_work_shows_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    assert main(["plan", str(tmp_path), "--mesh", "1"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("jaxserve.cli.plan._QUIET", 0.0)
    assert main(["plan", str(tmp_path), "--mesh", "1", "2"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "jaxserve: planning: shapes of LlamaForCausalLM",
        "jaxserve: planning: tensor 1, expert 1",
        "jaxserve: planning: tensor 2, expert 1",
    ]


SERVED = {  # of the published files; one or two of each family, the small ones
    "executorch--Llama-3.2-1B-Instruct",
    "executorch--Qwen2.5-0.5B-Instruct",
    "executorch--gemma2_2b_it",
    "executorch--gemma3_1b_it",
    "executorch--phi3.5-mini-instruct",
    "Qwen--Qwen3-0.6B",
    "Qwen--Qwen3-32B-FP8-Static-PerTensor",
    "Qwen--Qwen3-30B-A3B-FP8",
    "mistralai--Mixtral-8x22B-v0.1",
    "openai--gpt-oss-20b",
}
LARGE = ("DeepSeek", "Kimi", "Qwen3", "Llama", "Mixtral", "gpt-oss", "executorch", "SmolLM2", "MiniMax-M2", "MiMo")
LARGE += (
    "Gemma-4",
    "gemma-4",
    "Nemotron",
    "GLM",
    "Hy3",
    "Laguna",
    "Ministral",
    "Mistral",
    "Step",
    "granite",
    "Granite",
)


@pytest.mark.parametrize("form", ["short", pytest.param("long", marks=pytest.mark.slow)])
def test_published_configurations_are_planned_or_refused_with_the_cause(form: str, shared_data: SharedData) -> None:
    folder = shared_data / "hf_configs"
    names = configurations(folder)
    assert len(names) == 99 and SERVED < set(names)
    served = [name for name in names if name in SERVED or (form == "long" and any(word in name for word in LARGE))]
    others = [name for name in names if not any(word in name for word in LARGE)]
    outcomes = [plan(folder, name) for name in {*served, *others}]
    refused = [outcome for outcome in outcomes if not outcome.planned]
    assert SERVED <= {outcome.name for outcome in outcomes if outcome.planned}
    causes = "is not served: |(architecture|quantization) '.* is not supported|cannot be split over|read at most 2 GiB"
    assert [each for each in refused if not re.search(causes, each.text)] == []
