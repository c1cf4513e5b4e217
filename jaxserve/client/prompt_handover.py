"""Hands requests over from the prefill engine that computed their prompt to a decode engine, with the prompt's pages.

    prefill engine  --write_pages-->  file in a private directory  --read_pages, some at a time-->  decode engine

No engine has the requests meanwhile. So an abort is answered here, and when either engine dies, only pages are lost:
another decode engine reads the file. The requests are sent whatever goes wrong, and the engine that gets them computes
the pages that it lacks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.client.replicas import Replica
from jaxserve.client.sequences import NOWHERE, LiveSequence, SequenceTable
from jaxserve.errors import HTTPError
from jaxserve.transport.socket_directory import PageDirectory, remove_file
from jaxserve.types.calls import ReadPages, WritePages
from jaxserve.types.sampling import EngineRequest, Prefilled
from jaxserve.types.step import TokenOutput

MAX_FILES = 4  # at a time, because each may hold gigabytes
# Pages that a decode engine reads between two of its steps: the larger size of its page programs
# (runtime/host_pages.py). One call for all pages would hold up its streams until the whole prompt is copied.
PAGES_AT_ONCE = 64

logger = logging.getLogger(__name__)

Choose = Callable[[EngineRequest], Replica]
Send = Callable[[Sequence[LiveSequence], Replica], None]


@dataclass
class _Computed:
    """The choices of one message whose prompt is computed, and the engine that computed it last."""

    source: Replica
    sequences: list[LiveSequence] = field(default_factory=list)


class PromptHandover:
    """Hands over requests whose prompts are computed.

    choose: returns the replica that goes on with a request. send: sends its sequences there
    """

    def __init__(self, live: SequenceTable, choose: Choose, send: Send) -> None:
        self._live = live
        self._choose = choose
        self._send = send
        self._directory: PageDirectory | None = None
        self._files = asyncio.Semaphore(MAX_FILES)
        # by LiveSequence.message_key, until the prompts of all choices of the message are computed
        self._computed: dict[tuple[str, int], _Computed] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Make the directory of the page files. Raises ConfigError if it cannot be made."""
        self._directory = PageDirectory()

    async def stop(self) -> None:
        """End the handovers under way, and remove the directory."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    def receive(self, sequence: LiveSequence, output: TokenOutput, source: Replica) -> None:
        """Take a sequence from the replica that has computed its prompt. output: the last output there"""
        sequence.prefilled = Prefilled(output.num_cached_tokens, output.queue_seconds)
        sequence.is_sent = sequence.prefill_only = False
        self._live.assign(sequence, NOWHERE)
        computed = self._computed.setdefault(sequence.message_key, _Computed(source))
        computed.source = source
        computed.sequences.append(sequence)
        self.advance()

    def advance(self) -> None:
        """Go on with the messages of which every choice has been computed or has ended."""
        for key, computed in [*self._computed.items()]:
            client_id = computed.sequences[0].request.client_id
            if not any(each.prefill_only and each.message_key == key for each in self._live.of_client(client_id)):
                del self._computed[key]
                task = asyncio.create_task(self._hand_over(computed.sequences, computed.source))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, sequences: Sequence[LiveSequence], source: Replica) -> None:
        try:
            async with self._files:
                await self._pass_pages(sequences, source)
        except Exception:  # a mistake here must not leave a request without an engine
            logger.exception("pages were not handed over")
            self._send_living(sequences)

    async def _pass_pages(self, sequences: Sequence[LiveSequence], source: Replica) -> None:
        assert self._directory is not None
        path, began = self._directory.new_file(), time.monotonic()
        try:
            written = await self._write(sequences[0], source, path) if self._living(sequences) else 0
            while living := self._living(sequences):
                target = self._choose(living[0].request)
                if written and target.is_usable:
                    target.num_coming += len(living)
                    try:
                        read = await self._read(sequences, target, path, written)
                    finally:
                        target.num_coming -= len(living)
                    if not target.is_usable:
                        continue  # it died meanwhile
                    seconds = time.monotonic() - began
                    logger.debug("%d of %d tokens passed to engine %d in %.3f s", read, written, target.index, seconds)
                self._send_living(sequences, target)
                return
        finally:
            remove_file(path)

    async def _write(self, sequence: LiveSequence, source: Replica, path: Path) -> int:
        """Write pages in the prefill engine. Return the number of tokens whose pages it has written."""
        request = sequence.request
        call = WritePages(str(path), request.prompt_token_ids, request.namespace)
        try:
            return await source.calls.call(call)
        except HTTPError as error:
            logger.warning("engine %d wrote no pages: %s", source.index, error)
            return 0

    async def _read(self, sequences: Sequence[LiveSequence], target: Replica, path: Path, written: int) -> int:
        """Read pages in the decode engine. Return the number of tokens whose pages it has."""
        read, before = 0, -1
        try:
            while before < read < written and self._living(sequences):
                before = read
                read = await target.calls.call(ReadPages(str(path), PAGES_AT_ONCE))
        except HTTPError as error:
            logger.warning("engine %d read no pages: %s", target.index, error)
        return read

    def _living(self, sequences: Sequence[LiveSequence]) -> list[LiveSequence]:
        return [each for each in sequences if self._live.get(each.engine_id) is each]

    def _send_living(self, sequences: Sequence[LiveSequence], target: Replica | None = None) -> None:
        if living := self._living(sequences):
            self._send(living, target or self._choose(living[0].request))
