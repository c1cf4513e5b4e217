"""SIGKILL of the process that runs batches, at random moments and at every border between two disk operations.

The batch runner, the store and the disk are real; the model is a function, so that what each line must say is known.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from jaxserve.store import BatchRecord, BatchStatus, Disk, Store
from tests.faults.batch_server import LINES, PLACES, expected_body, serve

SMALL = 30  # lines of the batch whose every border is tried
MODULE = "tests.faults.batch_server"
ROOT = Path(__file__).parent.parent.parent


@dataclass
class Lives:
    """One store directory and the processes that served it, one after another."""

    path: Path
    count: int
    kills: int = 0

    def live(self, kill_at: int = -1, seconds: float | None = None) -> bool:
        """One life: until the batch has ended (True), or killed at a border or after some seconds of running."""
        command = [sys.executable, "-m", MODULE, str(self.path), str(kill_at), str(self.count)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            if seconds is not None:
                process.stdout.readline()
                time.sleep(seconds)
                process.kill()
            code = process.wait()
        assert code in (0, -signal.SIGKILL), f"the server ended with {code}"
        self.kills += code != 0
        return code == 0

    def finish(self) -> BatchRecord:
        """A last life with no kill, in this process; then everything that must be true is checked."""
        asyncio.run(serve(self.path, Disk(), self.count))
        return asyncio.run(self._check())

    async def _check(self) -> BatchRecord:
        store = Store(self.path / "store")
        batches = (await store.list_batches(limit=9)).items
        assert len(batches) == 1
        batch = batches[0]
        failed = self.count // 10
        assert (batch.status, batch.total) == (BatchStatus.COMPLETED, self.count)
        assert (batch.completed, batch.failed) == (self.count - failed, failed)
        wanted = [number for number in range(1, self.count + 1) if number % 10]
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (sum(wanted), 3 * len(wanted))
        assert await answers(store, batch.output_file_id) == {f"c{i}": expected_body(i) for i in wanted}
        errors = {f"c{i}": expected_body(i) for i in range(10, self.count + 1, 10)}
        assert await answers(store, batch.error_file_id) == errors
        listed = {file.id for file in (await store.list_files(limit=99, purpose="batch_output")).items}
        assert listed == {batch.output_file_id, batch.error_file_id}
        stamps = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert None not in stamps and list(stamps) == sorted(stamps)  # type: ignore[type-var]
        await store.sweep()
        await store.close()
        self._check_calls()
        assert leftovers(self.path / "store") == listed | {batch.input_file_id}
        return batch

    def _check_calls(self) -> None:
        calls = Counter(int(number) for number in (self.path / "calls.log").read_text().split())
        assert set(calls) == set(range(1, self.count + 1))
        assert calls.total() - self.count <= self.kills * PLACES, "lines were computed again beyond those in flight"


async def answers(store: Store, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    _, file = await store.open_file(file_id)
    with file:
        data = file.read()
    assert data.endswith(b"\n")
    lines = [orjson.loads(line) for line in data.splitlines()]
    found = {line["custom_id"]: line["response"]["body"] for line in lines}
    assert len(found) == len(lines), "a custom_id stands twice in the file"
    return found


def leftovers(store: Path) -> set[str]:
    """Names under files/, after checking that the database is sound and every row has its bytes."""
    connection = sqlite3.connect(store / "store.db")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert connection.execute("SELECT count(*) FROM results").fetchone()[0] == 0
        rows = {row[0] for row in connection.execute("SELECT id FROM files WHERE deleted_at IS NULL")}
    finally:
        connection.close()
    assert list((store / "tmp").iterdir()) == []
    names = {path.name for path in (store / "files").iterdir()}
    assert names == rows
    orphans = {name for name in names if (store / "files" / name).stat().st_size == 0}
    assert not orphans
    return names


def kill_at_borders(tmp_path: Path, step: int) -> int:
    """A fresh batch for every `step`-th border, killed there, then finished. Returns the first border not reached."""
    for border in range(0, 10_000, step):
        lives = Lives(tmp_path / str(border), SMALL)
        lives.path.mkdir()
        ended = lives.live(kill_at=border)
        lives.finish()
        if ended:
            return border
    raise AssertionError("a life has more than 10,000 borders")


def kill_again_and_again(tmp_path: Path, kills: int, seed: int) -> int:
    """Batches of 1,000 lines, killed at random borders and moments until `kills` have been; then finished."""
    rng = random.Random(seed)
    done = 0
    while done < kills:
        lives = Lives(tmp_path / str(done), LINES)
        lives.path.mkdir()
        ended = False
        while not ended and done + lives.kills < kills:
            border, seconds = rng.randrange(2, 24), rng.uniform(0, 0.05)
            ended = lives.live(kill_at=border) if rng.random() < 0.5 else lives.live(seconds=seconds)
        lives.finish()
        done += lives.kills
    return done


def test_a_life_with_no_kill(tmp_path: Path) -> None:
    lives = Lives(tmp_path, SMALL)
    assert lives.live()
    lives.finish()


def test_kills_between_disk_operations(tmp_path: Path) -> None:
    assert kill_at_borders(tmp_path, step=11) > 40


def test_kills_again_and_again(tmp_path: Path) -> None:
    assert kill_again_and_again(tmp_path, kills=8, seed=0) == 8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_between_all_disk_operations(tmp_path: Path) -> None:
    assert kill_at_borders(tmp_path, step=1) > 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_100_kills(tmp_path: Path, seed: int) -> None:
    assert kill_again_and_again(tmp_path, kills=100, seed=seed) == 100
