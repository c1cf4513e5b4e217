"""EngineCore on the fake device: what holds for every mixture of requests, and what it resolves itself."""

import itertools
import math
import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest.mock import Mock, patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.core import EngineCore
from jaxserve.errors import ContextLengthError, InvalidValueError
from jaxserve.speculation.device import DeviceDrafts
from jaxserve.types.page_keys import namespace_of
from jaxserve.types.picture import Picture
from jaxserve.types.sampling import BACKGROUND_PRIORITY, EngineRequest, GrammarSpec, SamplingParams
from jaxserve.types.scheduling import GroupSizes, Reach, SchedulerConfig, StateSizes, StepTimes, TowerLimits
from jaxserve.types.step import FinishReason, SchedulerOutput
from tests.fake_grammar import CountingMatcher, HandExecutor
from tests.fakes import (
    PLACEHOLDER,
    VOCAB,
    FakeRunner,
    FakeStep,
    OracleDrafter,
    Transcript,
    Transcripts,
    alone,
    drain,
    make_core,
    make_request,
    masked_next_token,
    run_all,
    seed_of,
    seen_prompt,
    small_config,
)

EOS = (5, 6)
KINDS: tuple[Literal["window", "chunk"], ...] = ("window", "chunk")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


# --- any mixture


@dataclass
class World:
    """A random engine under random traffic, drawn from one seed."""

    rng: random.Random
    transcripts: Transcripts = field(default_factory=Transcripts)
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    names: "itertools.count[int]" = field(default_factory=itertools.count)
    states: bool = False  # with layers that have a recurrent state
    turns: bool = False  # requests go on with answers, and rows have drafts with states too
    draft_model: bool = False  # the device proposes drafts
    pictures: bool = False  # of five, so that they come again, and each fills the pool or a part of it
    adapters: bool = False  # of five, with a slot or a few

    def __post_init__(self) -> None:
        rng = self.rng
        self.stems = [rng.choices(range(VOCAB), k=rng.randrange(1, 24)) for _ in range(3)]
        self.broken = {f"r{i}" for i in range(100) if rng.random() < 0.04}
        self.nan_from = rng.choice([0, 0, 5, 20])
        sizes = small_config(
            step_sizes=rng.choice([(), (1, 8, 16, 32), (2, 5, 9, 33)]),
            num_pages=rng.choice([10, 14, 20, 40, 200]),
            page_size=rng.choice([1, 3, 4, 8]),
            max_num_seqs=rng.choice([1, 2, 4, 8]),
            max_num_batched_tokens=rng.choice([2, 9, 16, 64]),
            max_model_len=rng.choice([16, 48, 128]),
            prefill_chunk_size=rng.choice([None, None, 1, 7]),
            policy=rng.choice(["fcfs", "lpm", "priority"]),
            prefix_cache=rng.random() < 0.75,
            new_token_ratio=rng.choice([0.01, 0.3, 1.0]),
            max_drafts=rng.choice([1, 2, 5]),
            draft_rows=rng.choice([1, 3, 8] if self.draft_model else [0, 1, 3, 8]),
            verify_sizes=rng.choice([(2, 4, 8, 16, 32), (6, 16)]),
            aging_steps=rng.choice([3, 30, 1000]),
            batch_policy=rng.choice(["priority", "yield"]),
            step_times=StepTimes({8: rng.random()}, {1: 0.1, 8: 0.2, 16: rng.choice([0.3, 3.0])}),
        )
        self.threads = rng.choice([None, HandExecutor()])
        self.num_masked = rng.choice([0.15, 0.6])
        self.drafter = OracleDrafter(rng, rng.choice([0.0, 0.5, 0.9, 1.0]))  # the host's, or what the device guesses
        self.malicious = rng.random() < 0.3
        self.config = self.with_towers(self.with_states(sizes) if self.states else self.with_groups(sizes))
        self.core = self.engine(self.config)

    def engine(self, config: SchedulerConfig, **options: object) -> EngineCore:
        """An engine of this world."""
        core = make_core(
            config,
            eos_token_ids=EOS,
            not_finite=self.broken,
            guess=self.drafter.anything if self.malicious else self.drafter.guess,
            drafter=DeviceDrafts(VOCAB) if config.draft_rows else self.drafter,
            make_matcher=lambda spec: CountingMatcher(3, int(spec.source)),
            **({"mask_threads": self.threads, "nan_from": self.nan_from} | options),
        )
        if self.adapters:
            core.adapters = Mock(label=lambda digest: digest)
        return core

    def with_towers(self, config: SchedulerConfig) -> SchedulerConfig:
        """With rows for pictures, and slots for adapters."""
        rng, pieces = self.rng, ("attend", "mlp", "end")
        if self.pictures:
            seconds = {(piece, size): size / 80 for piece in pieces for size in (8, 24)}
            limits = TowerLimits(
                num_rows=rng.choice([6, 9, 40]),
                merge=2,
                pieces={8: pieces, 24: pieces},
                packs=rng.random() < 0.7,
                seconds=rng.choice([{}, seconds]),
                step_seconds=rng.choice([0.0, 0.25, 2.0]),
            )
            config = replace(config, pictures=limits)
        return replace(config, num_adapter_slots=rng.choice([1, 2, 3])) if self.adapters else config

    def with_groups(self, config: SchedulerConfig) -> SchedulerConfig:
        """Two thirds of them with layers that see a window or a chunk, of up to three sizes, and as few pages for these
        as can be, or some more. Most with pages in the memory of the host.
        """
        rng = self.rng
        config = replace(config, num_host_pages=rng.choice([0, 1, 6, 100]))
        reaches = {
            Reach(rng.choice(KINDS), rng.choice([1, 3, 7, 8, 20])) for _ in range(rng.choice([0, 1, 1, 2, 3, 3]))
        }
        any_number = tuple(GroupSizes(reach, 2**31) for reach in sorted(reaches))
        groups = [
            GroupSizes(
                span.reach,
                span.least(config.max_sequence_tokens) + rng.choice([0, 0, 1, 5, 100]),
                rng.choice([1, 6, 100]) if config.num_host_pages else 0,
            )
            for span in replace(config, groups=any_number).spans
        ]
        return replace(config, groups=tuple(groups))

    def with_states(self, config: SchedulerConfig) -> SchedulerConfig:
        """Some of them with windows too."""
        config, rng = replace(self.with_groups(config), num_host_pages=0), self.rng
        config = config if self.turns else replace(config, max_drafts=0)
        groups = tuple(replace(group, num_host_pages=0) for group in config.groups)
        border = config.page_size * rng.choice([1, 1, 2])
        sizes = StateSizes(rng.choice([2, 3, 5, 9, 40]), border * rng.choice([1, 2, 3]), border)
        return replace(config, groups=groups if rng.random() < 0.3 else (), states=sizes)

    @property
    def room(self) -> int:
        return self.core.scheduler.config.max_sequence_tokens

    def arrive(self) -> None:
        rng = self.rng
        prompt = (rng.choice(self.stems)[: rng.randrange(24)] + rng.choices(range(VOCAB), k=rng.randrange(1, 14)))[
            : self.room - 1
        ]
        if self.turns and self.transcripts and rng.random() < 0.4:
            last = rng.choice(list(self.transcripts))
            before = [*self.requests[last].prompt_token_ids, *self.transcripts[last].token_ids]
            prompt = [*before, *prompt[-3:]][: self.room - 1]
        pictures = self.shown(prompt) if self.pictures else ()
        adapter = str(rng.randrange(6) or "") if self.adapters else ""
        for _ in range(rng.choice([1, 1, 1, 4])):
            name = f"r{next(self.names)}"
            stop = tuple(rng.choices(range(VOCAB), k=2)) if rng.random() < 0.3 else ()
            request = make_request(
                name,
                prompt,
                max_tokens=rng.choice([None, 0, 1, 5, 20]),
                min_tokens=rng.choice([0, 0, 4]),
                ignore_eos=rng.random() < 0.3,
                stop_token_ids=stop,
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(100),
                logprobs=rng.choice([None, None, 0, 2]),
                prompt_logprobs=rng.choice([None, None, None, 1]),
                grammar=GrammarSpec(kind="regex", source=str(rng.randrange(1, 9)))
                if rng.random() < self.num_masked
                else None,
                priority=rng.choice([0, 1, 2, BACKGROUND_PRIORITY, BACKGROUND_PRIORITY + 1]),
                namespace=namespace_of(adapter, rng.choice(["", "", "salt"])),
                adapter=adapter,
                pictures=pictures,
            )
            self.drafter.outputs[name], _ = self.expected(request)
            self.core.add(request)
            self.requests[name] = request

    def shown(self, prompt: list[int]) -> tuple[Picture, ...]:
        """Put pictures into a prompt, some of them at its end."""
        rng, found, grids = self.rng, list[Picture](), [(1, 1), (1, 2), (2, 2), (1, 6), (2, 3)]
        text = [0 if token == PLACEHOLDER else token for token in prompt]
        prompt.clear()
        for cut in sorted(rng.choices(range(len(text) + 1), k=rng.choice([0, 1, 1, 2, 4]))):
            prompt += text[len(prompt) - sum(picture.num_tokens for picture in found) : cut]
            height, width = grids[kind := rng.randrange(5)]
            if len(prompt) + height * width < self.room:
                patches = bytes([kind]) * 4 * height * width
                grid = 1, 2 * height, 2 * width
                found.append(Picture(bytes([kind]) * 32, patches, grid, len(prompt), height * width))
                prompt += [PLACEHOLDER] * height * width
        prompt += text[len(prompt) - sum(picture.num_tokens for picture in found) :]
        del prompt[max(self.room - 1, found[-1].end if found else 0) :]
        return tuple(found)

    def die(self) -> None:
        """Another engine goes on with the requests, in any order."""
        if self.threads is not None:
            self.threads.tasks.clear()
        self.core = self.engine(self.config)
        ends = {name for name, transcript in self.transcripts.items() if transcript.last is not None}
        live = [request for name, request in self.requests.items() if name not in ends]
        for request in self.rng.sample(live, len(live)):
            done = self.transcripts.get(request.request_id, Transcript())
            self.drafter.outputs[request.request_id], _ = self.expected(request)
            known = {"resumed_token_ids": list(done.token_ids), "is_answered": bool(done.outputs)}
            self.core.add(msgspec.structs.replace(request, **known))

    def disturb(self, abort_rate: float) -> None:
        core, rng = self.core, self.rng
        if rng.random() < abort_rate and self.requests:
            self.transcripts.take(core.abort([rng.choice(list(self.requests))]))
        if rng.random() < 0.03:
            core.flush_prefix_cache()
        if rng.random() < 0.02 and not core.is_isolating:  # a second failure might end a request
            core.recover()
        if self.pictures or self.adapters:
            if rng.random() < 0.03:
                core.scheduler.preempt_all(prompts_only=rng.random() < 0.5)
            if rng.random() < 0.02 and not core.is_isolating:
                self.die()

    def make_masks(self, threads: HandExecutor) -> None:
        """Threads make some of the masks that wait for them, and the grammars become slow or quick."""
        threads.run(self.rng.choice([0, 1, 5]))
        for mask in self.core._masks._masks.values():
            mask.budget.is_slow = self.rng.random() < 0.5

    def run(self, arrivals: int, abort_rate: float) -> None:
        """Once all have arrived nothing interferes any more: whoever hangs then hangs for ever."""
        waits: dict[str, Any] = {name: self.rng.choice([0, 1, 4, 20]) for name in ("PROBE", "TRIAL", "PATIENCE")}
        with patch.multiple("jaxserve.scheduler.speculation", **waits):
            self._run(arrivals, abort_rate)

    def _run(self, arrivals: int, abort_rate: float) -> None:
        for _ in range(20_000):
            if arrivals and (self.rng.random() < 0.4 or not self.core.has_work):
                arrivals -= 1
                self.arrive()
            if arrivals:
                self.disturb(abort_rate)
            self.transcripts.take(self.core.step())
            if self.threads is not None:
                self.make_masks(self.threads)
            self.core.scheduler.check_integrity()
            if not arrivals and not self.core.has_work:
                return
        raise AssertionError(f"requests that never end: {self.core.scheduler.stats()}")

    def expected(self, request: EngineRequest) -> tuple[list[int], FinishReason]:
        room = self.room - len(request.prompt_token_ids)
        if request.params.grammar is None:
            return alone(seen_prompt(request), request.params, EOS, room, request.adapter)
        return constrained(request, room)

    def check(self, request: EngineRequest) -> None:
        transcript = self.transcripts[request.request_id]
        tokens, reason = self.expected(request)
        assert transcript.last is not None
        if transcript.reason is FinishReason.ABORT:
            assert transcript.token_ids == tokens[: len(transcript.token_ids)]
        elif request.request_id in self.broken and transcript.reason is FinishReason.ERROR:
            most = max(0, self.nan_from - len(request.prompt_token_ids) + 1)
            assert transcript.token_ids == tokens[: min(most, len(transcript.token_ids))]
        else:
            assert request.request_id not in self.broken or self.is_finite(request, tokens)
            assert (transcript.token_ids, transcript.reason) == (tokens, reason)
            self.check_logprobs(request)

    def is_finite(self, request: EngineRequest, tokens: list[int]) -> bool:
        """Whether no position from `nan_from` on is computed. The last token is not."""
        return len(request.prompt_token_ids) + max(0, len(tokens) - 1) <= self.nan_from

    def check_logprobs(self, request: EngineRequest) -> None:
        outputs = self.transcripts[request.request_id].outputs
        prompts = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert len(prompts) == (request.params.prompt_logprobs is not None)
        for entries in prompts:
            assert [entry and entry.token_id for entry in entries] == [None, *request.prompt_token_ids[1:]]
        if request.params.logprobs is not None:
            entries = [entry for output in outputs for entry in output.logprobs or []]
            assert [entry.token_id for entry in entries] == self.transcripts[request.request_id].token_ids
            assert all(len(entry.top_ids) == request.params.logprobs for entry in entries)


