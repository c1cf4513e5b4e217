"""Admission: what a SlotInit says is what the slot holds."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.sampling import slots
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import SlotInit
from tests.runtime.slot_states import empty_state

S, V = 20, 70


def init(slot: int, params: SamplingParams, *, seed: int = 0, tokens: int = 5, prompt: int = 3) -> SlotInit:
    return SlotInit(slot, params, seed, prompt, list(range(tokens)), (1,))


def test_fields_arrive_in_groups() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        min_tokens=7,
        logit_bias={3: 1.0},
    )
    inits = [init(slot, params, seed=2**64 - 2 - slot) for slot in range(11)]
    groups = list(slots.pack_admit(inits, S))
    assert len(groups) == 2
    state = empty_state(S, V, 2)
    for group in groups:
        state = slots.admit(state, jnp.asarray(group))
    assert state.seed[10].tolist() == [2**32 - 12, 2**32 - 1]
    expected = {"temperature": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.5,
                "frequency_penalty": -0.5, "presence_penalty": 0.25, "min_tokens": 7, "num_outputs": 2,
                "num_bias": 1, "has_allow": 0}  # fmt: skip
    for name, value in expected.items():
        assert getattr(state, name)[:11].tolist() == [value] * 11, name
        assert getattr(state, name)[11:].tolist() == [0] * 9, name


def test_values_beyond_int32_are_held_to_it() -> None:
    packed = next(slots.pack_admit([init(0, SamplingParams(top_k=2**40))], S))
    assert slots.admit(empty_state(S, V, 2), jnp.asarray(packed)).top_k[0] == 2**31 - 1


def test_admission_clears_the_counts_of_the_slot_alone() -> None:
    state = empty_state(S, V, 2)
    state = state.replace(token_counts=state.token_counts + 1, in_prompt=~state.in_prompt)
    state = slots.admit(state, jnp.asarray(next(slots.pack_admit([init(4, SamplingParams())], S))))
    assert np.asarray(state.token_counts).sum(axis=1).tolist() == [0 if slot == 4 else V for slot in range(S)]
    assert np.asarray(state.in_prompt).all(axis=1).tolist() == [slot != 4 for slot in range(S)]


def test_bits() -> None:
    words = slots.pack_bits([0, 31, 32, 69], V, allow=True)
    assert words.view(np.uint32).tolist() == [0x80000001, 1, 32]
    banned = slots.pack_bits([0, 31, 32, 69, 500, -1], V, allow=False).view(np.uint32)
    assert [int(a ^ b) for a, b in zip(banned, words.view(np.uint32), strict=True)] == [2**32 - 1] * 3


def test_a_plain_request_sends_nothing_but_its_fields() -> None:
    plain = init(0, SamplingParams(temperature=0.7, top_p=0.9))
    assert slots.pack_masks(plain, V) is None and slots.pack_bias(plain) is None
    assert list(slots.pack_tokens(plain)) == []


def test_state_bytes_are_those_of_the_arrays() -> None:
    arrays = jax.tree.leaves(empty_state(S, V, 3))
    assert slots.state_bytes(S, V, 3) == sum(array.nbytes for array in arrays)
