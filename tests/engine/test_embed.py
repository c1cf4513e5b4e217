"""Embedding requests through EngineCore on the fake device: beside generation, over chunks and prefixes, whole."""

import numpy as np
import pytest

from jaxserve.errors import ConfigError, ContextLengthError, InvalidValueError
from jaxserve.types.step import FinishReason, SchedulerOutput
from tests.fakes import FakeRunner, Transcripts, alone, embedding_of, make_core, make_request, run_all, small_config

LONG = list(range(2, 80))


def embedding(transcripts: Transcripts, request_id: str) -> list[float]:
    last = transcripts[request_id].last
    assert last is not None and last.finish_reason is FinishReason.STOP and last.embedding is not None
    assert transcripts[request_id].token_ids == []
    return np.frombuffer(last.embedding, "<f4").tolist()


def test_beside_generation_over_chunks() -> None:
    core = make_core(small_config())
    prompts = {f"e{i}": LONG[: 20 * i + 3] for i in range(4)}
    requests = [make_request(name, prompt, embed=True) for name, prompt in prompts.items()]
    talk = make_request("t", [1, 2, 3], max_tokens=20)
    found = run_all(core, [requests[0], talk, *requests[1:]])
    for name, prompt in prompts.items():
        assert embedding(found, name) == embedding_of(prompt).tolist()
    assert found["t"].token_ids == alone([1, 2, 3], talk.params)[0]


def test_a_prefix_is_shared_both_ways() -> None:
    core = make_core(small_config())
    run_all(core, [make_request("t", LONG, max_tokens=4)])
    found = run_all(core, [make_request("e", [*LONG, 9], embed=True)])
    last = found["e"].last
    assert embedding(found, "e") == embedding_of([*LONG, 9]).tolist() and last and last.num_cached_tokens == 76
    again = run_all(core, [make_request("u", [*LONG, 9, 4], max_tokens=1)])
    assert again["u"].last and again["u"].last.num_cached_tokens == 76


def test_a_text_may_fill_the_context() -> None:
    core = make_core(small_config(max_model_len=16))
    assert embedding(run_all(core, [make_request("e", LONG[:16], embed=True)]), "e")
    with pytest.raises(ContextLengthError):
        core.add(make_request("f", LONG[:17], embed=True))


def test_not_finite_ends_that_request_only() -> None:
    core = make_core(small_config(), not_finite={"bad"})
    found = run_all(core, [make_request(name, [4, 5], embed=True) for name in ("bad", "good")])
    assert found["bad"].reason is FinishReason.ERROR and embedding(found, "good")


def test_a_model_without_tokens_refuses_to_generate() -> None:
    core = make_core(small_config(), generates=False)
    with pytest.raises(InvalidValueError, match="makes embeddings or classifies, and generates no text"):
        core.add(make_request("t", [1, 2]))
    assert embedding(run_all(core, [make_request("e", [1, 2], embed=True)]), "e")


def test_whole_prompts_wait_rather_than_be_cut() -> None:
    config = small_config(whole_prompts=True, page_size=32, num_pages=8, max_model_len=32, prefix_cache=False)
    core = make_core(config, generates=False)
    assert isinstance(core.runner, FakeRunner)
    steps: list[list[int]] = []
    execute = core.runner.execute

    def record(output: SchedulerOutput) -> object:
        steps.append([row.num_tokens for row in output.rows])
        return execute(output)

    core.runner.execute = record  # type: ignore[assignment, method-assign]
    lengths = [20, 12, 1, 30, 3, 32, 5]
    found = run_all(core, [make_request(f"e{i}", LONG[:n], embed=True) for i, n in enumerate(lengths)])
    assert steps == [[20, 12], [1, 30], [3], [32], [5]]
    for i, n in enumerate(lengths):
        assert embedding(found, f"e{i}") == embedding_of(LONG[:n]).tolist()


def test_a_step_must_hold_the_longest_text() -> None:
    with pytest.raises(ConfigError, match="too small for texts of 128") as error:
        small_config(whole_prompts=True)
    assert "scheduler.prefill_chunk_size" in str(error.value.fix)
