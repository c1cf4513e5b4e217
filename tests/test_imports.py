"""The import direction: a module may import only rooms of a lower rank, or its own room. No jax where none belongs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxserve"

# the longest matching prefix decides
RANKS = {
    "jaxserve": 90,
    "jaxserve.errors": 0,
    "jaxserve.config": 2,
    "jaxserve.model_files": 1,
    "jaxserve.config_keys": 1,
    "jaxserve.config_types": 0,
    "jaxserve.cache_directory": 1,
    "jaxserve.version": 0,
    "jaxserve.child_process": 0,
    "jaxserve.child_frames": 0,
    "jaxserve.installation": 0,
    "jaxserve.json_cost": 0,
    "jaxserve.log": 5,
    "jaxserve.metrics": 42,
    "jaxserve.tracing": 42,
    "jaxserve.engine.mask_budget": 1,
    "jaxserve.engine.request": 2,
    "jaxserve.engine.messages": 3,
    "jaxserve.engine.logprobs": 3,
    "jaxserve.engine.exclusions": 3,
    "jaxserve.engine.stopping": 3,
    "jaxserve.engine.token_mask": 3,
    "jaxserve.engine.scheduler_stats": 3,
    "jaxserve.engine.running_set": 3,
    "jaxserve.engine.step_times": 2,
    "jaxserve.engine.scheduler_config": 3,
    "jaxserve.engine.prompt_shares": 3,
    "jaxserve.engine.aging": 4,
    "jaxserve.engine.waiting_queue": 5,
    "jaxserve.engine.output_groups": 3,
    "jaxserve.engine.background": 4,
    "jaxserve.engine.window_size": 2,
    "jaxserve.engine.page_pool": 3,
    "jaxserve.engine.radix_cache": 4,
    "jaxserve.engine.window_index": 5,
    "jaxserve.engine.window_group": 6,
    "jaxserve.engine.kv_manager": 7,
    "jaxserve.engine.admission": 8,
    "jaxserve.engine.step_builder": 8,
    "jaxserve.engine.preemption": 9,
    "jaxserve.engine.admitter": 10,
    "jaxserve.engine.scheduler": 11,
    "jaxserve.text": 10,
    "jaxserve.grammar": 11,
    "jaxserve.store": 10,
    "jaxserve.ops": 20,
    "jaxserve.models": 25,
    "jaxserve.runtime": 30,
    "jaxserve.engine": 40,
    "jaxserve.api": 50,
    "jaxserve.bench": 60,
    "jaxserve.cli": 70,
    "jaxserve.bench.lag_server": 80,
}
# what runs in the API process or in the scheduler never imports these
HOST_ONLY = (
    "jaxserve.text",
    "jaxserve.grammar",
    "jaxserve.store",
    "jaxserve.api",
    "jaxserve.engine.mask_budget",
    "jaxserve.engine.request",
    "jaxserve.engine.messages",
    "jaxserve.engine.page_pool",
    "jaxserve.engine.radix_cache",
    "jaxserve.engine.scheduler",
    "jaxserve.engine.background",
    "jaxserve.engine.aging",
    "jaxserve.engine.admitter",
    "jaxserve.engine.preemption",
    "jaxserve.engine.prompt_shares",
    "jaxserve.engine.step_times",
    "jaxserve.engine.output_groups",
    "jaxserve.engine.kv_manager",
    "jaxserve.engine.window_size",
    "jaxserve.engine.window_index",
    "jaxserve.engine.window_group",
    "jaxserve.engine.admission",
    "jaxserve.engine.running_set",
    "jaxserve.engine.waiting_queue",
    "jaxserve.engine.step_builder",
    "jaxserve.engine.stopping",
    "jaxserve.engine.token_mask",
    "jaxserve.engine.logprobs",
    "jaxserve.engine.exclusions",
    "jaxserve.engine.scheduler_config",
    "jaxserve.engine.scheduler_stats",
    "jaxserve.engine.core",
    "jaxserve.engine.link",
    "jaxserve.engine.shared_state",
    "jaxserve.engine.socket_directory",
    "jaxserve.engine.supervisor",
    "jaxserve.engine.watchdog",
    "jaxserve.engine.work_record",
    "jaxserve.engine.async_engine",
    "jaxserve.engine.sequence_table",
    "jaxserve.engine.output",
    "jaxserve.config",
    "jaxserve.errors",
    "jaxserve.model_files",
)
DEVICE = ("jax", "flax", "jaxserve.ops", "jaxserve.models", "jaxserve.runtime")


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["jaxserve", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"relative import in {path}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def rank(module: str) -> int:
    while module not in RANKS:
        module = module.rpartition(".")[0]
    return RANKS[module]


def room(module: str) -> str:
    while module not in RANKS:
        module = module.rpartition(".")[0]
    return module


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in rooms)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_lower_rooms(module: str) -> None:
    for target in imports(MODULES[module]):
        if target.startswith("jaxserve") and room(target) != room(module):
            assert rank(target) < rank(module), f"{module} imports {target}"


@pytest.mark.parametrize("module", sorted(m for m in MODULES if within(m, HOST_ONLY)))
def test_host_code_imports_no_device_code(module: str) -> None:
    for target in imports(MODULES[module]):
        assert not within(target, DEVICE), f"{module} imports {target}"


def test_no_cycles() -> None:
    graph = {m: {t for t in imports(p) if t in MODULES and t != m} for m, p in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for target in graph[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("name", ["pickle", "dill", "cloudpickle", "shelve", "marshal", "torch"])
def test_no_module_that_runs_data_as_code(name: str) -> None:
    users = [module for module, path in MODULES.items() if any(within(t, (name,)) for t in imports(path))]
    assert users == []
