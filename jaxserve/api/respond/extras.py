"""Write the extra outputs of tokens in their wire forms. api/tasks/extras.py reads which are requested."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from jaxserve.api.respond.growing_json import GrowingArray
from jaxserve.api.respond.logprobs import floor
from jaxserve.api.tasks.extras import SamplingMode
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.extras import SamplingMask, TokenExtras


def extras_of(output: RequestOutput) -> TokenExtras:
    """Return the output's extras, without a value if there are none."""
    return output.extras or TokenExtras()


def last_vector(output: RequestOutput) -> list[float] | None:
    """Return the hidden state that the output's last token was sampled from, float32 [D]."""
    vectors = hidden_vectors(output)
    return vectors[-1].tolist() if len(vectors) else None


def hidden_vectors(output: RequestOutput) -> np.ndarray:
    """Return the hidden state of each token: float32 [tokens, D]."""
    return matrix(extras_of(output).hidden_states, len(output.token_ids))


def matrix(data: bytes | None, rows: int) -> np.ndarray:
    """Decode the bytes of float32 [rows, D]; [0, 0] if there are none."""
    return np.zeros((0, 0), np.float32) if not data else np.frombuffer(data, "<f4").reshape(rows, -1)


class Candidates:
    """SGLang's sampling mask of one choice, token by token. A token that was not sampled has no candidates.

    mode: "support" returns the log-probabilities of all candidates, else only that of the chosen token
    """

    def __init__(self, mode: SamplingMode | None) -> None:
        self._mode = mode
        self._masks, self._logprobs = GrowingArray(), GrowingArray()

    def note(self, output: RequestOutput) -> None:
        found = extras_of(output).sampling_masks or [None] * len(output.token_ids)
        self._masks.extend([None if each is None else each.ids for each in found])
        self._logprobs.extend([None if each is None else self._values(each) for each in found])

    def _values(self, mask: SamplingMask) -> float | list[float]:
        return _floored(mask.logprobs) if self._mode == "support" else floor(mask.logprob)

    def clear(self) -> None:
        self._masks.clear()
        self._logprobs.clear()

    def as_dict(self) -> dict[str, Any]:
        """Return values that orjson encodes."""
        return {
            "output_token_sampling_mask": self._masks.fragment,
            "output_token_sampling_logprobs": self._logprobs.fragment,
        }


class RoutedExperts:
    """The experts of one choice, for every token except the last, which has not been fed to the model."""

    def __init__(self) -> None:
        self._prompt = b""
        # of the token before each output token; the first belongs to the prompt's last token
        self._output = bytearray()

    def note(self, output: RequestOutput) -> None:
        extras = extras_of(output)
        self._prompt = extras.prompt_routed_experts or self._prompt
        self._output += extras.routed_experts or b""

    def encoded(self, start: int, num_prompt_tokens: int) -> str:
        """Encode as SGLang does: base64 of int32 [tokens from `start` on, sparse layers, experts per token]."""
        size = len(self._prompt) // num_prompt_tokens
        return base64.b64encode((self._prompt + self._output[size:])[start * size :]).decode()


def _floored(values: list[float]) -> list[float]:
    return [floor(value) for value in values]
