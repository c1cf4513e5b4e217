"""The rollout of Tunix (google/tunix) over an Engine of this process: what its BaseRollout asks for, by its names.

    from tunix.rl.rollout.base_rollout import BaseRollout
    BaseRollout.register(EngineRollout)

Tunix itself is not imported. It was not run with this class; the interface is that of its base_rollout.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import Completion, Engine, SamplingParams


@dataclass
class Rollout:
    """Generated samples: the fields of Tunix's RolloutOutput.

    text: one a prompt. tokens: int32 [B, T], padded on the right. left_padded_prompt_tokens: int32 [B, P].
    logprobs: of the sampled tokens, at temperature 1, one array a sample. logits: none; they stay on the device
    """

    text: list[str]
    tokens: np.ndarray
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray]
    logits: None = None


class EngineRollout:
    """engine: serves the model that is trained. pad: a token id for places without a token"""

    def __init__(self, engine: Engine, pad: int = 0, **_: Any) -> None:
        self._engine = engine
        self._pad = pad

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> Rollout:
        """Generate one sample for each prompt. rollout_config: an object with the fields of Tunix's RolloutConfig."""
        config, tokenizer = rollout_config, self._engine.tokenizer
        token_ids = [tokenizer.encode(prompt)[-config.max_prompt_length :] for prompt in prompts]
        seed = None if config.seed is None else int(np.asarray(jax.random.key_data(config.seed)).ravel()[-1])
        params = [
            SamplingParams(
                max_tokens=config.max_tokens_to_generate,
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=0 if config.top_k in (None, -1) else config.top_k,
                seed=None if seed is None else seed + number,
                stop_token_ids=tuple(config.eos_tokens or ()),
                logprobs=0,
            )
            for number in range(len(prompts))
        ]
        samples = [sample for [sample] in self._engine.generate(token_ids, params)]
        longest = max((len(sample.token_ids) for sample in samples), default=0)
        return Rollout(
            text=[sample.text for sample in samples],
            tokens=np.array([padded(sample.token_ids, longest, self._pad) for sample in samples], np.int32),
            left_padded_prompt_tokens=np.array(
                [padded(ids, config.max_prompt_length, self._pad, left=True) for ids in token_ids], np.int32
            ),
            logprobs=[logprobs_of(sample) for sample in samples],
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array, completion_mask: jax.Array | None = None
    ) -> jax.Array:
        """Return the log-probabilities of given tokens, float32 [B, T]; 0 where there is no token.

        prompt_tokens: int32 [B, P], padded on the left. completion_tokens: int32 [B, T]. completion_mask: bool [B, T]
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        masks = completions != self._pad if completion_mask is None else np.asarray(completion_mask, bool)
        rows = [
            (prompt[np.argmax(prompt != self._pad) :].tolist(), completion[mask].tolist())
            for prompt, completion, mask in zip(prompts, completions, masks, strict=True)
        ]
        scored = self._engine.generate(
            [[*prompt, *completion] for prompt, completion in rows], SamplingParams(max_tokens=0, prompt_logprobs=0)
        )
        out = np.zeros(completions.shape, np.float32)
        for values, mask, (prompt, completion), [sample] in zip(out, masks, rows, scored, strict=True):
            entries = (sample.prompt_logprobs or [])[len(prompt) : len(prompt) + len(completion)]
            values[mask] = [entry.logprob for entry in entries if entry is not None]
        return jnp.asarray(out)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Serve other weights from now on; params: see `Engine.update_weights`. Raises ValueError for a filter."""
        if filter_types is not None:
            raise ValueError("filter_types is not supported: all weights are replaced")
        self._engine.update_weights(params)

    def pad_id(self) -> int:
        return self._pad

    def eos_id(self) -> int:
        return self._engine.info.eos_token_ids[0]

    def model(self) -> Any:
        """Return the structure of the model: its parameters' names, shapes and dtypes."""
        return self._engine.runner.structure


def padded(token_ids: list[int], length: int, pad: int, *, left: bool = False) -> list[int]:
    rest = [pad] * (length - len(token_ids))
    return [*rest, *token_ids] if left else [*token_ids, *rest]


def logprobs_of(sample: Completion) -> np.ndarray:
    """Return the log-probabilities of the sampled tokens, float32 [n]."""
    return np.array([entry.logprob for entry in sample.logprobs or []], np.float32)
