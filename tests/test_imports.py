"""The import direction: a module may import only rooms of a lower rank, or its own room. No jax where none belongs."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxserve"

# The rooms in the order of their imports: a file imports from its own folder and from folders above it in this list.
ORDER = (
    "jaxserve.config_sections",
    "jaxserve",  # the ground: errors, configuration, logging; `__init__` and `__main__` are apart
    "jaxserve.types",
    "jaxserve.types.scheduling",
    "jaxserve.transport",
    "jaxserve.routing",
    "jaxserve.transport.group",
    "jaxserve.kv",
    "jaxserve.speculation",
    "jaxserve.scheduler.waiting",
    "jaxserve.scheduler",
    "jaxserve.text",
    "jaxserve.text.reasoning",
    "jaxserve.text.tools",
    "jaxserve.text.template",
    "jaxserve.text.output",
    "jaxserve.grammar.schema",
    "jaxserve.grammar",
    "jaxserve.store.sqlite",
    "jaxserve.store",
    "jaxserve.ops",
    "jaxserve.ops.quantized",
    "jaxserve.ops.native",
    "jaxserve.ops.linear",
    "jaxserve.ops.moe",
    "jaxserve.ops.paged_attention",
    "jaxserve.ops.paged_attention.triton",
    "jaxserve.models",
    "jaxserve.models.families",
    "jaxserve.models.loading.file_formats",
    "jaxserve.models.loading.config",
    "jaxserve.models.loading.quantized",
    "jaxserve.models.loading",
    "jaxserve.runtime.compilation",
    "jaxserve.runtime.sampling",
    "jaxserve.runtime.steps",
    "jaxserve.runtime.pages",
    "jaxserve.runtime",
    "jaxserve.runtime.numerics",
    "jaxserve.runtime.saved_programs",
    "jaxserve.runtime.weight_updates",
    "jaxserve.engine.hosts",
    "jaxserve.engine.core",
    "jaxserve.engine",
    "jaxserve.client.processes",
    "jaxserve.client.sequences",
    "jaxserve.client.replicas",
    "jaxserve.client",
    "jaxserve.telemetry",
    "jaxserve.api.errors",
    "jaxserve.api.protocol",
    "jaxserve.api.shared",
    "jaxserve.api.http",
    "jaxserve.api.tasks",
    "jaxserve.api.generate",
    "jaxserve.api.respond",
    "jaxserve.api.batch",
    "jaxserve.api.docs",
    "jaxserve.api.routes",
    "jaxserve.api.messages",
    "jaxserve.api.ollama",
    "jaxserve.api.responses",
    "jaxserve.api.response_state",
    "jaxserve.api.scoring",
    "jaxserve.api.decisions",
    "jaxserve.api",
    "jaxserve.front",
    "jaxserve.bench",
    "jaxserve.cli.options",
    "jaxserve.cli.terminal",
    "jaxserve.cli.batches",
    "jaxserve.cli.serving",
    "jaxserve.cli.checks",
    "jaxserve.cli",
    "jaxserve.library",
    "jaxserve.ray",
)
TOP = ("jaxserve", "jaxserve.__main__")  # the public names, and `python -m jaxserve`

# What runs where no device is, and what runs where no HTTP is, by the transitive closure of imports.
HOST = (
    "types",
    "transport",
    "routing",
    "kv",
    "speculation",
    "scheduler",
    "text",
    "grammar",
    "store",
    "client",
    "telemetry",
    "api",
    "front",
)
HOST_COMMANDS = ("main", "launch", "several", "model_server", "start", "batch", "config", "terminal.progress")
DEVICE = ("jax", "jaxlib", "flax", "jaxserve.ops", "jaxserve.models", "jaxserve.runtime")
ENGINE = ("types", "transport", "kv", "speculation", "scheduler", "ops", "models", "runtime", "engine")
HTTP = ("fastapi", "starlette", "uvicorn", "jaxserve.api", "jaxserve.client")


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["jaxserve", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    yield from named(ast.walk(ast.parse(path.read_text())), str(path))


def named(nodes: Iterable[ast.AST], path: str = "") -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"relative import in {path}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


@functools.cache
def imports_when_loaded(path: Path) -> list[str]:
    """Those at the top of the file; not those for type checkers, nor those inside functions."""
    tree = ast.parse(path.read_text())
    body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return list(named(body))


def folder(module: str) -> str:
    return ".".join(["jaxserve", *MODULES[module].relative_to(ROOT).parent.parts])


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in rooms)


def in_rooms(rooms: tuple[str, ...]) -> list[str]:
    return sorted(module for module in MODULES if within(module, tuple(f"jaxserve.{room}" for room in rooms)))


def test_every_folder_has_a_place_in_the_order() -> None:
    assert {folder(module) for module in MODULES if MODULES[module].stat().st_size} <= set(ORDER)


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(TOP)))
def test_a_module_imports_only_lower_rooms(module: str) -> None:
    for target in imports(MODULES[module]):
        if target in MODULES:
            assert target not in TOP, f"{module} imports {target}"
            assert ORDER.index(folder(target)) <= ORDER.index(folder(module)), f"{module} imports {target}"


def closure(module: str) -> set[str]:
    """Everything that an import of `module` imports, packages on the way and what is not ours included."""
    found: set[str] = set()
    rest = [module]
    while rest:
        name = rest.pop()
        if name not in found:
            found.add(name)
            if name in MODULES:
                rest += imports_when_loaded(MODULES[name])
                rest += [parent for parent in parents(name) if parent in MODULES]
    return found


def parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@pytest.mark.parametrize("module", in_rooms(HOST) + [f"jaxserve.cli.{name}" for name in HOST_COMMANDS])
def test_host_code_reaches_no_device_code(module: str) -> None:
    reached = [name for name in closure(module) if within(name, DEVICE)]
    assert reached == []


@pytest.mark.parametrize("module", in_rooms(ENGINE))
def test_the_engine_reaches_no_http(module: str) -> None:
    reached = [name for name in closure(module) if within(name, HTTP)]
    assert reached == []


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
