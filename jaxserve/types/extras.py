"""Extra outputs per token, which few requests ask for: as they are asked for, made by a step, and sent.

The runtime makes a StepExtras, the scheduler turns it into the TokenExtras of each request, and the writers of the API
read these. Everything between passes them on. A new extra output is a field of these classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.types.bounds import Int32

MAX_LOGPROB_IDS = 128  # token ids whose log-probabilities a request may ask for; the size of the device's array

MAX_CANDIDATES = 256  # most candidates of one token that are returned

HiddenStates = Literal["", "last", "all"]


class ExtraParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The extra outputs that a request asks for. Each needs SamplingParams.logprobs of at least 0."""

    logprob_token_ids: tuple[Int32, ...] = ()  # return their log-probabilities at every position
    sampling_mask: bool = False  # return the candidates that each token was sampled from
    routed_experts: bool = False  # return the routed experts of each token, of a MoE model
    # return the hidden state that each token was sampled from; "all": the prompt's hidden states too
    hidden_states: HiddenStates = ""

    @property
    def wanted(self) -> bool:
        """Whether an extra output is asked for. Such rows are sampled by a program of their own."""
        return bool(self.logprob_token_ids or self.sampling_mask or self.routed_experts or self.hidden_states)

    @property
    def of_prompt(self) -> bool:
        """Whether a value of every token of the prompt is asked for."""
        return self.routed_experts or self.hidden_states == "all"


class SamplingMask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The candidates that one token was sampled from, after temperature, masks, top-k, top-p and min-p.

    Sorted by probability, highest first. Probabilities are renormalized: over all candidates they add up to 1.
    """

    logprob: float  # of the sampled token
    ids: list[int]
    logprobs: list[float]


class TokenExtras(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The extra outputs of the tokens of one output. Arrays are little-endian; the prompt's arrays are sent once.

    L is the number of MoE layers, K the number of routed experts per token.
    """

    sampling_masks: list[SamplingMask] | None = None  # aligned with the tokens
    hidden_states: bytes | None = None  # float32 [tokens, D]: the row that each token's logits were computed from
    prompt_hidden_states: bytes | None = None  # float32 [prompt tokens, D]
    routed_experts: bytes | None = None  # int32 [tokens, L, K]: the experts of the token before each token
    prompt_routed_experts: bytes | None = None  # int32 [prompt tokens, L, K]

    @classmethod
    def joined(cls, parts: Iterable[TokenExtras | None]) -> TokenExtras | None:
        """Join the extra outputs of successive outputs in linear time; None if there are none."""
        found = [part for part in parts if part is not None]
        if len(found) <= 1:
            return found[0] if found else None
        masks = [part.sampling_masks for part in found if part.sampling_masks is not None]
        return cls(
            sampling_masks=list(itertools.chain.from_iterable(masks)) if masks else None,
            hidden_states=_concatenated(part.hidden_states for part in found),
            prompt_hidden_states=_first(part.prompt_hidden_states for part in found),
            routed_experts=_concatenated(part.routed_experts for part in found),
            prompt_routed_experts=_first(part.prompt_routed_experts for part in found),
        )

    def first(self, used: int, count: int) -> TokenExtras:
        """Return the extra outputs of the first `used` of `count` tokens, and of the prompt."""
        return msgspec.structs.replace(
            self,
            sampling_masks=None if self.sampling_masks is None else self.sampling_masks[:used],
            hidden_states=_first_rows(self.hidden_states, used, count),
            routed_experts=_first_rows(self.routed_experts, used, count),
        )

    def held_bytes(self) -> int:
        """Return roughly how many bytes of memory this takes."""
        masks = sum(200 + 60 * len(mask.ids) for mask in self.sampling_masks or ())
        raw = (self.hidden_states, self.prompt_hidden_states, self.routed_experts, self.prompt_routed_experts)
        return masks + sum(len(each) for each in raw if each is not None)


def _concatenated(values: Iterable[bytes | None]) -> bytes | None:
    found = [value for value in values if value is not None]
    return b"".join(found) if found else None


