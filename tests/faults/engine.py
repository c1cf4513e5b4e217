"""An engine process whose device fails where a request's name says so: `python -m tests.faults.engine DIR`.

The variable HAPPENED of its environment names the directory where the faults are remembered.
"""

import os
from pathlib import Path

from jaxserve.config import Config
from jaxserve.engine.child import main
from jaxserve.engine.factory import Send, build_engine
from jaxserve.engine.server import BuiltEngine
from tests.faults.faulty_runner import FaultsByName, FaultyRunner

HAPPENED = "FAULTS_THAT_HAPPENED"


def build(config: Config, send: Send) -> BuiltEngine:
    built = build_engine(config, send)
    scheduler = built.core.scheduler

    def client_id(request_id: str) -> str:
        request = scheduler.find(request_id)
        return "" if request is None else request.client_id

    built.core.runner = FaultyRunner(built.core.runner, FaultsByName(client_id, Path(os.environ[HAPPENED])))
    return built


if __name__ == "__main__":
    main(build)
