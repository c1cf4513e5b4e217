"""An engine process with the device of tests/fakes.py: `python -m tests.faults.fake_engine DIR`. Starts in a second.

A request whose prompt begins with one of the marks below does harm when its output PROMPT[1] is computed, and in
every step that computes a later one: it kills the process, or never comes back.
"""

import dataclasses
import os
import signal
import time
from concurrent.futures import Future
from importlib import import_module

import msgspec

from jaxserve.config import Config
from jaxserve.engine.child import Send, main
from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.engine.server import BuiltEngine
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import Located
from jaxserve.types.sampling import GrammarSpec
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import ScheduledRow, SchedulerOutput
from tests.api.fakes import DEMO, demo_info
from tests.fakes import FakeRunner, FakeStep, small_config

SEGFAULT, EXIT, OUT_OF_MEMORY, HANG = MARKS = (96, 95, 94, 93)
CONFIG = small_config(num_pages=2048, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=512)


class HarmfulRunner(FakeRunner):
    """Steps take 2 ms, so that there is a middle of a stream."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._prompts: dict[int, list[int]] = {}  # by slot

    def execute(self, output: SchedulerOutput) -> FakeStep:
        time.sleep(0.002)
        for init in output.slot_inits:
            self._prompts[init.slot] = init.token_ids[: init.num_prompt_tokens]
        for row in output.rows:
            self._harm(row)
        return super().execute(output)

    def _harm(self, row: ScheduledRow) -> None:
        prompt = self._prompts[row.slot]
        if prompt[0] in MARKS and row.start + row.num_tokens - len(prompt) + 1 >= prompt[1]:
            harm(prompt[0])


def harm(mark: int) -> None:
    if mark == HANG:
        time.sleep(3600)
    if mark == EXIT:
        os._exit(3)
    os.kill(os.getpid(), signal.SIGSEGV if mark == SEGFAULT else signal.SIGKILL)


def no_grammar(spec: GrammarSpec) -> Future[None]:
    raise NotImplementedError


def free_pages() -> int:
    """For how many pages there is memory: after the first start that leaves a mark, for a few."""
    mark = os.environ.get("FAKE_ENGINE_MARK")
    if mark is None or not os.path.exists(mark):
        if mark is not None:
            open(mark, "xb").close()
        return CONFIG.num_pages
    return 8


def build(config: Config, send: Send) -> BuiltEngine:
    send(Located(str(DEMO)))
    found = free_pages()
    pages = found if config.cache.num_pages == "auto" else config.cache.num_pages
    scheduler = dataclasses.replace(CONFIG, num_pages=pages, page_events=config.mesh.replicas > 1)
    info = demo_info(Tokenizer.from_directory(DEMO))
    info = msgspec.structs.replace(
        info, max_num_seqs=scheduler.max_num_seqs, num_pages=pages, page_size=scheduler.page_size
    )
    runner = HarmfulRunner(scheduler)
    core = EngineCore(runner, scheduler, CoreOptions(vocab_size=info.vocab_size))
    # imports jax, which takes a second of a start
    pages = import_module("tests.faults.fake_pages") if config.mesh.prefill_replicas else None
    return BuiltEngine(core, info, no_grammar, handover=pages and pages.handover(core, runner))


if __name__ == "__main__":
    main(build)