def constrained(request: EngineRequest, room: int) -> tuple[list[int], FinishReason]:
    """`alone`, under the grammar of CountingMatcher(3, n)."""
    params, context, output = request.params, seen_prompt(request), list[int]()
    assert params.grammar is not None
    matcher = CountingMatcher(3, int(params.grammar.source))
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    while len(output) < limit:
        mask = np.full(-(-VOCAB // 32), -1, np.int32)
        matcher.fill(mask)
        token = masked_next_token(context, seed_of(params, request.adapter), mask)
        assert matcher.accept(token)
        context.append(token)
        output.append(token)
        stops = token in params.stop_token_ids or (token in EOS and not params.ignore_eos)
        if stops and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
        if len(output) < limit and matcher.is_terminated:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**48), st.sampled_from([0.0, 0.0, 0.05, 0.3]))
def test_every_request_ends_once_with_the_tokens_it_has_alone(seed: int, abort_rate: float) -> None:
    world = World(random.Random(seed))
    with patch("jaxserve.kv.kv_manager.MAX_LOADED", world.rng.choice([1, 2, 64])):
        world.run(arrivals=15, abort_rate=abort_rate)
    assert world.transcripts.keys() == world.requests.keys()
    for request in world.requests.values():
        world.check(request)
    stats = world.core.scheduler.stats()
    assert (stats.num_pages_held, stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0, 0)
    assert stats.num_pages_cached == stats.num_pages_evictable
    assert len(world.core._masks) == 0
    assert isinstance(world.core.runner, FakeRunner) and world.core.runner.num_read_nan == 0


