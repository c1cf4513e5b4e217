"""The C kernels: numbers, bits that depend on no neighbour, and every instruction set."""

import ctypes
import platform
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.quantization import encode
from jaxserve.ops import kernel_library as builder
from jaxserve.ops import native
from jaxserve.ops.linear import Products
from jaxserve.ops.native import PagedContext
from jaxserve.ops.quantized import Quantized
from tests.ops import emulated
from tests.ops.prompt_attention import check_prompts
from tests.ops.test_quantized import check_bits

RNG = np.random.default_rng(0)
# Rows of x around the widths of panels, rows of w around the heights of tiles, and depths around a cache line.
SHAPES = [(1, 1, 1), (2, 24, 48), (3, 3, 17), (5, 25, 64), (8, 100, 33), (17, 47, 16), (32, 23, 100), (33, 31, 5)]
ROWS = [1, 2, 4, 5, 8, 9, 16, 17, 24, 32, 33, 48, 49, 100]


@pytest.fixture(autouse=True)
def _loaded() -> None:
    try:
        native.load()
    except ConfigError as error:
        if "no C compiler" in str(error):
            pytest.skip(str(error))
        raise


def _arrays(tokens: int, rows: int, depth: int) -> tuple[jax.Array, jax.Array]:
    x, w = (RNG.standard_normal((n, depth), np.float32) for n in (tokens, rows))
    return jnp.asarray(x), jnp.asarray(w)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul_is_numpys(shape: tuple[int, int, int]) -> None:
    x, w = _arrays(*shape)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(native.matmul(x, w), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (25, 63), (24, 64), (100, 200), (7, 1000)])
def test_matmul_few_is_numpys(rows: int, depth: int) -> None:
    """And a row has the same bits among 2 and among 8."""
    x, w = _arrays(native.FEW, rows, depth)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    got = native.matmul_few(x, w)
    for tokens in range(1, native.FEW + 1):
        few = native.matmul_few(x[:tokens], w)
        np.testing.assert_allclose(few, want[:tokens], rtol=1e-4, atol=1e-4)
        if tokens > 1:
            np.testing.assert_array_equal(few, got[:tokens])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("few", [False, True])
def test_groups_have_the_bits_of_products_alone(kind: str, few: bool) -> None:
    """Groups without rows, of one, of FEW and of more; rows behind the last group give zeros."""
    sizes, rows, depth = [3, 0, 1, native.FEW, 20, 0, 9], 50, 96
    x, wide = _arrays(sum(sizes) + 2, len(sizes) * rows, depth)
    w: jax.Array | Quantized = wide.reshape(len(sizes), rows, depth)
    if kind in ("int8", "int4", "fp8"):
        values, scales = encode(np.asarray(w), kind, 32)
        zeros = None if kind == "fp8" else jnp.asarray(RNG.uniform(-3, 3, scales.shape).astype(np.float32))
        w = Quantized(jnp.asarray(values), jnp.asarray(scales), zeros)
    else:
        w = w.astype(kind)
    got = native.matmul_grouped(x, w, jnp.asarray(sizes, jnp.int32), few=few)
    ends = np.cumsum(sizes)
    for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        product = native.matmul_few if few and size <= native.FEW else native.matmul
        part = x[end - size : end]
        if size:
            alone = product(part, jax.tree.map(lambda leaf, i=group: leaf[i], w))
            np.testing.assert_array_equal(got[end - size : end], alone)
            number = jax.tree.map(lambda leaf, i=group: leaf[i], w).astype(jnp.float32)
            np.testing.assert_allclose(alone, np.asarray(part) @ np.asarray(number).T, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(got[ends[-1] :], 0)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    x, w = _arrays(max(ROWS), 61, 200)
    alone = np.concatenate([native.matmul(x[i : i + 1], w) for i in range(len(x))])
    for rows in ROWS:
        np.testing.assert_array_equal(native.matmul(x[:rows], w), alone[:rows])


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 12, 16, 31, 33, 100])
def test_a_bfloat16_weight_has_the_bits_of_the_float32_one(tokens: int) -> None:
    """Depths below a block, of a block and a rest, and of more than the piece that is widened at a time."""
    for rows, depth in ((1, 1), (25, 31), (61, 64), (30, 300), (23, 500)):
        x, w = _arrays(tokens, rows, depth)
        narrow = w.astype(jnp.bfloat16)
        np.testing.assert_array_equal(native.matmul(x, narrow), native.matmul(x, narrow.astype(jnp.float32)))
        few, wide = x[: native.FEW], narrow.astype(jnp.float32)
        np.testing.assert_array_equal(native.matmul_few(few, narrow), native.matmul_few(few, wide))


