"""An engine process whose device fails where a request's name says so: `python -m tests.faults.engine DIR`."""

from jaxserve.config import Config
from jaxserve.engine.factory import Send, build_engine
from jaxserve.engine.process import main
from jaxserve.engine.server import BuiltEngine
from tests.faults.faulty_runner import FaultsByName, FaultyRunner


def build(config: Config, send: Send) -> BuiltEngine:
    built = build_engine(config, send)
    built.core.runner = FaultyRunner(built.core.runner, FaultsByName())
    return built


if __name__ == "__main__":
    main(build)
