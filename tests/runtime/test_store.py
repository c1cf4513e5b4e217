"""Compiled programs on disk: found again without a compilation, and only where they fit and nobody else could write."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.errors import ConfigError
from jaxserve.ops.state import StateArrays
from jaxserve.runtime import fingerprint as fingerprints
from jaxserve.runtime.compilation import program_cache
from jaxserve.runtime.compilation.compiler import CompileCounter, Program, compile_all
from jaxserve.runtime.fingerprint import check_same, describe, fingerprint
from jaxserve.runtime.mesh import DeviceMesh, make_mesh
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.runtime.saved_programs.executable import ProgramFormatError, UnrunnableProgramError, load, serialize
from jaxserve.runtime.saved_programs.program_store import (
    ProgramStore,
    TurnTakingStore,
    decode,
    discarding,
    encode,
    open_store,
    program_key,
)
from jaxserve.system import CacheDirectoryError
from tests.runtime.damaged import without_code, without_functions


@pytest.fixture(scope="module", autouse=True)
def without_jax_cache() -> Iterator[None]:
    """A runner of an earlier test may have enabled it, and a program that comes from it is not stored."""
    with program_cache.unused():
        yield


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    return make_mesh("cpu")


def function(x: jax.Array, table: dict[str, jax.Array], unused: jax.Array) -> Any:
    tokens = x @ table["a"]
    states = [StateArrays(None, x), StateArrays(x + 2, tokens)]
    return {"sampled": Sampled(tokens, table["b"]), "pair": (x + 1, None), "states": states}


def program(mesh: DeviceMesh, rows: int = 4, **changes: Any) -> Program:
    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=mesh.replicated)

    args = struct(rows, 3), {"a": struct(3, 5), "b": struct(2)}, struct(7)
    return Program("example", function, args, (0,), mesh.replicated, identity="example", **changes)


def arguments(rows: int = 4) -> tuple[Any, ...]:
    x = jnp.arange(rows * 3, dtype=jnp.float32).reshape(rows, 3)
    return x, {"a": jnp.ones((3, 5)), "b": jnp.arange(2.0)}, jnp.zeros(7)


def stored_file(directory: Path) -> Path:
    [path] = directory.glob("*.program")
    return path


def test_second_process_loads_and_compiles_nothing(tmp_path: Path, mesh: DeviceMesh) -> None:
    wanted = program(mesh)
    first = compile_all([wanted], store=ProgramStore(tmp_path, mesh))["example"]
    with CompileCounter() as counter:
        second = compile_all([wanted], store=ProgramStore(tmp_path, mesh))["example"]
    assert counter.count == 0
    expected, donated = first(*arguments()), arguments()
    got = second(*donated)
    assert jax.tree.structure(got) == jax.tree.structure(expected) and isinstance(got["sampled"], Sampled)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert donated[0].is_deleted(), "its argument is donated as in the compiled program"
    with pytest.raises(TypeError):
        second(*arguments(rows=5))
    assert (second.in_tree, second.out_tree) == (first.in_tree, first.out_tree)


def slow(traced: list[int], pause: Callable[[], object]) -> Any:
    """The function, with a pause while it is traced."""

    def traced_slowly(x: jax.Array, table: dict[str, jax.Array], unused: jax.Array) -> Any:
        traced.append(1)
        pause()
        return function(x, table, unused)

    return traced_slowly


@pytest.mark.parametrize(("seconds", "compilations"), [(100.0, 1), (0.0, 2)])
def test_two_that_start_together_compile_a_program_once(
    tmp_path: Path, mesh: DeviceMesh, seconds: float, compilations: int
) -> None:
    """The second has the time to wait for the first; or both are in the middle of it at once, because none waits."""
    traced: list[int] = []
    store = ProgramStore(tmp_path, mesh)
    both = threading.Barrier(2, timeout=100.0)
    pause = partial(time.sleep, 0.2) if seconds else both.wait

    def compiled(number: int) -> jax.stages.Compiled:
        wanted = dataclasses.replace(program(mesh), function=slow(traced, pause))  # jax traces each function once
        return compile_all([wanted], store=TurnTakingStore(store, seconds))["example"]

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(compiled, range(2)))
    assert len(traced) == compilations
    assert [path.name for path in tmp_path.iterdir()] == [stored_file(tmp_path).name], "no lock is left"
    for each in found:
        np.testing.assert_array_equal(each(*arguments())["pair"][0], arguments()[0] + 1)


@pytest.mark.parametrize("is_killed", [False, True])
def test_who_holds_a_lock_holds_up_nobody_for_ever(tmp_path: Path, mesh: DeviceMesh, is_killed: bool) -> None:
    """Neither a process that was killed nor one that was stopped. It is waited for once."""
    store = ProgramStore(tmp_path, mesh)
    wanted = program(mesh)
    other = f".{program_key(wanted, fingerprint(mesh))}.lock"
    code = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / other)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        waiting = TurnTakingStore(store, 100.0 if is_killed else 0.2)
        with ThreadPoolExecutor() as pool:
            found = pool.submit(compile_all, [wanted], store=waiting)
            if is_killed:
                time.sleep(0.2)
                holder.kill()
            assert set(found.result()) == {"example"}
        assert (tmp_path / other).exists() is not is_killed
        holder.kill()
    assert store.find(wanted) is not None


@pytest.mark.parametrize("break_it", [lambda data: data[:-100], lambda data: data[:-1] + b"x", lambda data: b""])
def test_damaged_file_is_compiled_again(
    break_it: Any, tmp_path: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    store, wanted = ProgramStore(tmp_path, mesh), program(mesh)
    compile_all([wanted], store=store)
    path = stored_file(tmp_path)
    path.write_bytes(break_it(path.read_bytes()))
    assert store.find(wanted) is None
    assert "compiled again" in caplog.text
    compile_all([wanted], store=store)
    assert store.find(wanted) is not None, "the damaged file is replaced"


def test_file_that_others_could_write_is_not_read(
    tmp_path: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    store, wanted = ProgramStore(tmp_path, mesh), program(mesh)
    compile_all([wanted], store=store)
    stored_file(tmp_path).chmod(0o666)
    assert store.find(wanted) is None and "other users can write" in caplog.text
    target = tmp_path / "elsewhere"
    stored_file(tmp_path).rename(target)
    target.with_name(f"{program_key(wanted, fingerprint(mesh))}.program").symlink_to(target)
    assert store.find(wanted) is None, "a link is not followed"


def test_directory_of_others_is_not_used(tmp_path: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CacheDirectoryError):
        ProgramStore(tmp_path, mesh)
    assert open_store(tmp_path, mesh) is None and "not kept" in caplog.text


def test_key_differs_with_everything_that_a_program_depends_on(mesh: DeviceMesh) -> None:
    here, wanted = fingerprint(mesh), program(mesh)
    others = [
        program(mesh, rows=5),
        program(mesh, options={"xla_cpu_enable_fast_math": True}),
        dataclasses.replace(wanted, identity="another"),
        dataclasses.replace(wanted, name="another"),
        dataclasses.replace(wanted, donate=()),
    ]
    keys = [program_key(wanted, here), *(program_key(other, here) for other in others)]
    keys += [program_key(wanted, here | {name: "another"}) for name in here]
    assert len(set(keys)) == len(keys)
    assert program_key(program(mesh), fingerprint(mesh)) == keys[0]


def test_key_of_a_program_without_arguments_differs_with_the_shapes_of_its_results(mesh: DeviceMesh) -> None:
    """The program that makes the KV cache of another number of pages."""
    allocate = [
        Program("allocate", lambda pages=pages: jnp.zeros((pages, 8)), (), (), mesh.replicated, identity="a model")
        for pages in (30, 40, 40)
    ]
    first, second, third = (program_key(each, fingerprint(mesh)) for each in allocate)
    assert first != second == third


@pytest.mark.parametrize("name", ["jax", "device", "processor", "sources", "options"])
def test_mismatch_is_refused_by_name(name: str, mesh: DeviceMesh) -> None:
    here = fingerprint(mesh)
    with pytest.raises(ConfigError, match=rf"was made for {name} another, and here it is .*") as refused:
        check_same(here | {name: "another"}, here, "the bundle b")
    assert refused.value.fix


def test_fingerprint_reads_the_flags_of_xla(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(mesh)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_load_autotune_results_from=f")
    assert fingerprint(mesh) == before, "the file of autotuning results is no property of the device"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert fingerprint(mesh)["options"] != before["options"]


def test_sources_are_part_of_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "kernel.py").write_text("1")
    monkeypatch.setattr(fingerprints, "ROOT", tmp_path)
    first = fingerprints.sources_digest.__wrapped__()
    (tmp_path / "ops" / "kernel.py").write_text("2")
    assert fingerprints.sources_digest.__wrapped__() != first


def test_text_with_an_address_is_no_identity() -> None:
    with pytest.raises(TypeError, match="same in every process"):
        describe(object())
    with pytest.raises(TypeError, match="same in every process"):
        describe({"names": frozenset({"a", "b"})})


def test_result_of_an_unknown_class_is_refused(mesh: DeviceMesh) -> None:
    compiled = program(mesh).compile()
    stored = serialize(compiled)
    assert decode(encode(stored)) == stored
    broken = msgspec.structs.replace(stored, tree=["os.system", ["leaf"]])
    with pytest.raises(ProgramFormatError):
        load(broken, program(mesh))


def test_program_from_jax_cache_is_not_stored(
    tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA's CPU client serialises such an executable without its kernels."""
    store, wanted = ProgramStore(tmp_path, mesh), program(mesh)

    def found_in_cache(self: Program) -> jax.stages.Compiled:
        compiled = compile_it(self)
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return compiled

    compile_it = Program.compile
    monkeypatch.setattr(Program, "compile", found_in_cache)
    compile_all([wanted], store=store)
    assert not os.listdir(tmp_path)