def test_linear_takes_the_kernel_for_float32() -> None:
    def lowered(
        rows: int, dtype: str = "float32", deterministic: bool = False, weights: str = "", depth: int = 64
    ) -> str:
        x, w = jnp.zeros((rows, depth), dtype), jnp.zeros((3, 8, depth), weights or dtype)
        return jax.jit(Products(native=True, deterministic=deterministic)).lower(x, w).as_text()

    assert all("jaxserve_matmul" in lowered(rows) and "matmul_few" not in lowered(rows) for rows in (9, 600))
    assert all("matmul_few" not in lowered(rows, deterministic=True) for rows in (1, 8))
    assert "jaxserve_matmul_few" in lowered(1) and "jaxserve_matmul_few" in lowered(8)
    assert "jaxserve_matmul" in lowered(8, depth=16) and "matmul_few" not in lowered(8, depth=16)
    assert "custom_call" not in lowered(8, "bfloat16")
    assert "jaxserve_matmul" in lowered(9, weights="bfloat16") and "matmul_few" in lowered(1, weights="bfloat16")
    x, w = _arrays(7, 24, 32)
    got = Products(native=True)(x, w.reshape(3, 8, 32), jnp.ones((3, 8)))
    np.testing.assert_allclose(got, np.einsum("tk,abk->tab", x, w.reshape(3, 8, 32)) + 1, rtol=1e-4, atol=1e-4)


