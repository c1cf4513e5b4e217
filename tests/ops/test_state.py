"""Recurrent-state layers: one body for all backends and kinds, against the plain recurrence of `state_world`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.ops.state import StateBackend
from jaxserve.ops.state.base import Kind
from jaxserve.ops.state.native import NativeStates
from jaxserve.ops.state.reference import ReferenceStates
from jaxserve.ops.state.triton import TritonStates
from jaxserve.ops.state.xla import XlaStates
from tests.ops.state_world import Row, World, spec_of

BACKENDS: dict[str, StateBackend] = {
    "reference": ReferenceStates(),
    "xla": XlaStates(),
    "triton": TritonStates(columns=16, interpret=True),
}
with contextlib.suppress(ConfigError):  # a machine without a C compiler: test_native.py says so
    BACKENDS["native"] = NativeStates()
KINDS: tuple[Kind, ...] = ("delta", "channel_delta", "mamba2", "convolution")


def worlds(*interpreted: Kind) -> pytest.MarkDecorator:
    """Parametrize a test over all backends and kinds; the interpreted kernel's other kinds are in the slow tier.

    A case of the interpreted kernel takes 10 s to 40 s of one core, which is ten times what the other backends take.
    """
    cases = []
    for backend in BACKENDS:
        for kind in KINDS:
            marks = [pytest.mark.slow] if backend == "triton" and kind not in interpreted else []
            cases.append(pytest.param(backend, kind, marks=marks))
    return pytest.mark.parametrize(("backend", "kind"), cases)


@worlds("delta", "convolution")
def test_prompts_cut_anywhere_then_tokens(backend: str, kind: Kind) -> None:
    """Chunks that end at every place around 1, 63, 64 and 65, a crowd of them in one step, and one token at a time."""
    world = World(spec_of(kind), BACKENDS[backend])
    sequences = [world.sequence(150) for _ in range(4)]
    for cuts in ((1, 63, 64, 65), (63, 1, 65, 64), (2, 2, 2, 2)):
        world.step([Row(s, cut) for s, cut in zip(sequences, cuts, strict=True)])
    world.step([Row(s, 3, unsure=1) for s in sequences])
    for _ in range(3):
        world.step([Row(s, 1, unsure=1) for s in sequences], empty_rows=0, padding=0)


@worlds("mamba2")
def test_snapshots_begin_other_sequences(backend: str, kind: Kind) -> None:
    """A copy at 64 and 128 begins sequences with every short tail, in the step after the one that wrote it.

    The second one is of the last sure token. The first one is listed once more, and not written again.
    """
    world = World(spec_of(kind), BACKENDS[backend])
    first, pages = world.sequence(200), [world.free.pop() for _ in range(2)]
    world.step([Row(first, 65, emits=((64, pages[0]), (128, pages[1])))])
    world.step([Row(first, 64, unsure=1, emits=((64, pages[0]), (128, pages[1])))])
    for depth, page in zip((64, 128), pages, strict=True):
        others = [world.sequence(depth + 70, (first, depth, page)) for _ in range(3)]
        counts = (1, 2, 65)
        world.step([Row(s, n, unsure=1) for s, n in zip(others, counts, strict=True)])
        world.step([Row(s, 1, unsure=1) for s in others])
        world.free += [s.page for s in others]


@worlds("channel_delta")
def test_rows_that_come_again_change_nothing(backend: str, kind: Kind) -> None:
    world = World(spec_of(kind), BACKENDS[backend])
    s = world.sequence(100)
    world.step([Row(s, 66, unsure=1)], again=False)
    for _ in range(3):
        world.step([Row(s, 1, unsure=1)], again=True)


@worlds("mamba2")
def test_rejected_drafts_leave_no_trace(backend: str, kind: Kind) -> None:
    """Rows of a token and up to 3 drafts, of which any number is accepted: the next row begins behind those.

    The copy at 64 is of tokens that were all in the ring. It begins another sequence.
    """
    world = World(spec_of(kind), BACKENDS[backend], max_drafts=3)
    sequences, page = [world.sequence(120) for _ in range(3)], world.free.pop()
    world.step([Row(s, n, unsure=1) for s, n in zip(sequences, (5, 62, 1), strict=True)])
    for _ in range(7):
        rows = []
        for s in sequences:
            accepted = int(world.rng.integers(0, 4))
            rejected = int(world.rng.integers(0, 4 - accepted))
            emits = ((64, page),) if s is sequences[1] else ()
            rows.append(Row(s, 1 + accepted, unsure=1 + accepted, drafts=rejected, emits=emits))
        world.step(rows, padding=16 - sum(row.count + row.drafts for row in rows))  # of one shape, compiled once
    world.step([Row(world.sequence(70, (sequences[1], 64, page)), 3, unsure=1)])


@pytest.mark.parametrize("kind", ("delta", "channel_delta", "mamba2"))
def test_bits_do_not_depend_on_the_cuts(kind: Kind) -> None:
    """The C kernel: one chunk, any chunks beside other rows, and token by token give the same answers and states."""
    if "native" not in BACKENDS:
        pytest.skip("no C compiler")
    want: list[np.ndarray] = []
    for cuts in ((100,), (1, 63, 1, 35), (64, 36), (33,) + (1,) * 67):
        world = World(spec_of(kind, k_dim=32, v_dim=80), BACKENDS["native"], num_pages=4)
        s, other = world.sequence(100), world.sequence(100)
        out = [world.step([Row(s, n), Row(other, 1)] if s.computed % 2 else [Row(s, n)])[:n] for n in cuts]
        assert world.arrays.state is not None
        bits = np.concatenate([np.concatenate(out).ravel(), np.asarray(world.arrays.state[s.page]).ravel()])
        want = want or [bits]
        np.testing.assert_array_equal(bits, want[0])


def test_world_fails_if_a_state_is_wrong() -> None:
    """The oracle is not blind: a state of another page, or a fold too many, is found."""
    world = World(spec_of("delta"), ReferenceStates())
    s = world.sequence(20)
    world.step([Row(s, 5, unsure=1)])
    s.folded += 1
    with pytest.raises(AssertionError):
        world.step([Row(s, 1, unsure=1)])
    world = World(spec_of("delta"), ReferenceStates())
    s = world.sequence(20)
    world.step([Row(s, 5, unsure=1)])
    s.read = (s.page + 1) % world.num_pages
    with pytest.raises(AssertionError):
        world.step([Row(s, 1, unsure=1)])
    assert np.isnan(np.asarray(world.arrays.state)).any()
