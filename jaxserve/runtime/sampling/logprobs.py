"""Log-probabilities of sampled, top and requested tokens, and candidates of a draw, packed for one copy to the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.sampling.vocab import WHOLE, Vocab
from jaxserve.types.extras import MAX_CANDIDATES

TOP_LOGPROBS = 20


def top_k_width(vocab_size: int) -> int:
    """Return K, the number of top log-probabilities."""
    return min(TOP_LOGPROBS, vocab_size)


def pack_logprobs_with_ids(
    logits: jax.Array, tokens: jax.Array, ids: jax.Array, vocab: Vocab = WHOLE
) -> tuple[jax.Array, jax.Array]:
    """Return packed `token_logprobs`, and the bits of the log-probabilities of `ids`.

    logits: float32 [R, V]. tokens: int32 [R]. ids: int32 [R, N]. Returns int32 [R, 2 + 2K] and [R, N].
    """
    norm = vocab.logsumexp(logits)
    chosen = vocab.take(logits, ids, mode="clip") - norm[:, None]
    return pack_logprobs(*token_logprobs(logits, tokens, norm, vocab)), jax.lax.bitcast_convert_type(chosen, jnp.int32)


def pack_candidates(probs: jax.Array, tokens: jax.Array, random: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """Return the candidates that each token was drawn from, likeliest first: int32 [R, 2 + 2K], K = min(256, V).

    probs: float32 [R, V], 0 if excluded. tokens: int32 [R]. random: bool [R]; a greedy row has one candidate.
    Packed as by `pack_logprobs`; the rank is the number of candidates, of which at most K are returned.
    """
    scale = jnp.log(vocab.sum(probs))
    top, ids = vocab.top_k(probs, min(MAX_CANDIDATES, vocab.size(probs)))
    count = vocab.sum(probs > 0, jnp.int32)
    chosen = vocab.take(probs, tokens[:, None])[:, 0]
    ids = jnp.where(random[:, None], ids.astype(jnp.int32), tokens[:, None])
    logprobs = jnp.where(random[:, None], jnp.log(top) - scale[:, None], 0)
    return pack_logprobs(jnp.where(random, jnp.log(chosen) - scale, 0), jnp.where(random, count, 1), ids, logprobs)


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, norm: jax.Array, vocab: Vocab = WHOLE
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (logprob float32 [R], rank int32 [R], top ids int32 [R, K], top logprobs float32 [R, K]).

    They are of the model's distribution, before penalties and masks. logits: float32 [R, V]. tokens: int32 [R].
    norm: float32 [R], logsumexp of the logits.
    """
    chosen = vocab.take(logits, tokens[:, None])
    rank = 1 + vocab.sum(logits > chosen, jnp.int32)
    top, ids = vocab.top_k(logits, top_k_width(vocab.size(logits)))
    return chosen[:, 0] - norm, rank, ids.astype(jnp.int32), top - norm[:, None]


def pack_logprobs(logprob: jax.Array, rank: jax.Array, ids: jax.Array, top: jax.Array) -> jax.Array:
    """Pack the four results of `token_logprobs` into int32 [R, 2 + 2K], so that one copy takes them to the host."""

    def bits(values: jax.Array) -> jax.Array:
        """View float32 [...] as int32."""
        return jax.lax.bitcast_convert_type(values, jnp.int32)

    return jnp.concatenate([bits(logprob)[:, None], rank[:, None], ids, bits(top)], axis=1)


def unpack_logprobs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Unpack int32 [R, 2 + 2K] on the host -> (logprobs [R], ranks [R], top ids [R, K], top logprobs [R, K])."""
    width = (packed.shape[1] - 2) // 2
    floats = packed.view(np.float32)
    return floats[:, 0], packed[:, 1], packed[:, 2 : 2 + width], floats[:, 2 + width :]