def test_a_draft_model_rests_and_works_again() -> None:
    """In some of these worlds it proposes drafts again for rows with tokens that it has not computed."""
    rested = after_rests = 0
    execute = FakeRunner.execute
    for seed in range(40):
        world = World(random.Random(seed), draft_model=True)
        rests = set[str]()

        def watch(self: FakeRunner, output: SchedulerOutput, rests: set[str] = rests) -> FakeStep:
            nonlocal after_rests
            names = {row.request_id for row in output.rows}
            after_rests += bool(output.draft_room) and bool(names & rests)
            if output.rests:
                rests |= names
            return execute(self, output)

        with patch.object(FakeRunner, "execute", watch):
            world.run(arrivals=15, abort_rate=0.0)
        for request in world.requests.values():
            world.check(request)
        drafts = world.core.scheduler.stats().drafts
        assert drafts is not None and (drafts.num_rest_steps > 0) == bool(rests)
        rested += bool(rests)
    assert rested > 20 and after_rests > 20


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**48), st.sampled_from([0.0, 0.0, 0.05, 0.3]))
def test_no_state_has_folded_anothers_token(seed: int, abort_rate: float) -> None:
    """As above, with layers whose state is a hash of all tokens folded."""
    world = World(random.Random(seed), states=True, turns=seed % 2 == 0)
    world.run(arrivals=15, abort_rate=abort_rate)
    for request in world.requests.values():
        world.check(request)
    states = world.core.scheduler.kv.states
    assert states is not None and states.num_available == states.num_pages


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**48), st.sampled_from([0.0, 0.0, 0.05, 0.3]))
def test_every_request_reads_its_own_pictures_with_its_own_adapter(seed: int, abort_rate: float) -> None:
    """Also in another engine that goes on with it."""
    world = World(random.Random(seed), states=seed % 4 == 0, pictures=seed % 3 < 2, adapters=seed % 3 > 0)
    world.run(arrivals=15, abort_rate=abort_rate)
    for request in world.requests.values():
        world.check(request)
    assert world.core.scheduler.stats().num_pages_held == 0


