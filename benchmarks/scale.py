"""Measure what grows with a service, without a device: the index of the router, the prefix tree, the queue, the store.

    python -m benchmarks.scale --directory DIR                              # all, at the sizes of BENCHMARKS.md
    python -m benchmarks.scale index --pages 1000000 --replicas 64          # one of index, tree, queue, store

    index   pages of all replicas in the index of the router: events, choices, the death of a replica
    tree    pages of one engine in its prefix cache: commits, matches, evictions
    queue   requests that wait in one engine's scheduler: steps while they wait
    store   lines of batches in the store: checked, claimed, finished, listed, and read again after a crash

Times are CPU seconds of this process, memory is what its resident size grew by.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import random
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.scheduler import fake_tokens
from jaxserve.kv.kv_manager import KVManager
from jaxserve.routing.router import ReplicaLoad, Router
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.store import LineResult, Store
from jaxserve.store.jsonl import read_lines
from jaxserve.store.records import BatchStatus, NewBatch
from jaxserve.store.validation import MAX_LINES, Validator
from jaxserve.types.page_keys import KEY_BYTES, PageEvents, page_keys
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import Request

PAGE_SIZE = 16  # tokens
PROMPT = 4096  # tokens of the prompts that are matched
EVENT_PAGES = 64  # in a message of an engine
GROUP = 64  # lines of batches that are saved together
REPEATS = 50


def timed(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process for `work`."""
    began = time.process_time()
    work()
    return time.process_time() - began


def show(name: str, value: str) -> None:
    print(f"{name:44} {value}", flush=True)


def memory() -> int:
    """Return the resident bytes of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss


def each(seconds: float, count: int, unit: str) -> str:
    return f"{1e6 * seconds / count:.2f} us {unit}, {count / seconds:,.0f} in a second"


# --- index


def measure_index(options: argparse.Namespace) -> None:
    """The router of a server with --replicas engines, which have --pages pages together."""
    router, count = Router(PAGE_SIZE), options.replicas
    before = memory()
    added = sum(
        timed(lambda replica=replica, events=events: router.update(replica, events))
        for replica, events in zip(itertools.cycle(range(count)), _events(options.pages), strict=False)
    )
    show(f"index: {options.pages} pages of {count} replicas", f"{(memory() - before) / options.pages:.0f} bytes a page")
    show("index: page added", each(added, options.pages, "a page"))
    rng = random.Random(1)
    prompts = [array("i", rng.choices(range(100_000), k=PROMPT)).tobytes() for _ in range(REPEATS)]
    loads = [ReplicaLoad(replica, rng.randrange(8)) for replica in range(count)]
    show("choose: of which no page is cached", each(_choices(router, loads, prompts), REPEATS, "a choice"))
    for prompt in prompts:
        keys = b"".join(page_keys("", prompt, PAGE_SIZE))
        for replica in range(count):
            router.update(replica, PageEvents(keys[: (1 + replica * 255 // count) * KEY_BYTES]))
    label = f"choose: of which each replica has a part of {PROMPT} tokens"
    show(label, each(_choices(router, loads, prompts), REPEATS, "a choice"))
    keys_only = timed(lambda: [list(page_keys("", prompt, PAGE_SIZE)) for prompt in prompts])
    show("choose: of this the keys of the pages", each(keys_only, REPEATS, "a prompt"))
    show("index: a replica dies", f"{1e3 * timed(lambda: router.forget(0)):.0f} ms in which nothing else happens")


def _events(num_pages: int) -> Iterator[PageEvents]:
    for begin in range(0, num_pages, EVENT_PAGES):
        yield PageEvents(os.urandom(min(EVENT_PAGES, num_pages - begin) * KEY_BYTES))


def _choices(router: Router, loads: Sequence[ReplicaLoad], prompts: Sequence[bytes]) -> float:
    return timed(lambda: [router.choose(loads, prompt) for prompt in prompts])


# --- tree


def measure_tree(options: argparse.Namespace) -> None:
    """The prefix cache of an engine that has --tree-pages pages, full of prompts of which no two are alike."""
    num_pages = options.tree_pages
    before = memory()
    kv = KVManager(
        SchedulerConfig(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=PROMPT,
            max_model_len=2 * PROMPT,
            page_events=True,
        )
    )
    show(f"pool: {num_pages} pages", f"{(memory() - before) / num_pages:.0f} bytes a page")
    prompts = num_pages * PAGE_SIZE // PROMPT
    rng = random.Random(2)
    before = memory()
    seconds = sum(_compute(kv, rng) for _ in range(prompts))
    pages = prompts * PROMPT // PAGE_SIZE
    show("tree: memory", f"{(memory() - before) / pages:.0f} bytes a page")
    show("tree: a prompt's page, taken and committed", each(seconds, pages, "a page"))
    seconds = sum(_compute(kv, rng) for _ in range(REPEATS))
    show("tree: the same, with an eviction each", each(seconds, REPEATS * PROMPT // PAGE_SIZE, "a page"))
    gc.collect()
    began = time.perf_counter()
    gc.collect()
    show("tree: a collection of garbage", f"{1e3 * (time.perf_counter() - began):.0f} ms")


def _compute(kv: KVManager, rng: random.Random) -> float:
    """Take and commit a new prompt, and return the seconds."""
    request = Request("", rng.choices(range(100_000), k=PROMPT), SamplingParams(), 0.0, seed=0, max_tokens=1)

    def life() -> None:
        kv.take(request, kv.match(request))
        kv.commit(request, PROMPT)
        kv.release(request, last_step_read=0)
        if kv.page_log is not None:
            kv.page_log.take()

    return timed(life)


# --- queue


def measure_queue(options: argparse.Namespace) -> None:
    """Steps of 256 rows while --waiting requests wait."""
    rows, length = 256, 64
    config = SchedulerConfig(
        num_pages=rows * 32,
        page_size=PAGE_SIZE,
        max_num_seqs=rows,
        max_num_batched_tokens=2 * rows,
        max_model_len=512,
    )
    scheduler = Scheduler(config, (0,))
    added = timed(lambda: [scheduler.add(_waiting(number, length)) for number in range(rows + options.waiting)])
    show(f"queue: {options.waiting} requests wait", each(added, rows + options.waiting, "to add one"))
    steps = []
    for _ in range(100 + rows):
        steps.append(timed(lambda: _step(scheduler)))
    show("queue: a step", f"{1e6 * sorted(steps[-100:])[50]:.0f} us in the middle of 100")
    show("queue: statistics", f"{1e3 * timed(scheduler.stats):.1f} ms")
    gone = [f"r{number}" for number in range(rows + options.waiting - 1000, rows + options.waiting)]
    show("queue: an abort", each(timed(lambda: [scheduler.abort(name) for name in gone]), len(gone), "a request"))


def _waiting(number: int, length: int) -> Request:
    prompt = [number % 50_000 + 1] * length
    return Request(f"r{number}", prompt, SamplingParams(max_tokens=400), 0.0, seed=0, max_tokens=400)


def _step(scheduler: Scheduler) -> None:
    output = scheduler.schedule(0.0)
    assert output is not None
    scheduler.update(output, fake_tokens(output), 0.0)


# --- store


def measure_store(options: argparse.Namespace) -> None:
    """--lines lines, in batches of as many as a file may have."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        asyncio.run(_store(Path(directory), options.lines))


