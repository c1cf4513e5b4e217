"""Train a draft model for the demo model in a few minutes: `python -m examples.draft_model DIRECTORY [--steps 400]`.

It is a fifth of the demo model's size and learns the demo model's distribution of each next token (distillation,
Hinton et al., 2015). DIRECTORY is an ordinary checkpoint afterwards. Serve the demo model with it:

    jaxserve launch --speculation.method draft_model --speculation.draft-model DIRECTORY

Needs `pip install -e '.[train]'`. The last line says how often the most likely tokens of the two are the same, on
samples that no training has seen.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.demo_model import data
from examples.demo_model.evaluate import load_params
from examples.demo_model.model import DemoConfig, PackedBatch, Params, hidden_states, init_params
from examples.demo_model.skills import SKILLS, Mixture
from examples.demo_model.train import ASSETS, write_assets

SMALL = DemoConfig(
    hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
# Drafts save time in long outputs, so these skills have the largest shares: lists, stories, JSON, tools.
MIXTURE = Mixture((0.05, 0.08, 0.05, 0.04, 0.03, 0.03, 0.20, 0.04, 0.18, 0.15, 0.06, 0.05, 0.03, 0.01))
ROWS, LEARNING_RATE, WARMUP = 4, 4e-3, 40


def logits_of(params: Params, batch: PackedBatch, places: jax.Array, model: DemoConfig) -> jax.Array:
    """Return the logits of the tokens at `places`, int32 [N], of a batch: float32 [N, V]."""
    tokens, segments, positions = (jnp.asarray(each) for each in (batch.tokens, batch.segments, batch.positions))
    hidden = hidden_states(params, tokens, segments, positions, model).reshape(-1, model.hidden_size)[places]
    return hidden @ params["model.embed_tokens.weight"].T


def first_params(teacher: Params, seed: int) -> Params:
    """Return new weights. The embeddings are the teacher's, in their first principal directions."""
    params = init_params(SMALL, seed)
    embeddings = np.asarray(teacher["model.embed_tokens.weight"])
    _, _, directions = np.linalg.svd(embeddings, full_matrices=False)
    return params | {"model.embed_tokens.weight": jnp.asarray(embeddings @ directions[: SMALL.hidden_size].T)}


def loss_fn(params: Params, teacher: Params, batch: PackedBatch) -> jax.Array:
    """Return the mean cross-entropy between the two models' next tokens of answers, in nats."""
    is_answer = (jnp.asarray(batch.weights) == 1.0).reshape(-1)
    places = jnp.nonzero(is_answer, size=is_answer.shape[0] // 2, fill_value=0)[0]
    wanted = jax.nn.softmax(logits_of(teacher, batch, places, DemoConfig()))
    losses = -jnp.sum(wanted * jax.nn.log_softmax(logits_of(params, batch, places, SMALL)), axis=-1)
    return jnp.sum(losses * is_answer[places]) / jnp.sum(is_answer[places])


def distil(teacher: Params, encoder: data.SampleEncoder, steps: int, seed: int = 0) -> Params:
    """Train for `steps` batches."""
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, min(WARMUP, steps // 2), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=0.02))
    params = first_params(teacher, seed)
    state = optimizer.init(params)

    @jax.jit
    def update(params: Params, state: optax.OptState, batch: PackedBatch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, teacher, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    began = time.monotonic()
    for step in range(steps):
        batch = data.training_batch(encoder, MIXTURE, seed + 1, step, ROWS)
        params, state, loss = update(params, state, batch)
        if (step + 1) % 25 == 0:
            print(f"step {step + 1}/{steps} loss {float(loss):.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return params


@jax.jit
def _same_token(params: Params, teacher: Params, batch: PackedBatch) -> jax.Array:
    """Return bool [B, T]: whether the most likely next tokens of the two models are the same."""
    places = jnp.arange(np.prod(batch.tokens.shape))
    own, wanted = logits_of(params, batch, places, SMALL), logits_of(teacher, batch, places, DemoConfig())
    return (jnp.argmax(own, axis=-1) == jnp.argmax(wanted, axis=-1)).reshape(batch.tokens.shape)


def agreement(params: Params, teacher: Params, encoder: data.SampleEncoder, per_skill: int) -> dict[str, float]:
    """Return by skill how often the two models' most likely tokens of held-out answers are the same."""
    found, samples = dict[str, float](), data.held_out_samples(2, per_skill)
    for skill in SKILLS:
        encoded = [encoder.encode(each) for each in samples if each.skill == skill]
        encoded = [each for each in encoded if len(each) <= data.ROW_TOKENS]
        batch = data.rows_of_one(encoded + [data.Encoded([0], [])] * (per_skill - len(encoded)))  # of one shape
        same = np.asarray(_same_token(params, teacher, batch))
        found[skill] = float(same[np.asarray(batch.weights) == 1.0].mean())
    return found


def write(directory: Path, params: Params, encoder: data.SampleEncoder) -> None:
    """Write a checkpoint with the demo model's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(ASSETS / name, directory / name)
    write_assets(directory, params, SMALL, encoder.tokenizer.get_vocab())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--per-skill", type=int, default=20, help="held-out samples of each skill")
    arguments = parser.parse_args()
    teacher, encoder = load_params(ASSETS), data.SampleEncoder(ASSETS)
    params = distil(teacher, encoder, arguments.steps)
    write(arguments.directory, params, encoder)
    shares = agreement(params, teacher, encoder, arguments.per_skill)
    print("the same token: " + ", ".join(f"{skill} {share:.2f}" for skill, share in shares.items()))


if __name__ == "__main__":
    main()
