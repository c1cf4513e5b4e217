"""A thinking that is ended by its budget goes on as the same request: as if the model had chosen the end itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.speculation.device import DeviceDrafts
from jaxserve.text.detokenizer import RequestOutput, SequenceText
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import Abort, Add, FromEngine, Located, Outputs, Ready, ToEngine
from jaxserve.types.sampling import SamplingParams, ThinkingBudget
from jaxserve.types.step import FIRST_VERSION, FinishReason, SchedulerOutput, SlotInit, TokenOutput, joined_versions
from tests.api.fakes import DEMO, demo_info
from tests.fakes import VOCAB, FakeRunner, FakeSlot, FakeStep, next_token, small_config
from tests.waiting import LAST_RESORT

PROMPT = [11, 12, 13, 14, 15]
END = (5, 6, 7)
TOKENIZER = Tokenizer.from_directory(DEMO)


DRAFTS: dict[str, Any] = {"max_drafts": 3, "draft_rows": 8, "verify_sizes": (2, 4, 8, 16)}


class ScriptedRunner(FakeRunner):
    """Samples given tokens at given places of the output; keeps what the device was told of each request.

    drafts: with a draft model, whose guesses are right except at each seventh position
    """

    def __init__(self, script: dict[int, int], *, drafts: bool = False) -> None:
        super().__init__(small_config(**(DRAFTS if drafts else {})), guess=lambda *_: [])
        self.script = script
        self.inits: list[SlotInit] = []

    def _drafts(self, output: SchedulerOutput) -> np.ndarray:
        found = np.full((len(output.rows), self.config.max_drafts), -1, np.int32)
        for i, (row, room) in enumerate(zip(output.rows, output.draft_room, strict=True)):
            slot = self.slots[row.slot]
            context = [*self._context(slot).tolist(), slot.last_token]
            for place in range(min(self.config.max_drafts, room - slot.position)):
                seed = slot.init.seed if slot.init.params.temperature else 0
                number = len(context) - slot.init.num_prompt_tokens
                token = self.script.get(number, next_token(context, seed))
                found[i, place] = (token + (number % 7 == 6)) % VOCAB
                context.append(token)
        return found

    def execute(self, output: SchedulerOutput) -> FakeStep:
        self.inits += output.slot_inits
        return super().execute(output)

    def _sample(self, slot: FakeSlot, mask: np.ndarray | None) -> int:
        token = super()._sample(slot, mask)
        return self.script.get(slot.position - slot.init.num_prompt_tokens, token)


class CoreLink:
    """An EngineCore that is stepped while its messages are waited for."""

    def __init__(self, runner: ScriptedRunner) -> None:
        drafter = DeviceDrafts(VOCAB) if runner.config.draft_rows else None
        self.core = EngineCore(runner, runner.config, CoreOptions(vocab_size=VOCAB, drafter=drafter))
        self.messages: list[FromEngine] = []
        self.sent: list[ToEngine] = []

    async def start(self) -> None:
        self.messages += [Located(str(DEMO)), Ready(demo_info(TOKENIZER))]

    async def receive(self) -> FromEngine:
        while not self.messages:
            await asyncio.sleep(0)
            if self.core.has_work and (outputs := self.core.step()):
                self.messages.append(Outputs(outputs))
        return self.messages.pop(0)

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)
        match message:
            case Add():
                self.core.add(*message.requests())
            case Abort(request_ids):
                self.messages.append(Outputs(self.core.abort(request_ids)))
            case _:
                raise AssertionError(message)

    def pulse(self) -> None: ...

    def in_work(self) -> list[str]:
        return []

    def dump_stacks(self) -> None: ...

    def kill(self) -> None: ...

    async def stop(self) -> None: ...


def run(
    params: SamplingParams,
    script: dict[int, int],
    act: Callable[[AsyncEngine], Any] = lambda engine: None,
    version: str = FIRST_VERSION,
    *,
    drafts: bool = False,
) -> tuple[dict[int, list[RequestOutput]], ScriptedRunner, CoreLink]:
    """The outputs of one request, by choice. act: called at every output."""
    runner = ScriptedRunner(script, drafts=drafts)
    link = CoreLink(runner)
    link.core.serving.version = version
    found: dict[int, list[RequestOutput]] = {}

    async def main() -> None:
        engine = AsyncEngine(Config(), link)
        await engine.start()
        stream: AsyncIterator[RequestOutput] = engine.generate(PROMPT, params, request_id="r")
        async for output in stream:
            found.setdefault(output.index, []).append(output)
            await asyncio.sleep(0)
            if (waiting := act(engine)) is not None:
                await waiting
        assert engine.num_live == 0 and len(engine._live) == 0
        while link.core.has_work:
            link.core.step()
        link.core.scheduler.check_integrity()
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), LAST_RESORT))
    return found, runner, link


def joined(outputs: list[RequestOutput]) -> dict[str, Any]:
    last = outputs[-1]
    return {
        "tokens": [i for output in outputs for i in output.token_ids],
        "text": "".join(output.text for output in outputs),
        "finish": (last.finish_reason, last.matched_stop, last.num_output_tokens, last.num_prompt_tokens),
        "cached": last.num_cached_tokens,
    }


def budget(tokens: int, **changes: Any) -> ThinkingBudget:
    return ThinkingBudget(tokens=tokens, family="qwen3", inside=True, end_token_ids=END, **changes)


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 77},
    {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5},
    {"min_tokens": 12, "stop_token_ids": tuple(range(0, VOCAB, 3)), "max_tokens": 60},
    {"max_tokens": 10},  # within the end of the thinking
    {"max_tokens": 11},
    {"max_tokens": 12},
    {"min_tokens": 30, "stop": tuple(TOKENIZER.decode([token]) for token in range(14, 97, 5))},
    {"n": 3, "temperature": 1.0, "seed": 4},
    {"logprobs": 2},
]


@pytest.mark.parametrize("tokens", [8, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(case) or "plain")
def test_the_rest_is_that_of_a_model_which_ends_its_thinking_itself(case: dict[str, Any], tokens: int) -> None:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 40} | case))
    cut, runner, _ = run(msgspec.structs.replace(params, thinking=budget(tokens)), {})
    itself, _, _ = run(params, dict(enumerate(END, tokens)))
    assert {index: joined(outputs) for index, outputs in cut.items()} == {
        index: joined(outputs) for index, outputs in itself.items()
    }
    resumed = [init for init in runner.inits if len(init.token_ids) > len(PROMPT)]
    for init in resumed:
        assert init.num_prompt_tokens == len(PROMPT) and init.token_ids[: len(PROMPT)] == PROMPT
        assert init.token_ids[-len(END) :] == list(END) and len(init.token_ids) == len(PROMPT) + tokens + len(END)
    ended_before = case.get("max_tokens", 40) <= tokens + len(END)
    assert len(resumed) == (0 if ended_before else case.get("n", 1))
    if case.get("logprobs"):
        for output in cut[0]:
            assert output.token_ids == list(END) or len(output.logprobs or ()) == len(output.token_ids)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(case) or "plain")
def test_drafts_that_reach_over_the_end_of_the_thinking_are_dropped(case: dict[str, Any]) -> None:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 40, "thinking": budget(8)} | case))
    plain, _, _ = run(params, {})
    cut, _, link = run(params, {}, drafts=True)
    assert {index: joined(outputs) for index, outputs in cut.items()} == {
        index: joined(outputs) for index, outputs in plain.items()
    }
    drafts = link.core.scheduler.stats().drafts
    assert drafts is not None and drafts.num_accepted_tokens > 2


def test_a_stop_string_that_begins_in_the_thinking_and_ends_in_its_end() -> None:
    plain, _, _ = run(SamplingParams(temperature=0.0, thinking=budget(8)), {})
    text = joined(plain[0])["text"]
    tokens = joined(plain[0])["tokens"]
    before = len(TOKENIZER.decode(tokens[:8], skip_special_tokens=False))
    stop = text[before - 1 : before + 1]
    assert len(stop) == 2 and stop not in text[: before - 1]
    cut, _, link = run(SamplingParams(temperature=0.0, stop=(stop,), thinking=budget(8)), {})
    assert joined(cut[0])["finish"][:2] == (FinishReason.STOP, stop)
    assert joined(cut[0])["text"] == text[: before - 1] and len([m for m in link.sent if isinstance(m, Add)]) == 1


def test_a_budget_of_nothing_ends_the_thinking_before_it_begins() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    cut, _, link = run(msgspec.structs.replace(params, thinking=budget(0)), {})
    itself, _, _ = run(params, dict(enumerate(END)))
    assert joined(cut[0]) == joined(itself[0])
    assert len(link.sent) == 1


def test_the_new_sequence_has_an_id_of_its_own_and_an_abort_finds_it() -> None:
    seen = 0

    def act(engine: AsyncEngine) -> Any:
        nonlocal seen
        seen += 1
        return engine.abort("r") if seen == 12 else None

    cut, _, link = run(SamplingParams(temperature=0.0, max_tokens=100, thinking=budget(8)), {}, act)
    assert joined(cut[0])["finish"][0] is FinishReason.ABORT
    ids = [message.request.request_id for message in link.sent if isinstance(message, Add)]
    assert len(ids) == len(set(ids)) == 2
    assert len(joined(cut[0])["tokens"]) < 40


@pytest.mark.parametrize("tokens", [0, 8])
def test_no_weights_made_the_end_of_a_thinking(tokens: int) -> None:
    labels: list[tuple[str, ...]] = []
    for version in (FIRST_VERSION, "new"):
        params = SamplingParams(temperature=0.0, max_tokens=20, thinking=budget(tokens))
        cut, _, _ = run(params, {}, version=version)
        labels.append(joined_versions(*(output.weight_versions for output in cut[0])))
    assert labels == [(FIRST_VERSION,), ("new",)]


def sequence(params: SamplingParams) -> SequenceText:
    return SequenceText("r", 0, PROMPT, params, TOKENIZER)


def test_cached_tokens_come_with_the_first_output_of_the_engine() -> None:
    """Also where the end of the thinking came before it."""
    text = sequence(SamplingParams(max_tokens=50, thinking=budget(0)))
    assert text.end_thinking().num_cached_tokens == 0
    assert text.push(TokenOutput(request_id="1", token_ids=[20], num_cached_tokens=4)).num_cached_tokens == 4


def test_an_output_of_many_tokens_is_cut_at_the_budget() -> None:
    text = sequence(SamplingParams(max_tokens=50, thinking=budget(3), logprobs=0))
    output = TokenOutput(request_id="1", token_ids=[20, 21, 22, 23, 24], finish_reason=FinishReason.STOP)
    result = text.push(output)
    assert (result.token_ids, result.finish_reason) == ([20, 21, 22], None) and text.thinks_too_long
    assert text.end_thinking().token_ids == list(END) and not text.thinks_too_long
    assert text.output_token_ids == [20, 21, 22, *END]


def test_an_output_that_ends_at_its_budget_has_ended() -> None:
    text = sequence(SamplingParams(max_tokens=50, thinking=budget(2)))
    text.push(TokenOutput(request_id="1", token_ids=[20]))
    result = text.push(TokenOutput(request_id="1", token_ids=[21], finish_reason=FinishReason.LENGTH))
    assert result.finish_reason is FinishReason.LENGTH and not text.thinks_too_long


def test_thinking_that_is_over_has_no_budget() -> None:
    """By its closing tag, or by the call of a tool that the request has."""
    for words, tools in (("ok</think>\n\nThe answer", ()), ("ok <tool_call>{}", ("f",)), ("ok <tool_call>{}", ())):
        ids = TOKENIZER.encode(words, add_special_tokens=False)
        text = sequence(SamplingParams(thinking=budget(len(ids), tools=tools)))
        for token_id in ids:
            text.push(TokenOutput(request_id="1", token_ids=[token_id]))
        assert text.thinks_too_long == (words.endswith("{}") and not tools), (words, tools)