async def _store(directory: Path, num_lines: int) -> None:
    store = Store(directory / "store")
    batches = [await _upload(store, begin) for begin in _parts(num_lines)]
    count = len(batches)
    path = store.input_path(await store.get_batch(batches[0][0]))
    first = batches[0][1]
    checked = timed(lambda: Validator("/v1/chat/completions", lambda _: True, 2**20).run(path))
    show(f"store: {num_lines} lines in {count} batches", each(checked, first, "to check a line"))
    show("store: claim (read from the file)", each(timed(lambda: list(read_lines(path, 2**20))), first, "a line"))
    began, wall = time.process_time(), time.perf_counter()
    for batch, lines in batches:
        await store.start_batch(batch, lines, "m")
        for numbers in _groups(lines):
            await store.add_results(batch, [LineResult(number, True, b"x" * 400) for number in numbers])
    show("store: a line's result is durable", each(time.process_time() - began, num_lines, f"in groups of {GROUP}"))
    show("store: the same with the disk, by the clock", each(time.perf_counter() - wall, num_lines, "a line"))
    show("store: size", f"{sum(f.stat().st_size for f in (directory / 'store').glob('store.db*')) / 2**20:.0f} MiB")
    await _after(store, batches)
    await store.close()


async def _after(store: Store, batches: Sequence[tuple[str, int]]) -> None:
    """What a server does with full batches: list them, go on after a crash, publish, sweep."""
    began = time.process_time()
    for _ in range(REPEATS):
        await store.list_batches(limit=20)
    show("store: a page of the list of batches", f"{1e3 * (time.process_time() - began) / REPEATS:.2f} ms")
    for label, work in (("the lines that are done, after a crash", _resume), ("output written", _publish)):
        began = time.process_time()
        for batch, _ in batches:
            await work(store, batch)
        seconds = time.process_time() - began
        show(f"store: {label}", each(seconds, sum(lines for _, lines in batches), "a line"))
    began = time.process_time()
    await store.sweep()
    show("store: published results removed", f"{time.process_time() - began:.1f} s")


async def _resume(store: Store, batch: str) -> None:
    await store.finished_lines(batch)


async def _publish(store: Store, batch: str) -> None:
    await store.move_batch(batch, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    record = await store.get_batch(batch)
    await store.publish_batch(record, BatchStatus.COMPLETED, max_line_bytes=2**20, missing_line=None)


def _parts(num_lines: int) -> Iterator[int]:
    for begin in range(0, num_lines, MAX_LINES):
        yield min(MAX_LINES, num_lines - begin)


def _groups(lines: int) -> Iterator[range]:
    for begin in range(1, lines + 1, GROUP):
        yield range(begin, min(begin + GROUP, lines + 1))


async def _upload(store: Store, lines: int) -> tuple[str, int]:
    upload = store.begin_upload()
    body = '{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % ("word " * 40)
    for numbers in _groups(lines):
        text = "".join(
            f'{{"custom_id": "c{number}", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}\n'
            for number in numbers
        )
        await upload.write(text.encode())
    file = await upload.finish(filename="in.jsonl", purpose="batch", expires_seconds=None)
    new = NewBatch("/v1/chat/completions", file.id, "24h", 24 * 3600)
    _, record = await store.create_batch(new, idempotency=None, reply=lambda record: record.id.encode())
    assert record is not None
    return record.id, lines


SECTIONS = {"index": measure_index, "tree": measure_tree, "queue": measure_queue, "store": measure_store}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the sections and print a line for each number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="index, tree, queue, store")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=10_000_000, help="of all replicas")
    parser.add_argument("--tree-pages", type=int, default=1_000_000, help="of one engine")
    parser.add_argument("--waiting", type=int, default=100_000, help="requests in one engine's queue")
    parser.add_argument("--lines", type=int, default=1_000_000, help="of batches")
    parser.add_argument("--directory", type=Path, help="where the store is made and removed")
    options = parser.parse_args(argv)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in options.sections or SECTIONS:
        SECTIONS[name](options)


if __name__ == "__main__":
    main()
