"""The import direction: a module imports its own room and rooms of a lower rank. No jax where none belongs."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "jaxserve"

# The rooms in the order of their imports. A room has its subfolders; a subfolder or a module with a row has a rank of
# its own. "jaxserve" alone are the modules at the top: errors, configuration, logging.
ORDER = (
    "jaxserve",
    "jaxserve.types",
    "jaxserve.transport",
    "jaxserve.routing",
    "jaxserve.kv",
    "jaxserve.speculation",
    "jaxserve.scheduler",
    "jaxserve.text",
    "jaxserve.media",
    "jaxserve.grammar",
    "jaxserve.store",
    "jaxserve.ops",
    "jaxserve.models",
    "jaxserve.runtime",
    "jaxserve.engine",
    "jaxserve.client",
    "jaxserve.telemetry",
    "jaxserve.api",  # what every slice reads: fields, keys, state
    "jaxserve.api.http",
    "jaxserve.api.openai.protocol",  # the bodies of requests, which are data; the neutral task is read from these two
    "jaxserve.api.sglang.protocol",
    "jaxserve.api.generate",
    "jaxserve.api.batch",
    "jaxserve.api.openai",
    "jaxserve.api.sglang",
    "jaxserve.api.anthropic",
    "jaxserve.api.ollama",
    "jaxserve.api.responses",
    "jaxserve.api.scoring",
    "jaxserve.api.health",  # routes of no slice, and what joins the slices
    "jaxserve.api.page",
    "jaxserve.api.schemas",
    "jaxserve.api.app",
    "jaxserve.front",
    "jaxserve.bench",
    "jaxserve.cli",
    "jaxserve.library",
    "jaxserve.ray",
)
TOP = ("jaxserve", "jaxserve.__main__")  # the public names, and `python -m jaxserve`

# What runs where no device is, and what runs where no HTTP is, by the transitive closure of imports.
HOST = (
    *("types", "transport", "routing", "kv", "speculation", "scheduler", "text", "media", "grammar", "store", "client"),
    *("telemetry", "api", "front"),
)
HOST_COMMANDS = ("main", "launch", "several", "model_server", "start", "batch", "config", "progress")
DEVICE = ("jax", "jaxlib", "flax", "jaxserve.ops", "jaxserve.models", "jaxserve.runtime")
ENGINE = ("types", "transport", "kv", "speculation", "scheduler", "ops", "models", "runtime", "engine")
HTTP = ("fastapi", "starlette", "uvicorn", "jaxserve.api", "jaxserve.client")
RUNS_DATA = ("pickle", "dill", "cloudpickle", "shelve", "marshal", "torch")  # data as code


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["jaxserve", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[str]:
    """Everything that a file imports, also inside functions, for type checkers, and by a name in a string."""
    found = list(named(ast.walk(tree(path)), str(path)))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            found += [str(name.value)] if isinstance(name, ast.Constant) else []
    return found


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
    return list(named(node for node in tree(path).body if isinstance(node, ast.Import | ast.ImportFrom)))


@functools.cache
def rank(module: str) -> int:
    """Return the place of the longest row that the module is in."""
    packages = MODULES[module].name == "__init__.py"
    here = module if packages else ".".join(module.split(".")[:-1])
    rows = [row for row in ORDER if row == module or row == here or (row != "jaxserve" and within(here, (row,)))]
    assert rows, f"{module} has no place in the order"
    return ORDER.index(max(rows, key=len))


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in rooms)


def in_rooms(rooms: tuple[str, ...]) -> list[str]:
    return sorted(module for module in MODULES if within(module, tuple(f"jaxserve.{room}" for room in rooms)))


@functools.cache
def closure(module: str) -> frozenset[str]:
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
    return frozenset(found)


def parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def test_modules_import_only_lower_rooms() -> None:
    wrong = [
        f"{module} imports {target}"
        for module in set(MODULES) - set(TOP)
        for target in imports(MODULES[module])
        if target in MODULES and (target in TOP or rank(target) > rank(module))
    ]
    assert sorted(wrong) == []


def test_the_readme_lists_the_rooms_in_this_order() -> None:
    layout = (ROOT.parent / "README.md").read_text(encoding="utf-8").partition("\njaxserve/\n")[2]
    listed = re.findall(r"^  (\w+)/ ", layout.partition("```")[0], re.MULTILINE)
    assert listed == [*dict.fromkeys(room.split(".")[1] for room in ORDER[1:]), "assets"]


def test_no_module_reaches_what_its_process_lacks() -> None:
    """The host's rooms reach no device code, and the engine's no HTTP."""
    host = in_rooms(HOST) + [f"jaxserve.cli.{name}" for name in HOST_COMMANDS]
    rules = [*((module, DEVICE) for module in host), *((module, HTTP) for module in in_rooms(ENGINE))]
    wrong = [f"{module} reaches {name}" for module, no in rules for name in closure(module) if within(name, no)]
    assert sorted(wrong) == []


def test_the_template_worker_starts_with_few_modules() -> None:
    """A first conversation in process waits for its start; numpy and asyncio took half of that."""
    assert closure("jaxserve.text.template_worker") & {"numpy", "asyncio", "pydantic", "zmq"} == set()


def test_a_start_loads_no_transformers() -> None:
    """It takes 2 s to import, and one function needs it."""
    for module in ("jaxserve.cli.launch", "jaxserve.engine.process"):
        assert closure(module) & {"transformers", "openai"} == set()


def test_only_the_picture_worker_has_pillow() -> None:
    found = sorted(module for module in MODULES if "PIL" in {name.partition(".")[0] for name in closure(module)})
    assert found == ["jaxserve.media.images", "jaxserve.media.worker"]


def test_no_module_that_runs_data_as_code() -> None:
    assert [m for m, path in MODULES.items() if any(within(name, RUNS_DATA) for name in imports(path))] == []


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


# Modules of less than 150 lines with a single importer stay apart for a reason; others belong into their importer.
APART = {
    "api.anthropic.routes": "every slice has protocol, task, answer and routes",
    "api.health": "routes of no slice",
    "api.schemas": "a table",
    "bench.offline": "a measurement of its own",
    "bench.plot": "imports matplotlib, which is optional",
    "cli.config": "a command",
    "cli.worker": "a process",
    "client.finishing": "its own thought, and the replica set is long",
    "client.replica_calls": "its own thought, and the replica set is long",
    "library.async_engine": "a name of `import jaxserve`, imported when it is used",
    "media.images": "the only file that imports Pillow",
    "models.checkpoint.download": "imports the hub's client, which takes 0.1 s, when it is needed",
    "models.checkpoint.orbax": "imports Orbax's writer, which only `jaxserve convert` needs",
    "models.checkpoint.published_size": "only `jaxserve plan` needs it",
    "models.families.gemma": "a family is a file, found by its folder",
    "models.families.laguna": "a family is a file, found by its folder",
    "models.families.llama": "a family is a file, found by its folder",
    "models.families.olmo2": "a family is a file, found by its folder",
    "ops.linear.few_bits_tpu": "kernels of one device",
    "ops.linear.sharded_few_bits": "kernels over several devices",
    "ops.paged_attention.triton.heads": "kernels of one device",
    "ops.state.reference": "the contract in its plainest form, to which the kernels are held",
    "ops.state.sharded": "kernels over several devices",
    "ops.state.native": "kernels of one device",
    "ops.state.triton": "kernels of one device",
    "ray.prefixes": "it is tested where Ray is not installed",
    "runtime.saved_programs.target": "devices that are not there, which only bundles need",
    "scheduler.background": "its own thought, and the scheduler is long",
    "text.template_process": "the limits and errors of one worker; the renderer chooses among two",
    "text.renderer": "import order: the worker that it starts imports nothing of it",
}
SMALL = 150  # lines


def test_small_modules_with_one_importer_have_a_reason() -> None:
    importers: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for target in imports(path):
            if target != module:
                importers.setdefault(target, set()).add(module)
    small = {
        module.removeprefix("jaxserve.")
        for module, path in MODULES.items()
        if path.name not in ("__init__.py", "__main__.py")
        and len(importers.get(module, ())) == 1
        and len(path.read_text().splitlines()) < SMALL
    }
    assert small - APART.keys() == set(), "merge it into its importer, or say here why it stands alone"
    gone = {name for name in APART if f"jaxserve.{name}" not in MODULES}
    assert gone == set()
