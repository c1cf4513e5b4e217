"""TextEngine, in process: failures are results, nothing is queued by half, and no error leaves it unusable."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from jaxserve.config import Config
from jaxserve.engine import engine as engine_module
from jaxserve.engine import factory
from jaxserve.engine.core import EngineCore
from jaxserve.engine.engine import Completion, TextEngine, interrupts_wait
from jaxserve.engine.server import BuiltEngine
from jaxserve.errors import ConfigError, ContextLengthError, InvalidValueError, RequestError, ServerError
from jaxserve.grammar.matcher import MatcherFactory
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.text.detokenizer import RequestOutput, SequenceText
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import Located
from jaxserve.types.sampling import SamplingParams, ThinkingBudget
from jaxserve.types.step import FinishReason, SchedulerOutput, TokenOutput
from tests.api.fakes import DEMO, demo_info
from tests.fakes import VOCAB, alone, make_core, small_config
from tests.faults.faulty_runner import FaultyRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
BUDGET = ThinkingBudget(tokens=1, family="qwen3", end_token_ids=(5,))
PROMPTS: list[Any] = [[1, 2, 3], [9, 8], [5]]


def make_engine(monkeypatch: pytest.MonkeyPatch, **options: Any) -> TextEngine:
    def build(config: Config, send: Callable[[Any], None], seed: int = 0) -> BuiltEngine:
        send(Located(str(DEMO)))
        return BuiltEngine(
            make_core(small_config(), **options), demo_info(Tokenizer.from_directory(DEMO)), lambda spec: Future()
        )

    monkeypatch.setattr(engine_module, "build_engine", build)
    return TextEngine()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TextEngine:
    return make_engine(monkeypatch)


def fail(engine: TextEngine, plan: Callable[[SchedulerOutput], str | None]) -> None:
    engine.core.runner = FaultyRunner(engine.core.runner, plan)


def expected(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return alone(prompt, params)[0]


def check_usable(engine: TextEngine) -> None:
    """Nothing is left behind, and what comes next is right."""
    assert not engine.has_unfinished and engine.step() == []
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert [each[0].token_ids for each in engine.generate(PROMPTS, GREEDY)] == [expected(p) for p in PROMPTS]
    engine.core.scheduler.check_integrity()
    assert engine.core.scheduler.stats().num_pages_held == 0


def take(engine: TextEngine, seen: dict[tuple[str, int], Completion]) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    for output in outputs:
        seen.setdefault((output.request_id, output.index), Completion()).add(output)
    return outputs


@pytest.mark.parametrize(
    ("prompts", "params", "error"),
    [
        ([[1], [1] * 500], GREEDY, ContextLengthError),
        ([[1], [VOCAB]], GREEDY, InvalidValueError),
        ([[1], [2**40]], GREEDY, InvalidValueError),
        ([[1], []], GREEDY, InvalidValueError),
        ([[1], 2], GREEDY, InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(n=0)], InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(top_k=-2)], InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(min_p=1.5)], InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(top_p=1.5)], InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(temperature=-1.0)], InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(repetition_penalty=0.0)], InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(logprobs=21)], InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(prompt_logprobs=21)], InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(logit_bias={VOCAB: 1.0})], InvalidValueError),
        ([[1], [2]], [GREEDY, SamplingParams(thinking=BUDGET)], InvalidValueError),
        ([[1], [2]], [GREEDY], InvalidValueError),
        ([[1]], [GREEDY, GREEDY], InvalidValueError),
        ([[1]], {"temperatur": 0}, InvalidValueError),
        ([[1]], [7], InvalidValueError),
        ([[1]], 0.5, InvalidValueError),
    ],
)
def test_prompts_are_queued_all_or_none(engine: TextEngine, prompts: Any, params: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        engine.generate(prompts, params)
    assert engine.core.stats().num_waiting == 0
    check_usable(engine)


def test_no_prompts_have_no_completions(engine: TextEngine) -> None:
    assert engine.generate([], GREEDY) == []


@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_sequence_is_a_result_and_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    engine = make_engine(monkeypatch, not_finite={format(n, "x")})  # the first choice of the second prompt
    found = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, n=n))
    (bad, *siblings), good = found[1], [found[0], found[2]]
    assert bad.finish_reason is FinishReason.ERROR and isinstance(bad.error, ServerError) and bad.num_prompt_tokens == 2
    assert [each.token_ids for each in siblings] == [expected(PROMPTS[1])] * (n - 1)
    for prompt, completions in zip((PROMPTS[0], PROMPTS[2]), good, strict=True):
        assert [(each.token_ids, each.error) for each in completions] == [(expected(prompt), None)] * n
    check_usable(engine)


def test_a_failed_sequence_is_the_last_output_of_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = make_engine(monkeypatch, not_finite={"1"}), dict[tuple[str, int], Completion]()
    engine.add_request(PROMPTS[0], GREEDY, request_id="good")
    for _ in range(4):
        for output in engine.step():
            seen.setdefault((output.request_id, output.index), Completion()).add(output)
    engine.add_request(PROMPTS[1], GREEDY, request_id="bad")
    take(engine, seen)
    assert seen["good", 0].token_ids == expected(PROMPTS[0]) and seen["good", 0].error is None
    assert seen["bad", 0].error is not None and seen["bad", 0].token_ids == []


def test_text_that_cannot_be_made_ends_its_sequence_alone(engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    push = SequenceText.push

    def raises_for_one(self: SequenceText, output: TokenOutput) -> RequestOutput:
        if output.request_id == "1":
            raise KeyError("a token")
        return push(self, output)

    monkeypatch.setattr(SequenceText, "push", raises_for_one)
    found = engine.generate(PROMPTS, GREEDY)
    assert isinstance(found[1][0].error, ServerError) and found[0][0].token_ids == expected(PROMPTS[0])
    monkeypatch.undo()
    check_usable(engine)


def test_a_failed_step_is_computed_again(engine: TextEngine) -> None:
    fail(engine, lambda output: "read" if output.step in (1, 6) else None)
    assert [each[0].token_ids for each in engine.generate(PROMPTS, GREEDY)] == [expected(p) for p in PROMPTS]
    check_usable(engine)


def test_a_request_that_always_fails_the_device_is_a_result(engine: TextEngine) -> None:
    fail(engine, lambda output: "read" if any(row.request_id == "1" for row in output.rows) else None)
    found = engine.generate(PROMPTS, GREEDY)
    assert found[1][0].error is not None and "the device fails" in found[1][0].error.message
    assert [found[i][0].token_ids for i in (0, 2)] == [expected(PROMPTS[i]) for i in (0, 2)]
    check_usable(engine)


def test_a_closed_engine_holds_no_thread_and_takes_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = ThreadPoolExecutor(1)
    with make_engine(monkeypatch, mask_threads=threads) as engine:
        engine.add_request(PROMPTS[0], GREEDY)
        engine.step()
    assert not engine.has_unfinished and engine.core.stats().num_running == 0
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(int)
    with pytest.raises(ServerError, match="closed"):
        engine.generate(PROMPTS, GREEDY)
    engine.close()


def test_closing_ends_what_compiles_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_directory(DEMO)
    matchers = MatcherFactory(tokenizer.to_json(VOCAB), vocab_size=VOCAB, eos_token_ids=(2,))
    before = threading.active_count()
    with make_engine(monkeypatch, on_close=matchers.close):
        matchers.warm_up()
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_a_forked_engine_is_refused_and_closing_it_there_ends_nothing(engine: TextEngine) -> None:
    """What fork would do is shown by another pid: forking this process, which has JAX's threads, could hang it."""
    engine._pid -= 1
    for use in (lambda: engine.generate(PROMPTS, GREEDY), lambda: engine.add_request(PROMPTS[0], GREEDY), engine.step):
        with pytest.raises(ServerError, match="forked"):
            use()
    engine.close()
    engine._pid += 1
    engine._closed = False
    check_usable(engine)


