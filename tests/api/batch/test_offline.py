"""A batch file without a server, on an engine whose tokens are known."""

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from jaxserve.cli.batch import OfflineBatch, run_offline, validate
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.store import BatchRecord
from jaxserve.types.sampling import SamplingParams
from tests.api.batch.helpers import input_file, input_line
from tests.api.fakes import FakeLink, fake_engine


@pytest.fixture
def batch(tmp_path: Path) -> OfflineBatch:
    (tmp_path / "in.jsonl").write_bytes(input_file(60))
    return OfflineBatch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "bad.jsonl")


class Run:
    """One call: until it ends, or until `stop_at` lines are there and it is cancelled; it gets no further than 30."""

    def __init__(self, batch: OfflineBatch, stop_at: int | None = None) -> None:
        self.link = FakeLink()
        if stop_at is not None:
            self.link.script = self._hold_after_30
        self.seen: list[BatchRecord] = []
        self.stop_at = stop_at
        self.record = asyncio.run(self._main(batch))

    def _hold_after_30(self, prompt: list[int], params: SamplingParams) -> str:
        if len(self.link.seen) > 30:
            self.link.hold.clear()
        return "fine"

    async def _main(self, batch: OfflineBatch) -> BatchRecord | None:
        engine, _ = fake_engine(Config(), self.link)
        await engine.start()
        endpoint, found = validate(batch, 2**20)
        assert not found.errors
        task = asyncio.create_task(run_offline(batch, endpoint, engine, Config(), self.seen.append))
        try:
            while not task.done():
                if self.stop_at is not None and self.seen and self.seen[-1].completed >= self.stop_at:
                    self.stop_at = None
                    task.cancel()
                await asyncio.wait({task}, timeout=0.01)
            return None if task.cancelled() else task.result()
        finally:
            await engine.stop()


def lines(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


ALL = [f"c{number}" for number in range(1, 61)]


def test_a_file_becomes_a_file(batch: OfflineBatch) -> None:
    run = Run(batch)
    assert run.record and (run.record.completed, run.record.failed) == (60, 0)
    assert lines(batch.output) == ALL
    assert not batch.errors.exists() and not batch.directory.exists()


def test_failed_lines_have_their_own_file(batch: OfflineBatch) -> None:
    batch.input.write_bytes(input_file(3) + json.dumps(input_line(4, temperature=9)).encode())
    run = Run(batch)
    assert run.record and run.record.failed == 1
    assert (lines(batch.output), lines(batch.errors)) == (["c1", "c2", "c3"], ["c4"])


def test_the_same_call_goes_on_after_an_end_in_the_middle(batch: OfflineBatch) -> None:
    first = Run(batch, stop_at=10)
    assert first.record is None and not batch.output.exists() and batch.directory.is_dir()
    batch.check()
    second = Run(batch)
    assert second.record and second.record.completed == 60
    assert lines(batch.output) == ALL
    assert len(first.link.seen) + len(second.link.seen) - 60 <= first.link.info.max_num_seqs * 5 // 4
    assert len(second.link.seen) <= 50


def test_the_rest_of_another_input_is_not_gone_on_with(batch: OfflineBatch) -> None:
    Run(batch, stop_at=10)
    batch.input.write_bytes(input_file(61))
    with pytest.raises(ConfigError, match="another input"):
        Run(batch)


def test_files_that_cannot_be_meant(batch: OfflineBatch, tmp_path: Path) -> None:
    batch.check()
    batch.output.write_bytes(b"")
    with pytest.raises(ConfigError, match="exists"):
        batch.check()
    with pytest.raises(ConfigError, match="no file"):
        OfflineBatch(tmp_path / "none", tmp_path / "x", tmp_path / "y").check()
    with pytest.raises(ConfigError, match="no directory"):
        OfflineBatch(batch.input, tmp_path / "none" / "x", tmp_path / "y").check()
    with pytest.raises(ConfigError, match="no directory"):
        OfflineBatch(batch.input, tmp_path / "x", tmp_path / "none" / "y").check()
    with pytest.raises(ConfigError, match="for the output and for the errors"):
        OfflineBatch(batch.input, tmp_path / "x", tmp_path / "." / "x").check()


def test_an_unknown_model_fails_the_run(batch: OfflineBatch) -> None:
    batch.input.write_bytes(input_file(3, model="gpt-4"))
    run = Run(batch)
    assert run.record and [error.code for error in run.record.errors] == ["model_not_found"]
    assert not batch.output.exists() and not batch.directory.exists()


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [("/completions", "/v1/completions"), ("/v1/chat/completions", "/v1/chat/completions"), ("/x", None)],
)
def test_the_endpoint_is_that_of_the_first_line(batch: OfflineBatch, url: str, endpoint: str | None) -> None:
    batch.input.write_bytes(json.dumps(input_line(1) | {"url": url}).encode())
    found, validation = validate(batch, 2**20)
    assert found == (endpoint or "/v1/chat/completions")
    assert [error.code for error in validation.errors] == ([] if endpoint else ["url_mismatch"])
    batch.input.write_bytes(b"not json")
    assert validate(batch, 2**20)[1].errors


def test_files_on_two_file_systems(batch: OfflineBatch) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == batch.output.parent.stat().st_dev:
        pytest.skip("one file system")
    batch.input.write_bytes(input_file(1) + json.dumps(input_line(2, temperature=9)).encode())
    with tempfile.TemporaryDirectory(dir=elsewhere) as folder:
        split = OfflineBatch(batch.input, batch.output, Path(folder, "bad.jsonl"))
        run = Run(split)
        assert run.record and (lines(split.output), lines(split.errors)) == (["c1"], ["c2"])
        assert list(Path(folder).iterdir()) == [split.errors]


def test_results_that_cannot_be_delivered_are_kept(batch: OfflineBatch) -> None:
    batch.output.mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        Run(batch)
    batch.output.rmdir()
    run = Run(batch)
    assert run.record and lines(batch.output) == ALL and not run.link.seen  # nothing was computed again
