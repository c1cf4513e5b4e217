"""What Ray's controller is told about a replica. Skipped by name without the extra `ray`."""

import asyncio
from types import SimpleNamespace

import pytest

from jaxserve.client.supervisor import EngineStatus, Phase
from jaxserve.errors import EngineDeadError

pytest.importorskip("ray", reason="needs the extra ray", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # ray's imports give some


def check(phase: Phase) -> None:
    from jaxserve.ray.deployments import EngineReplica  # noqa: PLC0415  # imports ray

    replica = object.__new__(EngineReplica)
    engine = SimpleNamespace(status=EngineStatus(phase), alive=False)  # silent
    vars(replica).update(_engine=engine, _group=None)
    asyncio.run(replica.check_health())


@pytest.mark.parametrize("phase", ["ready", "restarting", "draining"])
def test_a_replica_is_kept_whose_engine_will_be_replaced(phase: Phase) -> None:
    """Ray would end it before the watchdog's 60 s, and with it the streams that the next engine would finish."""
    check(phase)


def test_a_replica_whose_engine_is_dead_for_good_ends() -> None:
    with pytest.raises(EngineDeadError, match="the engine is dead"):
        check("dead")