def test_programs_in_several_threads_at_once() -> None:
    """The threads share XLA's pool: a call may find no free thread and does all by itself."""
    x, w = _arrays(16, 400, 300)
    multiply = jax.jit(native.matmul)
    want, wrong = np.asarray(multiply(x, w)), []

    def work() -> None:
        for _ in range(50):
            if not np.array_equal(multiply(x, w), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _attend(rows: list[int], seed: int = 0, scale: float = 1.0, window: int | None = None) -> np.ndarray:
    """Row i of kv_len rows[i] has numbers of its own: a function of `seed` + i alone."""
    pages = [-(-length // 16) for length in rows]
    starts = np.concatenate([[0], np.cumsum(pages)])
    cache = np.zeros((starts[-1], 2, 16, 2 * 64), np.float32)
    table = np.zeros((len(rows), max(pages)), np.int32)
    q = np.zeros((len(rows), 6, 64), np.float32)
    for i, count in enumerate(pages):
        rng = np.random.default_rng(seed + i)
        cache[starts[i] : starts[i + 1]] = rng.standard_normal((count, *cache.shape[1:]))
        table[i, :count] = np.arange(starts[i], starts[i + 1])
        q[i] = rng.standard_normal(q.shape[1:]) * scale
    arrays = [jnp.asarray(array) for array in (q, cache, table, np.array(rows, np.int32))]
    out = native.attend(arrays[0], arrays[3], PagedContext(arrays[1], arrays[2], sliding_window=window))
    return np.asarray(out)


def test_many_long_rows_take_turns_for_the_scratch() -> None:
    """Rows whose pieces are more than 16 MiB hold are taken in runs; shared pages, so that they take little else."""
    heads, depth = 96, 256
    cache = jnp.asarray(RNG.standard_normal((16, 2, 128, depth)), jnp.float32)
    q = jnp.asarray(RNG.standard_normal((60, heads, depth)), jnp.float32)
    lengths = jnp.asarray(RNG.integers(1900, 2000, 60), jnp.int32)
    table = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (60, 16))

    def attend(rows: slice) -> np.ndarray:
        return np.asarray(native.attend(q[rows], lengths[rows], PagedContext(cache, table[rows])))

    assert 60 * 16 * heads * (depth + 2) > 2**22
    everything = attend(slice(None))
    np.testing.assert_array_equal(everything, np.concatenate([attend(slice(i, i + 1)) for i in range(60)]))


@pytest.mark.parametrize("window", [None, 150])
def test_attention_of_a_row_does_not_depend_on_the_others(window: int | None) -> None:
    crowd = _attend([1, 700, 128, 129, 16], window=window)
    for i, length in enumerate([1, 700, 128, 129, 16]):
        np.testing.assert_array_equal(_attend([length], seed=i, window=window)[0], crowd[i])


@pytest.mark.parametrize("length", [34, 47])
def test_scores_that_are_far_apart(length: int) -> None:
    """Weights down to nothing: the exponential's whole range, against one in double precision."""
    rng = np.random.default_rng(0)
    keys, values = (
        rng.standard_normal((16 * 3, 2, 2, 64)).astype(np.float32).reshape(3, 16, 2, 2, 64).transpose(2, 0, 1, 3, 4)
    )
    q = np.random.default_rng(1).standard_normal((1, 6, 64)).astype(np.float32) * 8
    cache = np.stack([keys, values], axis=1).reshape(3, 2, 16, 128)
    context = PagedContext(jnp.asarray(cache), jnp.arange(3, dtype=jnp.int32)[None])
    out = native.attend(jnp.asarray(q), jnp.array([length], jnp.int32), context)
    k, v = (half.reshape(48, 2, 64)[:length].astype(np.float64).repeat(3, axis=1) for half in (keys, values))
    scores = np.einsum("nd,tnd->nt", q[0].astype(np.float64), k)
    assert scores.max() - scores.min() > 200
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    want = np.einsum("nt,tnd->nd", weights / weights.sum(axis=1, keepdims=True), v)
    np.testing.assert_allclose(out[0], want, rtol=2e-5, atol=2e-6)


def test_attention_of_prompts_and_their_parts() -> None:
    check_prompts()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_attention_to_pages_of_8_bits(dtype: str) -> None:
    """Each of the format's finite numbers, with scales of several magnitudes, against double precision."""
    rng = np.random.default_rng(0)
    codes = np.array([code for code in range(256) if code not in ((127, 255) if dtype != "int8" else (128,))], np.uint8)
    values = rng.permutation(np.resize(codes, 3 * 2 * 16 * 2 * 64)).view(jnp.dtype(dtype)).reshape(3, 2, 16, 128)
    scales = 2.0 ** rng.integers(-12, -8, (3, 2, 16, 2)).astype(np.float32)
    q = rng.standard_normal((1, 6, 64)).astype(np.float32)
    table = jnp.arange(3, dtype=jnp.int32)[None]
    context = PagedContext(jnp.asarray(values), table, scales=jnp.asarray(scales))
    out = native.attend(jnp.asarray(q), jnp.array([47], jnp.int32), context)
    numbers = values.astype(np.float64).reshape(3, 2, 16, 2, 64) * scales[..., None]
    k, v = (numbers[:, half].reshape(48, 2, 64)[:47].repeat(3, axis=1) for half in (0, 1))
    weights = np.exp(np.einsum("nd,tnd->nt", q[0].astype(np.float64), k))
    want = np.einsum("nt,tnd->nd", weights / weights.sum(axis=1, keepdims=True), v)
    np.testing.assert_allclose(out[0], want, rtol=2e-5, atol=2e-6)


# --- building


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
@pytest.mark.parametrize(
    "level", ["x86-64", *(pytest.param(v, marks=pytest.mark.slow) for v in ("x86-64-v3", "x86-64-v4"))]
)
def test_every_instruction_set(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processors' code, as far as this one runs it: the same tests with registers of another width. Nothing here
    is jitted by a name that a jit has seen."""
    features = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if {"x86-64-v3": "avx2", "x86-64-v4": "avx512bw"}.get(level, "") not in features:
        pytest.skip(f"this processor is no {level}")
    flags = [f"-march={level}" if flag == "-march=native" else flag for flag in builder.FLAGS]
    library = ctypes.CDLL(str(builder.build(tmp_path, [*flags, "-Wall", "-Wextra", "-Werror"])))
    for name in ("_MATMUL", "_MATMUL_FEW", "_GROUPED", "_GROUPED_FEW", "_ATTEND", "_ATTEND_PROMPTS"):
        target = f"{getattr(native, name)}_{level}"
        symbol = getattr(library, getattr(native, name))
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(symbol), platform="cpu")
        monkeypatch.setattr(native, name, target)
    assert library.jaxserve_rounds() == (level != "x86-64")  # no level has AVX512_BF16
    _check_kernels()


@pytest.mark.slow
@pytest.mark.parametrize("march", ["armv8-a", "armv8.2-a+dotprod", "armv8.4-a+sve+bf16+i8mm"])
def test_every_instruction_set_of_aarch64(march: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.use(monkeypatch, tmp_path, march)
    _check_kernels()


def _check_kernels() -> None:
    for shape in SHAPES:
        test_matmul_is_numpys(shape)
    test_matmul_few_is_numpys(100, 200)
    test_a_row_has_the_same_bits_alone_and_among_others()
    for tokens in (1, 8, 20, 40):
        test_a_bfloat16_weight_has_the_bits_of_the_float32_one(tokens)
    test_groups_have_the_bits_of_products_alone("int8", few=True)
    for kind in ("int8", "fp8", "int4", "mxfp4"):
        check_bits(kind, True, ((25, 64, 32), (61, 192, 64)), (1, 8, 17))
    check_bits("int8", True, ((25, 96, 16),), (1, 8, 17))
    for dtype in ("int8", "float8_e4m3fn"):
        test_attention_to_pages_of_8_bits(dtype)
    for length in (34, 47):
        test_scores_that_are_far_apart(length)
    check_prompts()
