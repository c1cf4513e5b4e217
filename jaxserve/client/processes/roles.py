"""Which replicas compute prompts, which produce tokens, and which requests need both. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.types.sampling import SamplingParams

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class Roles:
    """How many replicas have which role, and for which prompts.

    num_prefill: replicas that only compute prompts, the first ones; 0: each replica does both

    min_tokens: a prompt with fewer tokens that are not cached is computed where its tokens are produced
    """

    num_prefill: int = 0
    min_tokens: int = 1

    @classmethod
    def of_config(cls, config: Config, count: int) -> Roles:
        """Return the roles of a server's `count` engines. One engine does both."""
        mesh = config.mesh
        return cls(mesh.prefill_replicas, mesh.prefill_min_tokens) if count > 1 else cls()

    def of(self, replica: int) -> Role:
        """Return the role of the replica with this index."""
        if not self.num_prefill:
            return "both"
        return "prefill" if replica < self.num_prefill else "decode"


def check_roles(config: Config) -> None:
    """Raise ConfigError if engines could pass no pages on."""
    if config.mesh.prefill_replicas and not config.cache.prefix_cache:
        raise ConfigError(
            "mesh.prefill_replicas passes pages from one prefix cache to another, and cache.prefix_cache is off",
            fix="leave one of them out",
        )


def ends_with_prompt(params: SamplingParams) -> bool:
    """Return whether the engine that computes the prompt also ends the request.

    It does if at most one token is asked for, or a value of every token of the prompt, which no page holds.
    """
    of_prompt = params.prompt_logprobs is not None or params.extras.of_prompt
    return params.embed or of_prompt or (params.max_tokens is not None and params.max_tokens <= 1)
