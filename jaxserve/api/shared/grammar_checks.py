"""The grammar compiler that all requests of one server share."""

from __future__ import annotations

import asyncio

from jaxserve.api.shared.engine_protocol import EngineProtocol
from jaxserve.grammar.compile import GrammarCompiler
from jaxserve.types.sampling import GrammarSpec


class GrammarChecks:
    """The grammar compiler of one server, created by `start` or by the first constrained request."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self._making = asyncio.Lock()

    async def start(self, engine: EngineProtocol) -> None:
        """Start the compiler's process, so that no request waits for it. The engine must be ready."""
        await (await self._made(engine)).start()

    async def check(self, spec: GrammarSpec, param: str, engine: EngineProtocol) -> GrammarSpec:
        """Return the spec with the text that was checked, for the engine. Raises InvalidSchemaError naming `param` if
        it cannot be enforced.
        """
        return await (await self._made(engine)).check(spec, param=param)

    async def _made(self, engine: EngineProtocol) -> GrammarCompiler:
        async with self._making:
            if self._compiler is None:
                size, ids = engine.info.vocab_size, tuple(engine.info.eos_token_ids)
                text = await asyncio.to_thread(engine.tokenizer.to_json, size)  # megabytes
                self._compiler = GrammarCompiler(text, vocab_size=size, eos_token_ids=ids)
            return self._compiler

    async def stop(self) -> None:
        if self._compiler is not None:
            await self._compiler.stop()