def test_an_engine_that_is_closed_while_it_generates_returns_no_half_texts(engine: TextEngine) -> None:
    fail(engine, lambda output: engine.close() if output.step == 3 else None)
    with pytest.raises(ServerError, match="closed"):
        engine.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("step", [1, 2, 7])
def test_an_interrupt_aborts_what_generate_queued(engine: TextEngine, step: int) -> None:
    due = [step]

    def plan(output: SchedulerOutput) -> None:
        if due and output.step == due[0]:
            raise KeyboardInterrupt(due.pop())

    fail(engine, plan)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY)
    check_usable(engine)


def test_an_interrupt_between_two_steps_aborts_too(engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(EngineCore, "step", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        engine.generate(PROMPTS, GREEDY)
    check_usable(engine)


def press_ctrl_c(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("place", [(Scheduler, "update"), (SequenceText, "push"), (EngineCore, "add")])
def test_ctrl_c_costs_the_other_requests_no_token(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    """A signal in the middle of a step: its tokens were read, and their requests are not told yet."""
    name = engine.add_request([1, 2], SamplingParams(temperature=0.0, max_tokens=4))
    seen: dict[tuple[str, int], Completion] = {}
    work, due = getattr(*place), [1]

    def interrupted(*args: Any, **keys: Any) -> Any:
        result = work(*args, **keys)
        if due:
            press_ctrl_c(due.pop())
        return result

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*place, interrupted)
        engine.generate(PROMPTS, GREEDY)
    take(engine, seen)
    assert (seen[name, 0].token_ids, seen[name, 0].error) == (expected([1, 2])[:4], None)
    check_usable(engine)


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        press_ctrl_c()
        done.append("waited")
        press_ctrl_c()
        done.append("did not")
    assert done == ["waited"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_several_threads_generate(engine: TextEngine) -> None:
    """One step at a time, whichever thread computes it."""
    inside: list[int] = []

    def plan(output: SchedulerOutput) -> None:
        inside.append(threading.get_ident())
        time.sleep(0.001)
        assert inside == [threading.get_ident()]
        inside.clear()

    fail(engine, plan)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda prompt: engine.generate(prompt, GREEDY)[0][0], PROMPTS * 4))
    assert [each.token_ids for each in found] == [expected(prompt) for prompt in PROMPTS * 4]
    check_usable(engine)


def test_requests_of_one_name_are_apart(engine: TextEngine) -> None:
    engine.add_request([1, 2], GREEDY, request_id="same")
    engine.add_request([3], SamplingParams(temperature=0.0, max_tokens=3), request_id="same")
    outputs = take(engine, {})
    by_prompt = {size: [o for o in outputs if o.num_prompt_tokens == size] for size in (1, 2)}
    assert [i for o in by_prompt[2] for i in o.token_ids] == expected([1, 2])
    assert [i for o in by_prompt[1] for i in o.token_ids] == expected([3])[:3]
    engine.add_request([1, 2], GREEDY, request_id="same")
    engine.add_request([3], SamplingParams(n=2), request_id="same")
    engine.add_request([4], SamplingParams(temperature=0.0, max_tokens=2), request_id="other")
    engine.abort("same")
    assert {output.request_id for output in take(engine, {})} == {"other"}
    check_usable(engine)


def test_generate_keeps_the_outputs_of_requests_that_were_there_before(engine: TextEngine) -> None:
    name = engine.add_request([1, 2], SamplingParams(temperature=0.0, max_tokens=4))
    found = engine.generate([[7], [8]], GREEDY)
    assert [each[0].token_ids for each in found] == [expected([7]), expected([8])]
    assert engine.has_unfinished
    seen: dict[tuple[str, int], Completion] = {}
    take(engine, seen)
    assert seen[name, 0].token_ids == expected([1, 2])[:4]
    check_usable(engine)


def test_choices_have_seeds_of_their_own_and_stop_strings_end_them(engine: TextEngine) -> None:
    found = engine.generate([1, 2], SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=5))[0]
    for seed, choice in enumerate(found, 7):
        assert choice.token_ids == expected([1, 2], SamplingParams(temperature=1.0, seed=seed, max_tokens=5))
    stop = engine.tokenizer.decode(expected([1])[4:6])
    [[stopped]] = engine.generate([1], SamplingParams(temperature=0.0, max_tokens=12, stop=(stop,)))
    assert stopped.finish_reason is FinishReason.STOP and stopped.matched_stop == stop
    check_usable(engine)


def test_errors_of_add_request_queue_nothing(engine: TextEngine) -> None:
    with pytest.raises(RequestError):
        engine.add_request([1] * 500, SamplingParams(n=3))
    check_usable(engine)


def test_a_mesh_that_would_compute_everything_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.data above 1 is not served yet"):
        factory.build_engine(Config.model_validate({"mesh": {"data": 2}}), lambda message: None)
    with pytest.raises(ConfigError, match=r"mesh\.replicas is for servers"):
        TextEngine(config=Config.model_validate({"mesh": {"replicas": 2}}))


def test_an_embedding_has_the_label_of_its_weights() -> None:
    completion = Completion()
    completion.add(RequestOutput("r", 0, embedding=b"1234", weight_versions=("step 2",)))
    assert completion.weight_versions == ("step 2",)
