"""Batches of which the server is started again with a lower limit on the bytes of a request."""

import asyncio
from pathlib import Path

import pytest

from jaxserve.store import BatchStatus
from tests.api.batch.helpers import Bench, ended, input_file, read_lines, submit, until


@pytest.mark.parametrize("target", [BatchStatus.COMPLETED, BatchStatus.CANCELLED])
def test_lines_that_were_accepted_run_or_are_told(tmp_path: Path, target: BatchStatus) -> None:
    """The limit of validation is not asked again: the route of a request has its own."""
    bench = Bench(tmp_path)

    async def main() -> None:
        bench.handler.allowed = 1
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(3, padding="x" * 1000))
            await until(runner, batch_id, lambda batch: batch.completed == 1)
        bench.max_line_bytes = 500
        async with bench.running() as runner:
            if target is BatchStatus.COMPLETED:
                bench.handler.allow()
            else:
                await runner.cancel(batch_id)
            batch = await asyncio.wait_for(ended(runner, batch_id), 30)
            output = await read_lines(runner, batch.output_file_id)
            lines = [*output, *await read_lines(runner, batch.error_file_id)]
            assert batch.status is target and sorted(line["custom_id"] for line in lines) == ["c1", "c2", "c3"]

    asyncio.run(main())
