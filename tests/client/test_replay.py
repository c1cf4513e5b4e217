"""Requests whose engine dies in the middle: their outputs go on, and what comes once does not come again."""

import asyncio
import random
import time
from concurrent.futures import Future

import msgspec
import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.engine.server import BuiltEngine, Channel
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.extras import ExtraParams
from jaxserve.types.messages import Located
from jaxserve.types.sampling import EngineRequest, SamplingParams
from tests.api.fakes import DEMO, demo_info
from tests.engine.test_core import World
from tests.fakes import alone, make_core, make_request, run_all, small_config
from tests.faults.faulty_runner import FaultyRunner
from tests.thread_link import ThreadLink

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def build(channel: Channel) -> BuiltEngine:
    """Two milliseconds a step, so that there is a middle."""
    channel.send(Located(str(DEMO)))
    core = make_core(small_config(num_pages=256))
    core.runner = FaultyRunner(core.runner, lambda output: time.sleep(0.002))
    return BuiltEngine(core, demo_info(Tokenizer.from_directory(DEMO)), lambda spec: Future())


def outputs_of(params: SamplingParams, deaths: int) -> list[RequestOutput]:
    """The outputs of a request whose engine dies `deaths` times, at every tenth output."""

    async def run() -> list[RequestOutput]:
        link = ThreadLink(Config(), build)
        engine = AsyncEngine(Config(), link)
        await engine.start()
        outputs: list[RequestOutput] = []
        async for output in engine.generate(PROMPT, params):
            outputs.append(output)
            if len(outputs) in range(3, 3 + 10 * deaths, 10):
                link.kill()
        assert engine.restarts == deaths
        await engine.stop()
        return outputs

    return asyncio.run(run())


def test_what_comes_once_comes_once() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, prompt_logprobs=2)
    outputs = outputs_of(params, deaths=2)
    first, *others = outputs
    assert [token for output in outputs for token in output.token_ids] == alone(PROMPT, params)[0]
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(PROMPT)
    assert first.queue_seconds > 0 and first.prefill_seconds > 0
    for output in others:
        assert output.prompt_logprobs is None and output.queue_seconds == output.prefill_seconds == 0
        assert output.num_cached_tokens == first.num_cached_tokens
    assert all(output.logprobs is not None for output in outputs)


def answered(request: EngineRequest, tokens: list[int]) -> EngineRequest:
    return msgspec.structs.replace(request, resumed_token_ids=tokens, is_answered=True)


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_logprobs": 1},
        {"extras": ExtraParams(hidden_states="all"), "logprobs": 0},
        {"extras": ExtraParams(routed_experts=True), "logprobs": 0},
    ],
)
def test_an_answered_request_reads_the_prefix_cache(asked: dict[str, object]) -> None:
    """It has been given what it asked of its prompt, and no token of the prompt is computed again for it."""
    core = make_core(small_config())
    run_all(core, [make_request("warm", PROMPT, max_tokens=8)])
    before = core.stats().computed_prompt_tokens
    request = make_request("a", PROMPT, max_tokens=8, **asked)
    tokens = alone(PROMPT, request.params)[0]
    transcript = run_all(core, [answered(request, tokens[:2])])["a"]
    assert transcript.token_ids == tokens[2:]
    assert core.stats().computed_prompt_tokens - before < len(PROMPT)
    for output in transcript.outputs:
        assert output.prompt_logprobs is None
        assert output.extras is None or output.extras.prompt_hidden_states is None
        assert output.extras is None or output.extras.prompt_routed_experts is None
        assert output.num_cached_tokens == output.queue_seconds == output.first_token_seconds == 0


class Dying(World):
    """Its engine dies now and then, and every live request is sent to the next as AsyncEngine does."""

    deaths = 0

    def disturb(self, abort_rate: float) -> None:
        super().disturb(abort_rate)
        if self.rng.random() < 0.05:
            self.die()

    def die(self) -> None:
        self.deaths += 1
        self.core = self.engine(self.core.scheduler.config, mask_threads=None, nan_from=0)
        for name, request in self.requests.items():
            transcript = self.transcripts.get(name)
            if transcript is None:
                self.core.add(request)
            elif transcript.last is None:
                self.core.add(answered(request, list(transcript.token_ids)))


@pytest.mark.parametrize("worlds", [12, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_deaths_change_no_output(worlds: int) -> None:
    """Tokens, reasons and log-probabilities are those of a request that has the device to itself, each once."""
    deaths = 0
    for seed in range(worlds):
        world = Dying(random.Random(seed))
        world.run(arrivals=15, abort_rate=random.Random(seed + 1).choice([0.0, 0.0, 0.05, 0.3]))
        for request in world.requests.values():
            world.check(request)
        deaths += world.deaths
    assert deaths > worlds / 2
