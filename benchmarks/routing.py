"""Simulate chats over several engines: what share of the prompts each way of choosing an engine finds in the caches.

    python -m benchmarks.routing                                # arrivals and lengths of answers at random
    python -m benchmarks.routing --trace conversations.csv      # those of a trace

The page pools, prefix caches, page events and the router are the real ones; only the devices are simulated. A trace has
the columns TIMESTAMP, ContextTokens and GeneratedTokens. Each arrival is the next turn of one of --chats chats. A chat
begins with one of --systems system prompts, and begins anew when it is too long. A turn waits for the answer before it.
An engine computes one prompt at a time, and any number of answers beside it.

    one engine      with all pages and the speed of all engines together
    router          the rule of a server with mesh.replicas
    sessions        each chat has an engine
    round robin     one engine after the other
    least loaded    the engine with the fewest requests
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.bench.load import trace_rows
from jaxserve.kv.kv_manager import KVManager
from jaxserve.routing.router import ReplicaLoad, Router
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import Request

PAGE_SIZE = 16  # tokens
SLOTS = 256  # of each engine
PROMPT_RATE = 40_000  # prompt tokens that all engines together compute in a second
TOKEN_SECONDS = 0.02  # of an answer
MAX_ANSWER = 1024  # tokens
POLICIES = ("router", "sessions", "round robin", "least loaded")


@dataclass(frozen=True)
class Turn:
    """A turn of a chat. at: seconds from the start; later if the turn before it is not answered yet"""

    chat: int
    at: float
    prompt: list[int]  # with all turns before it
    answer: list[int]


def make_turns(options: argparse.Namespace) -> list[Turn]:
    """Return the turns in the order of their arrival. They are the same for each policy."""
    rng = random.Random(options.seed)
    systems = [_tokens(rng, rng.randint(400, 1600)) for _ in range(options.systems)]
    weights = [(rank + 1) ** -options.skew for rank in range(options.systems)]
    history: dict[int, list[int]] = {}
    turns = []
    for at, answer_length in itertools.islice(_arrivals(options, rng), options.turns):
        chat = rng.randrange(options.chats)
        before = history.get(chat)
        if before is None or len(before) > options.longest:
            before = rng.choices(systems, weights)[0]
        prompt = before + _tokens(rng, rng.randint(16, 256))
        answer = _tokens(rng, max(1, min(answer_length, MAX_ANSWER)))
        history[chat] = prompt + answer
        turns.append(Turn(chat, at, prompt, answer))
    return turns


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]


def _arrivals(options: argparse.Namespace, rng: random.Random) -> Iterator[tuple[float, int]]:
    if options.trace is not None:
        yield from ((at, output) for at, _, output in trace_rows(options.trace))
        return
    for count in itertools.count():
        yield count / options.rate + rng.random(), int(rng.lognormvariate(5.0, 0.8))


@dataclass(slots=True, eq=False)
class Live:
    """A turn in an engine."""

    turn: Turn
    request: Request
    arrived: float


class SimulatedEngine:
    """The KV pages of an engine, and the time that its prompts take. prompt_rate: tokens in a second"""

    def __init__(self, num_pages: int, prompt_rate: float) -> None:
        config = SchedulerConfig(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=SLOTS + PAGE_SIZE,
            max_model_len=num_pages * PAGE_SIZE,
            page_events=True,
        )
        self.kv = KVManager(config)
        self.waiting: deque[Live] = deque()
        self.num_live = 0
        self.computed = 0  # prompt tokens
        self._prompt_rate = prompt_rate
        self._free_at = 0.0

    def admit(self, now: float) -> list[tuple[float, Live]]:
        """Start the turns for which there is room. Returns them with the times at which their prompts are done."""
        started = []
        while self.waiting and self._takes(self.waiting[0].request):
            live = self.waiting.popleft()
            tokens = live.request.num_tokens - live.request.cache_node.depth * PAGE_SIZE
            self.computed += tokens
            self._free_at = max(self._free_at, now) + tokens / self._prompt_rate
            started.append((self._free_at, live))
        return started

    def _takes(self, request: Request) -> bool:
        kv = self.kv
        node = kv.match(request)
        growth = kv.num_pages_for(request.num_tokens + request.max_tokens) - kv.num_pages_for(request.num_tokens)
        if not kv.num_free_slots or kv.num_new_pages(request, node)[0] + growth > kv.num_available:
            return False
        kv.take(request, node)
        kv.grow(request, growth)
        return True


@dataclass(frozen=True)
class Result:
    """prompts: tokens of all turns. computed: those that each engine computed"""

    prompts: int
    computed: list[int]
    delays: list[float]  # simulated seconds from the arrival of a turn to the end of its prompt

    @property
    def hits(self) -> float:
        return 1 - sum(self.computed) / self.prompts

    @property
    def busiest(self) -> float:
        """What the busiest engine computed, over the mean."""
        return max(self.computed) * len(self.computed) / max(1, sum(self.computed))


class Simulation:
    """Turns over `count` engines, which share `num_pages` pages."""

    def __init__(self, turns: Sequence[Turn], policy: str, count: int, num_pages: int) -> None:
        self._engines = [SimulatedEngine(num_pages // count, PROMPT_RATE / count) for _ in range(count)]
        self._router = Router(PAGE_SIZE)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._turns: dict[int, deque[Turn]] = {}
        self._result = Result(sum(len(turn.prompt) for turn in turns), [], [])
        for turn in turns:
            self._turns.setdefault(turn.chat, deque()).append(turn)
        cycle = itertools.cycle(range(count))
        choices: dict[str, Callable[[Turn], int]] = {
            "one engine": lambda turn: 0,
            "router": lambda turn: self._router.choose(self._loads(), array("i", turn.prompt).tobytes()),
            "sessions": lambda turn: turn.chat % count,
            "round robin": lambda turn: next(cycle),
            "least loaded": lambda turn: min(self._loads(), key=lambda load: load.order).replica,
        }
        self._choose = choices[policy]

    def run(self) -> Result:
        """Run until all turns are answered."""
        for chat in self._turns:
            self._expect(chat, 0.0)
        while self._events:
            now, _, happens = heapq.heappop(self._events)
            happens(now)
        assert not any(engine.num_live for engine in self._engines), "a turn was not answered"
        self._result.computed.extend(engine.computed for engine in self._engines)
        return self._result

    def _at(self, when: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happens))

    def _expect(self, chat: int, now: float) -> None:
        if turns := self._turns[chat]:
            turn = turns.popleft()
            self._at(max(turn.at, now), lambda when: self._arrive(turn, when))

    def _arrive(self, turn: Turn, now: float) -> None:
        index = self._choose(turn)
        count = len(turn.answer)
        request = Request("", turn.prompt, SamplingParams(max_tokens=count), now, seed=0, max_tokens=count)
        self._engines[index].num_live += 1
        self._engines[index].waiting.append(Live(turn, request, now))
        self._admit(index, now)

    def _admit(self, index: int, now: float) -> None:
        for done, live in self._engines[index].admit(now):
            self._at(done, lambda when, live=live: self._end_prompt(index, live, when))
        self._report(index)

    def _end_prompt(self, index: int, live: Live, now: float) -> None:
        self._result.delays.append(now - live.arrived)
        self._engines[index].kv.commit(live.request, live.request.num_tokens)
        self._report(index)
        seconds = TOKEN_SECONDS * len(live.turn.answer)
        self._at(now + seconds, lambda when: self._end(index, live, when))

    def _end(self, index: int, live: Live, now: float) -> None:
        engine = self._engines[index]
        live.request.output_token_ids = live.turn.answer
        live.request.prompt_done = True
        engine.kv.release(live.request, last_step_read=0)
        engine.num_live -= 1
        self._admit(index, now)
        self._expect(live.turn.chat, now)

    def _report(self, index: int) -> None:
        log = self._engines[index].kv.page_log
        if log is not None and (events := log.take()) is not None:
            self._router.update(index, events)

    def _loads(self) -> list[ReplicaLoad]:
        return [
            ReplicaLoad(index, engine.num_live, 1 - engine.kv.num_available / engine.kv.pool.num_pages)
            for index, engine in enumerate(self._engines)
        ]


def row(policy: str, count: int, result: Result, whole: Result) -> str:
    """Return a line of the table. whole: what one engine came to"""
    cells = (
        policy,
        str(count),
        f"{result.hits:.3f}",
        f"{result.hits / whole.hits:.3f}",
        f"{sum(result.computed) / 1e6:.2f} M",
        f"{result.busiest:.2f}",
        f"{1e3 * statistics.mean(result.delays):.0f} ms",
    )
    return f"| {' | '.join(cells)} |"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="CSV file")
    parser.add_argument("--rate", type=float, default=5.0, help="arrivals in a second without a trace")
    parser.add_argument("--turns", type=int, default=6000)
    parser.add_argument("--chats", type=int, default=160)
    parser.add_argument("--systems", type=int, default=12, help="number of system prompts")
    parser.add_argument("--skew", type=float, default=0.0, help="Zipf exponent of the system prompts")
    parser.add_argument("--longest", type=int, default=6000, help="tokens after which a chat begins anew")
    parser.add_argument("--pool", type=int, nargs="+", default=[524_288], help="tokens of all engines together")
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table for each size of the pool."""
    options = parse(argv)
    turns = make_turns(options)
    print(f"{len(turns)} turns, {sum(len(turn.prompt) for turn in turns) / 1e6:.1f} M prompt tokens")
    for pool in options.pool:
        whole = Simulation(turns, "one engine", 1, pool // PAGE_SIZE).run()
        print(f"\n{pool} tokens of pages\n")
        print("| policy | engines | hits | of one engine's | computed | busiest / mean | mean delay |")
        print(f"|{'---|' * 7}")
        print(row("one engine", 1, whole, whole), flush=True)
        for count, policy in itertools.product(options.engines, options.policies):
            print(row(policy, count, Simulation(turns, policy, count, pool // PAGE_SIZE).run(), whole), flush=True)


if __name__ == "__main__":
    main()
