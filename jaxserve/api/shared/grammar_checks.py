"""The grammar compiler that one server's requests share."""

from __future__ import annotations

import asyncio

from jaxserve.api.shared.engine_protocol import EngineProtocol
from jaxserve.grammar.compile import GrammarCompiler
from jaxserve.types.sampling import GrammarSpec


class GrammarChecks:
    """The grammar compiler of one server: made by `start`, or when the first constrained request comes."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self._making = asyncio.Lock()

    async def start(self, engine: EngineProtocol) -> None:
        """Start the compiler's process, so that no request waits for it. The engine must be ready."""
        await (await self._made(engine)).start()

    async def check(self, spec: GrammarSpec, param: str, engine: EngineProtocol) -> GrammarSpec:
        """The spec as the engine gets it. Raises InvalidSchemaError naming `param` for what cannot be enforced."""
        return await (await self._made(engine)).check(spec, param=param)

    async def _made(self, engine: EngineProtocol) -> GrammarCompiler:
        async with self._making:
            if self._compiler is None:
                text = await asyncio.to_thread(engine.tokenizer.to_json)  # megabytes
                ids = tuple(engine.info.eos_token_ids)
                self._compiler = GrammarCompiler(text, vocab_size=engine.info.vocab_size, eos_token_ids=ids)
            return self._compiler

    async def stop(self) -> None:
        if self._compiler is not None:
            await self._compiler.stop()
