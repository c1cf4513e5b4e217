"""A scheduler small enough to be checked by eye. It drives a runner in lockstep."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import RowStatus, SampledTokens, ScheduledRow, SchedulerOutput, SlotInit, StepHandle


@dataclass
class Sequence:
    """One request that holds a slot: `tokens` known to the host, `computed` tokens dispatched."""

    slot: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    pages: list[int] = field(default_factory=list)
    sent_pages: int = 0
    computed: int = 0
    logprobs: list[tuple[float, int, list[int], list[float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    ok: bool = True

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class HandScheduler:
    """Slots and pages are handed out in ascending order and never reused, unless a test does it by hand."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.page_size = runner.config.page_size
        self.next_page = 0
        self.next_slot = 0
        self.inits: list[SlotInit] = []
        self.steps = 0
        self.rests = False  # whether steps leave the draft model out

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        eos: tuple[int, ...] = (),
        output: list[int] | None = None,
        slot: int | None = None,
    ) -> Sequence:
        if slot is None:
            slot, self.next_slot = self.next_slot, self.next_slot + 1
        tokens = [*prompt, *(output or [])]
        self.inits.append(SlotInit(slot, params, seed, len(prompt), tokens, eos))
        return Sequence(slot, tokens, len(prompt), params)

    def row(self, seq: Sequence, num_tokens: int | None = None, *, masked: bool = False) -> ScheduledRow:
        """The next chunk of a prompt, or None tokens: a decode row whose token only the device knows."""
        count = 1 if num_tokens is None else num_tokens
        start, end = seq.computed, seq.computed + count
        while len(seq.pages) * self.page_size < end:
            seq.pages.append(self.next_page)
            self.next_page += 1
        new, first = seq.pages[seq.sent_pages :], seq.sent_pages
        seq.sent_pages, seq.computed = len(seq.pages), end
        literal = [] if num_tokens is None else seq.tokens[start:end]
        samples = num_tokens is None or end == len(seq.tokens)
        return ScheduledRow(
            str(seq.slot), seq.slot, start, count, samples, literal, first, new,
            masked, seq.params.logprobs, seq.params.prompt_logprobs,
            extras=seq.params.extras if seq.params.extras.wanted else None,
        )  # fmt: skip

    def execute(self, rows: list[ScheduledRow]) -> StepHandle:
        self.steps += 1
        decode = sum(not row.token_ids for row in rows)
        num_drafts = sum(len(row.drafts) for row in rows)
        output = SchedulerOutput(self.steps, rows, decode, self.inits, num_drafts=num_drafts, rests=self.rests)
        self.inits = []
        return self.runner.execute(output)

    def step(
        self,
        chunks: list[tuple[Sequence, int | None]],
        bitmask: np.ndarray | None = None,
        late: Collection[int] = (),
    ) -> SampledTokens:
        """One step, waited for. Decode rows (None) first. late: rows that get no token."""
        rows = [self.row(seq, count, masked=bitmask is not None) for seq, count in chunks]
        handle = self.execute(rows)
        if bitmask is not None:
            handle.sample(bitmask, list(late))
        for i in late:
            chunks[i][0].computed -= 1
        result = handle.result()
        self.read([seq for seq, _ in chunks], result)
        return result

    def read(self, seqs: list[Sequence], result: SampledTokens) -> None:
        for i, seq in enumerate(seqs):
            seq.ok &= result.status[i] == RowStatus.FINE
            if result.num_valid[i]:
                seq.tokens.append(int(result.token_ids[i, 0]))
                if seq.params.logprobs is not None:
                    assert result.logprobs is not None and result.ranks is not None
                    assert result.top_ids is not None and result.top_logprobs is not None
                    seq.logprobs.append(
                        (
                            float(result.logprobs[i, 0]),
                            int(result.ranks[i, 0]),
                            result.top_ids[i, 0].tolist(),
                            result.top_logprobs[i, 0].tolist(),
                        )
                    )
            if result.prompt_logprobs and i in result.prompt_logprobs:
                seq.prompt_logprobs += result.prompt_logprobs[i][0].tolist()

    def generate(self, seqs: list[Sequence], num_tokens: int, chunk: int = 10**9) -> list[list[int]]:
        """Prefill in chunks, one sequence after another among the decodes of those before, then decode together."""
        running: list[Sequence] = []
        for seq in seqs:
            while not seq.output:
                decoding = [r for r in running if len(r.output) < num_tokens]
                room = self.runner.buckets.max_tokens - len(decoding)
                count = min(chunk, room, len(seq.tokens) - seq.computed)
                self.step([*((r, None) for r in decoding), (seq, count)])
            running.append(seq)
        while active := [seq for seq in running if len(seq.output) < num_tokens]:
            self.step([(seq, None) for seq in active])
        return [seq.output for seq in seqs]