@pytest.mark.parametrize("chunk", [1, 16, 17, 40, None])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_greedy_tokens_in_a_crowd_of_64_are_those_alone(chunk: int | None, prefix_cache: bool) -> None:
    config = small_config(
        num_pages=96,
        max_num_seqs=64,
        max_num_batched_tokens=128,
        new_token_ratio=0.01,
        prefill_chunk_size=chunk,
        prefix_cache=prefix_cache,
    )
    rng = random.Random(1)
    stem = rng.choices(range(VOCAB), k=20)
    requests = [
        make_request(f"r{i}", stem[: rng.randrange(20)] + rng.choices(range(VOCAB), k=9), max_tokens=30)
        for i in range(64)
    ]
    core = make_core(config, eos_token_ids=EOS)
    for _ in range(2):  # the second time the cache is warm
        transcripts = run_all(core, requests)
        for request in requests:
            assert transcripts[request.request_id].token_ids == alone(request.prompt_token_ids, request.params, EOS)[0]
    assert core.scheduler.counters.retractions > 0 or chunk == 1, "at one prompt token a step few run at once"


def grammar_core(config: SchedulerConfig | None = None, **options: object) -> EngineCore:
    return make_core(
        config or small_config(), make_matcher=lambda spec: CountingMatcher(3, int(spec.source)), **options
    )


