"""Ray Serve adds a replica while requests wait, and takes it away later. Skipped without the extra `ray`."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.ray.serve_run import serve_run
from tests.ray.test_serve import load, outcome

pytest.importorskip("ray", reason="needs the extra ray", exc_type=ImportError)
pytestmark = pytest.mark.xdist_group("ray")

PORT = 19731 + os.getpid() % 1000
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 4,
    "look_back_period_s": 12,
    "upscale_delay_s": 1,
    "downscale_delay_s": 5,
}


def test_one_two_one() -> None:
    with serve_run(PORT, autoscaling_config=SCALING) as run:
        outcomes: list[str] = []

        async def loaded() -> None:
            while len(outcomes) < 4000:
                outcomes.extend(outcome(each) for each in await load(run, stream=True))

        async def scale() -> None:
            await run.replicas_are(1, 60)
            busy = asyncio.create_task(loaded())
            up = await run.replicas_are(2, 240)
            busy.cancel()
            down = await run.replicas_are(1, 240)
            print(f"from one to two in {up:.0f} s, back in {down:.0f} s, {len(outcomes)} streams whole")

        asyncio.run(scale())
        assert set(outcomes) <= {"whole"}
