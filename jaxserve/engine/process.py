"""The engine process: `python -m jaxserve.engine.process DIR`, started only by `EngineChild`."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxserve.config import Config
from jaxserve.engine.child import main
from jaxserve.ops.kernel_library import compile_ahead
from jaxserve.system import platform_of
from jaxserve.types.messages import FromEngine

if TYPE_CHECKING:
    from jaxserve.engine.server import BuiltEngine


def build(config: Config, send: Callable[[FromEngine], None]) -> BuiltEngine:
    """Return factory.build_process's engine. If C kernels will serve, they are compiled during the imports."""
    if platform_of(config) == "cpu" and config.runtime.attention in ("auto", "native"):
        threading.Thread(target=compile_ahead, name="kernels", daemon=True).start()
    gc.disable()  # it would walk the modules again and again, for 0.5 s of a core, and find nothing
    try:
        factory = importlib.import_module("jaxserve.engine.factory")
    finally:
        gc.freeze()
        gc.enable()
    return factory.build_process(config, send)


if __name__ == "__main__":
    main(build)