# --- what the core resolves


def test_seeds_are_drawn_where_none_is_given() -> None:
    first, again = (make_core(small_config()) for _ in range(2))
    for core in (first, again):
        core.add(make_request("a", [1], temperature=1.0))
        core.add(make_request("b", [1], temperature=1.0))
        core.add(make_request("c", [1], temperature=1.0, seed=7))
    seeds = [[core.scheduler._live[name].seed for name in "abc"] for core in (first, again)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3 and seeds[0][2] == 7


@pytest.mark.parametrize(("asked", "given"), [(None, 28), (5, 5), (28, 28), (29, 28), (10**9, 28)])
def test_max_tokens_is_clamped_to_the_context(asked: int | None, given: int) -> None:
    core = make_core(small_config(max_model_len=32))
    transcripts = run_all(core, [make_request("a", [1, 2, 3, 4], max_tokens=asked)])
    assert len(transcripts["a"].token_ids) == given and transcripts["a"].reason is FinishReason.LENGTH


def test_a_prompt_that_leaves_no_room_is_refused_unless_nothing_is_to_be_generated() -> None:
    core = make_core(small_config(max_model_len=4))
    for prompt, asked in (([1] * 4, 1), ([1] * 4, None), ([1] * 5, 0)):
        with pytest.raises(ContextLengthError):
            core.add(make_request("a", prompt, max_tokens=asked))
    core.add(make_request("a", [1] * 4, max_tokens=0))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    core = make_core(small_config())
    with pytest.raises(InvalidValueError, match=rf"\[0, {VOCAB}\)"):
        core.add(make_request("a", [1, token]))
    assert not core.has_work


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"max_tokens": -1}, "max_tokens"), ({"deadline": math.nan}, "timeout"), ({"deadline": math.inf}, "timeout")],
)
def test_numbers_that_would_harm_others_are_refused(changes: dict[str, object], param: str) -> None:
    core = make_core(small_config())
    with pytest.raises(InvalidValueError) as refused:
        core.add(make_request("a", [1], **changes))
    assert refused.value.param == param and not core.has_work