def _first(values: Iterable[bytes | None]) -> bytes | None:
    return next((value for value in values if value is not None), None)


def _first_rows(data: bytes | None, used: int, count: int) -> bytes | None:
    return None if data is None else data[: len(data) // count * used]


class SamplingMasks(NamedTuple):
    """The sampling masks of R rows. At most C = min(MAX_CANDIDATES, V) candidates per token are returned."""

    logprobs: np.ndarray  # float32 [R], of the sampled token among its candidates
    counts: np.ndarray  # int32 [R], may exceed C
    ids: np.ndarray  # int32 [R, C], likeliest first
    top_logprobs: np.ndarray  # float32 [R, C], of `ids`

    def of_row(self, row: int) -> SamplingMask:
        """Return the mask of one row."""
        count = int(self.counts[row])
        ids, logprobs = self.ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist()
        return SamplingMask(float(self.logprobs[row]), ids, logprobs)


@dataclass(frozen=True, slots=True)
class StepExtras:
    """The extra outputs of a step of R rows on the host. Defined for the rows that ask for them; None: no row does."""

    id_logprobs: np.ndarray | None = None  # float32 [R, MAX_LOGPROB_IDS], of logprob_token_ids
    # row index -> float32 [n, MAX_LOGPROB_IDS], of the positions of SampledTokens.prompt_logprobs
    prompt_id_logprobs: Mapping[int, np.ndarray] | None = None
    sampling_masks: SamplingMasks | None = None
    hidden_states: Mapping[int, np.ndarray] | None = None  # row index -> float32 [n, D]: all its tokens, or the last
    routed_experts: Mapping[int, np.ndarray] | None = None  # row index -> int32 [n, L, K], of all its tokens

    def add_token(self, asked: ExtraParams, row: int, extras: TokenExtras) -> None:
        """Add the outputs that `asked` names of the last token of row `row` to `extras`, except log-probabilities."""
        if asked.sampling_mask:
            assert self.sampling_masks is not None
            extras.sampling_masks = [self.sampling_masks.of_row(row)]
        if asked.hidden_states and self.hidden_states is not None:
            extras.hidden_states = self.hidden_states[row][-1:].tobytes()
        if asked.routed_experts and self.routed_experts is not None:
            extras.routed_experts = self.routed_experts[row][-1:].tobytes()


class PromptExtras:
    """Collects the extra outputs of a request's prompt over its chunks.

    names: fields of StepExtras. TokenExtras has a field `prompt_NAME` for each.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._chunks: dict[str, dict[int, np.ndarray]] = {name: {} for name in names}  # first position -> [n, ...]

    @classmethod
    def of(cls, params: ExtraParams) -> PromptExtras | None:
        """Return a collector of the prompt outputs that `params` ask for; None if they ask for none."""
        asked = {"hidden_states": params.hidden_states == "all", "routed_experts": params.routed_experts}
        names = [name for name, wanted in asked.items() if wanted]
        return cls(names) if names else None

    def add(self, extras: StepExtras, row: int, start: int) -> None:
        """Keep the values of row `row`, whose first token has the position `start`."""
        for name, chunks in self._chunks.items():
            found: Mapping[int, np.ndarray] | None = getattr(extras, name)
            if found is not None and row in found:
                chunks[start] = found[row]

    def joined(self, num_prompt_tokens: int) -> TokenExtras:
        """Return the fields `prompt_NAME` of all prompt tokens."""
        extras = TokenExtras()
        for name, chunks in self._chunks.items():
            if chunks:
                setattr(extras, f"prompt_{name}", _whole(chunks, num_prompt_tokens).tobytes())
        return extras


def _whole(chunks: Mapping[int, np.ndarray], count: int) -> np.ndarray:
    """Join arrays [n, ...] by their first positions to [count, ...]. A later chunk may repeat or exceed the prompt."""
    first = next(iter(chunks.values()))
    whole = np.zeros((count, *first.shape[1:]), first.dtype)
    for start, chunk in chunks.items():
        whole[start : start + len(chunk)] = chunk[: max(0, count - start)]
    return whole
