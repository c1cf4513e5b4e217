"""Flags of other servers: every one is taken, said to have no effect, or answered with what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from docgen.flags import reference
from jaxserve.cli.foreign_flags import ROWS, Key, NoEffect, Refused
from jaxserve.cli.options import find_flag, key_flags, load_config, parse_flags
from jaxserve.config import Config, known_keys
from jaxserve.errors import ConfigError
from tests.cli.peer_flags import EARLIER, LLAMA_SERVER, SGLANG, VLLM

ROOT = Path(__file__).parent.parent.parent


def taken(*words: str) -> tuple[Config, list[str]]:
    notices: list[str] = []
    return load_config(words, {}, notice=notices.append), notices


@pytest.mark.parametrize(
    "names", [VLLM, SGLANG, EARLIER, LLAMA_SERVER], ids=["vllm", "sglang", "earlier", "llama-server"]
)
def test_every_flag_has_an_answer(names: list[str]) -> None:
    assert len(names) > 30
    for name in names:
        answer, switch = find_flag(name)
        assert find_flag(name.replace("_", "-")) == (answer, switch)
        if isinstance(answer, Key):
            assert name == "--config" or answer.key in known_keys(), name
            assert switch == (answer.const is not None), name
        elif isinstance(answer, NoEffect):
            assert answer.reason and bool(answer.values) == bool(answer.fix), name
            words = [name] if switch else [name, answer.values[0] if answer.values else "x"]
            config, notices = taken(*words)
            assert config == Config() and len(notices) == 1 and notices[0].startswith(name), name
        else:
            with pytest.raises(ConfigError) as error:
                taken(name, "x")
            assert name in str(error.value) and error.value.fix == answer.fix, name


def test_no_flag_has_two_answers() -> None:
    names = [name.removesuffix("!") for row, _ in ROWS for name in row.split()]
    assert sorted(names) == sorted(set(names))


def test_no_row_is_of_no_use() -> None:
    """A name of the table is a flag of one of the lists, or the beginning of some."""
    known = {*VLLM, *SGLANG, *EARLIER, *LLAMA_SERVER}
    for row, answer in ROWS:
        for name in row.split():
            if name.endswith("*"):
                assert not isinstance(answer, Key)
                assert any(flag.startswith(name[:-1]) for flag in known), name
            else:
                assert name.removesuffix("!") in known, name


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--tensor-parallel-size 2", "mesh.tensor", 2),
        ("-tp 2", "mesh.tensor", 2),
        ("--tp=2", "mesh.tensor", 2),
        ("--tensor_parallel_size 2", "mesh.tensor", 2),
        ("--gpu-memory-utilization 0.8", "cache.memory_fraction", 0.8),
        ("--mem-fraction-static 0.8", "cache.memory_fraction", 0.8),
        ("--max-model-len 32k", "model.max_model_len", 32000),
        ("--max-model-len 25.6k", "model.max_model_len", 25600),
        ("--context-length 32K", "model.max_model_len", 32768),
        ("--max-model-len auto", "model.max_model_len", None),
        ("--max-model-len -1", "model.max_model_len", None),
        ("--chunked-prefill-size -1", "scheduler.max_num_batched_tokens", "auto"),
        ("--dtype half", "model.dtype", "float16"),
        ("--quantization fp8", "model.quantization", "fp8"),
        ("-q awq", "model.quantization", "auto"),
        ("--kv-cache-dtype bf16", "cache.dtype", "bfloat16"),
        ("--kv-cache-dtype fp8_e4m3", "cache.dtype", "fp8"),
        ("--device cuda", "mesh.device", "gpu"),
        ("--load-format dummy", "model.load_format", "random"),
        ("--attention-backend FLASHINFER", "runtime.attention", "auto"),
        ("--attention-backend triton", "runtime.attention", "triton"),
        ("--enable-prefix-caching", "cache.prefix_cache", True),
        ("--no-enable-prefix-caching", "cache.prefix_cache", False),
        ("--disable-radix-cache", "cache.prefix_cache", False),
        ("--enable-deterministic-inference", "runtime.deterministic", True),
        ("--served-model-name a b --served-model-name c", "model.served_name", ("a", "b", "c")),
        ('--allowed-origins ["*"]', "server.cors_origins", ("*",)),
        ("--log-requests", "logging.requests", True),
        ("--log-requests false", "logging.requests", False),
        ("--disable-log-requests", "logging.requests", False),
        ("--no-enable-log-requests", "logging.requests", False),
        ("--log-level critical", "logging.level", "error"),
        ("--log-level DEBUG", "logging.level", "debug"),
        ("--schedule-conservativeness 0.5", "scheduler.new_token_ratio", 0.35),
        ("--shutdown-timeout 5", "server.drain_timeout", 5),
        ("--port 1 --port 2", "server.port", 2),
        ("--logging.requests", "logging.requests", True),
        ("DIR", "model.path", "DIR"),
        ("--log-requests DIR", "model.path", "DIR"),
        ("--enforce-eager DIR", "model.path", "DIR"),
        ("--cuda-graph-max-bs 256 DIR", "model.path", "DIR"),
        ("DIR --model DIR", "model.path", "DIR"),
        ("--speculative-algorithm NGRAM", "speculation.method", "ngram"),
        (
            "--speculative-algorithm STANDALONE --speculative-draft-model-path D --speculative-num-steps 3",
            "speculation.draft_model",
            "D",
        ),
        ("--language-model-only", "media.max_items", 0),
        ('--limit-mm-per-prompt {"image":2}', "media.max_items", 2),
        (
            '--speculative-config {"method":"draft_model","model":"D","num_speculative_tokens":3}',
            "speculation.max_drafts",
            3,
        ),
        ('--speculative-config {"method":"qwen3_next_mtp","num_speculative_tokens":1}', "speculation.method", "mtp"),
        ('--speculative-config {"method":"eagle3","model":"DIR"}', "speculation.draft_model", "DIR"),
        ("--speculative-algorithm NEXTN", "speculation.method", "mtp"),
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path D --speculative-num-steps 3",
            "speculation.method",
            "eagle3",
        ),
    ],
)
def test_a_flag_is_taken(words: str, key: str, value: object) -> None:
    config, _ = taken(*words.split())
    section, _, name = key.partition(".")
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--enforce-eager", "no effect: programs of fixed shapes are compiled before the server is ready"),
        ("--trust-remote-code", "no effect: code of a checkpoint is never run"),
        ("--attention-backend FA3", "FA3 is not known here: auto is taken"),
        ("--enable-priority-scheduling", "a lower value is earlier here"),
        ("--pipeline-parallel-size 1", "no effect: there is one"),
        ("--no-enable-lora", "no effect: it is off"),
        ("--enable-lora --max-loras 4", "--enable-lora has no effect: lora.slots is set"),
        ("--lora.slots 4 --enable-lora", "--enable-lora has no effect: lora.slots is set"),
        ("--max-cpu-loras 8", "no effect: an adapter stays in the memory of the host until it is unloaded"),
        ("--compilation-config.level 3", "no effect: programs of fixed shapes are compiled before the server is ready"),
    ],
)
def test_a_flag_without_an_effect_is_said(words: str, said: str) -> None:
    _, notices = taken(*words.split())
    assert len(notices) == 1 and said in notices[0]


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        ("--enable-lora", "--enable-lora is no flag of jaxserve", "write --max-loras N beside it"),
        ("--max-loaded-loras 8", "--max-loaded-loras is no flag of jaxserve", "until they are unloaded"),
        ("--speculative-config {}", "{} should be a JSON object", "some of method, model"),
        ('--speculative-config {"method":"eagle","model":"DIR"}', "speculation.method", None),
        ('--speculative-config {"method":"mtp","model":"DIR"}', "for the methods draft_model and eagle3", None),
        ('--speculative-config {"quantization":"fp8"}', "the field quantization is not served", "leave it out"),
        ("--speculative-algorithm EAGLE", "speculation.method", None),
        ("--speculative-algorithm EAGLE3", "needs speculation.draft_model", None),
        ("--speculative-algorithm STANDALONE", "needs speculation.draft_model", None),
        ("--speculative-eagle-topk 4", "--speculative-eagle-topk 4 is not served", "leave it out"),
        ("--speculative-token-map FILE", "--speculative-token-map is no flag", "write --speculation.method ngram"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size 2 is not served", "write --mesh.tensor N"),
        ("--quantization bitsandbytes", "model.quantization", None),
        ("--nnodes 2 --node-rank 2", "mesh.host_rank: there are 2 hosts, from 0 to 1", None),
        ("--dist-init-addr node-0:5000 --master-port 5001", "mesh.leader_port: leader_address has port 5000", None),
        ("--port", "--port needs a value", None),
        ("--port --host x", "--port needs a value", None),
        ("DIR OTHER", "two models are given", "leave one out"),
        ("--api-key KEY-1 KEY-2", "--api-key takes one value, and 2 are given", None),
        ("--mem-fraction-static 2", "cache.memory_fraction", None),
    ],
)
def test_a_flag_is_answered(words: str, message: str, fix: str | None) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        taken(*words.split())
    assert "KEY-2" not in str(error.value)
    assert fix is None or fix in str(error.value.fix)


@pytest.mark.parametrize(
    ("flag", "suggested"),
    [
        ("--disable-log-request", "--disable-log-requests"),
        ("--enable-metric", "--enable-metrics"),
        ("--max-modellen", "--max-model-len"),
        ("--prot", "--port"),
        ("--scheduler.max-num-seq", "--scheduler.max-num-seqs"),
        ("--completely-different", None),
        ("--disable-requests", "--disable-log-requests"),
        ("-x", None),
    ],
)
def test_a_suggestion_never_means_the_opposite(flag: str, suggested: str | None) -> None:
    with pytest.raises(ConfigError, match=f"unknown flag {flag}") as error:
        parse_flags([flag, "1"])
    assert str(error.value).partition("did you mean ")[2] == (f"{suggested}?" if suggested else "")


def test_every_alias_names_a_key() -> None:
    assert set(key_flags().values()) <= set(known_keys())


def test_the_page_is_made_from_the_table() -> None:
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == reference()
    assert {type(answer) for _, answer in ROWS} == {Key, NoEffect, Refused}


def test_a_reader_that_leaves() -> None:
    """`jaxserve launch --help | head`: 141 is what a shell says of a process that SIGPIPE ended."""
    command = [sys.executable, "-m", "jaxserve", "launch", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 141)