def test_an_abort_with_a_reason_is_how_a_stop_string_ends_a_request() -> None:
    core = make_core(small_config())
    core.add(make_request("a", [1, 2], max_tokens=50))
    core.step()
    (last,) = core.abort(["a"], FinishReason.STOP)
    assert (last.finish_reason, last.error) == (FinishReason.STOP, None)
    assert drain(core) == [] and not core.has_work


def test_an_abort_of_all_gives_the_tokens_of_the_step_in_flight_once() -> None:
    core, transcripts = make_core(small_config()), Transcripts()
    core.add(make_request("a", [1, 2, 3], max_tokens=20))
    for _ in range(3):
        transcripts.take(core.step())
    core.settle()
    core.abort_all()
    transcripts.take(core.step())
    found, expected = transcripts["a"], alone([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20))[0]
    assert found.reason is FinishReason.ABORT and found.token_ids == expected[:3]


def test_one_output_a_request_and_step() -> None:
    core = make_core(small_config(), make_matcher=lambda spec: CountingMatcher(3, 2))
    core.add(make_request("a", [1, 2], max_tokens=9))
    core.add(make_request("b", [1, 2], max_tokens=9, grammar=GrammarSpec(kind="regex", source="x")))
    while core.has_work:
        outputs = core.step()
        assert len({output.request_id for output in outputs}) == len(outputs)


# --- numbers


def test_the_tokens_of_steps_are_those_of_prompts_and_outputs() -> None:
    core = make_core(small_config(max_num_batched_tokens=9), eos_token_ids=())
    run_all(core, [make_request("a", range(20), max_tokens=7)])
    stats = core.stats()
    assert stats.step_tokens == 20 + 7 and sum(stats.step_sizes) == stats.steps == 3 + 6


def test_the_numbers_add_up() -> None:
    core = make_core(small_config(), eos_token_ids=EOS)
    requests = [make_request(f"r{i}", [*range(i % 3 * 10, i % 3 * 10 + 12), i], max_tokens=9) for i in range(12)]
    transcripts = run_all(core, requests)
    stats = core.stats()
    assert stats.prompt_tokens == 12 * 13
    assert stats.computed_prompt_tokens == 12 * 13 - stats.cached_tokens + stats.details["recomputed_tokens"]
    assert sum(stats.step_sizes) == stats.steps and stats.step_tokens > stats.computed_prompt_tokens
    assert stats.generation_tokens == sum(len(transcript.token_ids) for transcript in transcripts.values())
    assert stats.details["finished_stop"] + stats.details["finished_length"] == 12
    assert stats.num_pages_free + stats.num_pages_cached == 64 and stats.num_pages_used == 0
    assert stats.steps == core.runner.num_steps and stats.host_seconds > stats.details["scheduler_seconds"] > 0  # type: ignore[attr-defined]


def test_a_resumed_request_goes_first_and_has_no_time_in_the_queue() -> None:
    """Its client has seen tokens of it already."""
    now = [0.0]
    core = make_core(small_config(max_num_seqs=1, queue_timeout=10.0), clock=lambda: now[0])
    core.add(make_request("running", [1], max_tokens=30))
    core.step()
    core.add(make_request("waiting", [2], max_tokens=2))
    core.add(make_request("resumed", [3], max_tokens=4, resumed_token_ids=[7]))
    now[0] = 11.0
    ended = [output.request_id for output in drain(core) if output.finish_reason is not None]
    assert ended == ["waiting", "running", "resumed"]
    core.add(make_request("running", [1], max_tokens=30))
    core.step()
    core.add(make_request("waiting", [2], max_tokens=2))
    core.add(make_request("resumed", [3], max_tokens=4, resumed_token_ids=[7]))
    ended = [output.request_id for output in drain(core) if output.finish_reason is not None]
    assert ended == ["running", "resumed", "waiting"]