def test_program_that_jax_keeps_in_memory_from_its_cache_is_not_stored(
    tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jax finds an executable by its function too, and then reports no hit."""
    store, wanted = ProgramStore(tmp_path / "programs", mesh), program(mesh)
    names = ("dir", "min_compile_time_secs", "min_entry_size_bytes")
    settings = dict(zip(names, (str(tmp_path / "jax"), 0.0, -1), strict=True))
    before = {}
    for name, value in settings.items():
        full = "jax_compilation_cache_dir" if name == "dir" else f"jax_persistent_cache_{name}"
        before[full] = jax.config.values[full]
        jax.config.update(full, value)
    compilation_cache.reset_cache()
    try:
        wanted.compile()
        jax.clear_caches()
        wanted.compile()  # from the cache on disk
        compile_all([wanted], store=store)
    finally:
        for full, value in before.items():
            jax.config.update(full, value)
        compilation_cache.reset_cache()
        jax.clear_caches()
    assert any(path.name.startswith("jit_function") for path in (tmp_path / "jax").iterdir())
    assert not os.listdir(tmp_path / "programs")


def test_program_without_machine_code_is_neither_stored_nor_loaded(
    tmp_path: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    store, wanted = ProgramStore(tmp_path, mesh), program(mesh)
    compile_all([wanted], store=store)
    loaded = store.find(wanted)
    assert loaded is not None
    with pytest.raises(ProgramFormatError, match="machine code is missing"):
        serialize(loaded)
    path = stored_file(tmp_path)
    path.write_bytes(without_code(path.read_bytes(), wanted))
    assert store.find(wanted) is None
    assert "example is compiled again" in caplog.text and "machine code is missing" in caplog.text
    assert not list(tmp_path.iterdir()), "nothing loads it again"


def test_programs_of_which_one_cannot_be_run_are_discarded(tmp_path: Path, mesh: DeviceMesh) -> None:
    store, wanted = ProgramStore(tmp_path, mesh), program(mesh)
    compile_all([wanted, dataclasses.replace(wanted, name="other")], store=store)
    key = f"{program_key(wanted, fingerprint(mesh))}.program"
    (tmp_path / key).write_bytes(without_functions((tmp_path / key).read_bytes()))
    found = compile_all([wanted], store=store)["example"]
    with pytest.raises(UnrunnableProgramError, match="1 are discarded: example"), discarding(store):
        jax.block_until_ready(found(*arguments()))
    assert len(list(tmp_path.iterdir())) == 1, "the other program was not loaded"
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory"), discarding(store):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    compile_all([wanted], store=store)["example"](*arguments())


def test_a_program_is_kept_while_a_lock_of_another_vanishes(
    tmp_path: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder is done between the listing of the store and the look at each file."""
    caplog.set_level("INFO")
    scandir, lock, left = os.scandir, tmp_path / ".other.lock", tmp_path / ".left"

    def listed(directory: int) -> contextlib.nullcontext[Iterator[os.DirEntry[str]]]:
        lock.touch()
        entries = list(scandir(directory))
        lock.unlink()
        return contextlib.nullcontext(iter(entries))

    left.touch()
    os.utime(left, (1.0, 1.0))
    monkeypatch.setattr(os, "scandir", listed)
    compile_all([program(mesh)], store=ProgramStore(tmp_path, mesh))
    assert "is not kept" not in caplog.text and stored_file(tmp_path).is_file()
    assert not left.exists(), "the other files are looked at all the same"


def test_programs_that_were_not_used_for_longest_are_removed(tmp_path: Path, mesh: DeviceMesh) -> None:
    store = ProgramStore(tmp_path, mesh)
    compile_all([program(mesh)], store=store)
    size = stored_file(tmp_path).stat().st_size
    bounded = ProgramStore(tmp_path, mesh, most=int(3.5 * size))
    for age, rows in ((100, 5), (50, 6)):
        compile_all([program(mesh, rows=rows)], store=store)
        newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (1.0, time.time() - age))
    os.utime(min(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime), (1.0, 1.0))  # rows 5
    first = next(path for path in tmp_path.iterdir() if path.stat().st_mtime > time.time() - 40)
    os.utime(first, (2.0, 2.0))
    assert bounded.find(program(mesh)) is not None and first.stat().st_mtime > time.time() - 40, "its time of use"
    for name, age in ((".old", 90_000.0), (".new", 10.0)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (1.0, time.time() - age))
    (tmp_path / "of the user").write_bytes(b"x" * 10 * size)
    os.utime(tmp_path / "of the user", (1.0, 1.0))
    compile_all([program(mesh, rows=7)], store=bounded)
    kept = [rows for rows in (4, 5, 6, 7) if store.find(program(mesh, rows=rows)) is not None]
    assert kept == [4, 6, 7] and {path.name for path in tmp_path.iterdir() if path.suffix != ".program"} == {
        ".new",
        "of the user",
    }
