import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.compilation.compiler import (
    CompileCounter,
    LateCompilation,
    Program,
    compile_all,
    compiler_options,
    compiles_programs,
)

SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)


def program(name: str, weight: int = 0, factor: float = 2.0) -> Program:
    return Program(name, lambda x: x * factor, (SHAPE,), weight=weight)


def test_programs_run_and_progress_counts_up() -> None:
    seen: list[tuple[str, int, int]] = []
    compiled = compile_all(
        [program("a"), program("b", weight=5, factor=3.0)],
        workers=1,
        progress=lambda *event: seen.append(event),
    )
    assert np.asarray(compiled["b"](np.ones(4, np.float32))).tolist() == [3.0] * 4
    assert seen == [("b", 1, 2), ("a", 2, 2)]  # the heavier one first


def test_another_shape_is_an_error_and_no_compilation() -> None:
    compiled = compile_all([program("a")])
    with CompileCounter() as counter, pytest.raises(TypeError):
        compiled["a"](np.ones(5, np.float32))
    assert counter.count == 0


def test_the_first_error_is_raised() -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise ArithmeticError("in the trace")

    with pytest.raises(ArithmeticError, match="in the trace"):
        compile_all([Program("broken", broken, (SHAPE,), weight=1), program("a")])


def test_the_counter_counts_between_making_and_closing() -> None:
    with CompileCounter() as counter:
        jax.jit(lambda x: x - 17.5).lower(SHAPE).compile()
        assert counter.count == 1 and counter.seconds > 0
    jax.jit(lambda x: x - 18.5).lower(SHAPE).compile()
    assert counter.count == 1


def test_programs_of_engines_do_not_count_as_compilations_of_one_that_serves() -> None:
    found: list[str] = []
    with CompileCounter(compiles_programs) as counter:
        compile_all([program("a", factor=19.5)])
        late = LateCompilation([program("b", factor=20.5)], None, lambda name, _: found.append(name))
        late.start()
        late.wait()
        assert (counter.count, found) == (0, ["b"])
        jax.jit(lambda x: x - 21.5).lower(SHAPE).compile()
        assert counter.count == 1


@pytest.mark.parametrize("num_rows", [16_385, 32_769, 40_001])
@pytest.mark.parametrize("width", [3, 64])
def test_sums_of_products_are_right(num_rows: int, width: int) -> None:
    """The program of jax-ml/jax#39103, and one as wide as a head: jaxlib 0.10.2 by itself gives wrong last rows."""

    def squares(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: jnp.sum((jnp.eye(width, dtype=x.dtype) @ row) ** 2))(x)

    shape = jax.ShapeDtypeStruct((num_rows, width), jnp.float32)
    compiled = Program("squares", squares, (shape,), options=compiler_options(jax.default_backend())).compile()
    x = np.zeros(shape.shape, np.float32)
    x[:, 0] = np.arange(num_rows)
    np.testing.assert_allclose(np.asarray(compiled(x)), (x.astype(np.float64) ** 2).sum(axis=1), rtol=1e-6)


def test_the_option_is_for_the_version_that_needs_it() -> None:
    single_dots = compiler_options("cpu", deterministic=True, version="0.12.0")
    assert single_dots and compiler_options("cpu", version="0.10.2") == single_dots
    assert compiler_options("cpu", version="0.11.2") == compiler_options("tpu", deterministic=True) == {}


def test_a_step_is_one_graph_on_a_gpu_unless_the_operator_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    options = compiler_options("gpu")
    assert "WHILE" in str(options["xla_gpu_enable_command_buffer"]) and options == compiler_options(
        "gpu", deterministic=True
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert compiler_options("gpu") == {}


def test_each_host_of_several_tries_kernels_for_itself() -> None:
    """The option is passed to XLA here too, which refuses names that it does not know."""
    own = {"xla_gpu_shard_autotuning": False}
    assert compiler_options("gpu", several=True) == {**compiler_options("gpu"), **own}
    assert compiler_options("cpu", several=True) == compiler_options("cpu")
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert Program("double", lambda x: x + x, (shape,), options=own).compile()
