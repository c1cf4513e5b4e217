"""Train a draft model, or an EAGLE-3 head, for the demo model in a few minutes on a CPU.

    python -m examples.draft_model DIRECTORY [--steps 400]
    python -m examples.draft_model DIRECTORY --head [--widen 2] [--steps 250]

Both learn the demo model's distribution of each next token (distillation, Hinton et al., 2015), on texts of the kinds
that it writes. The draft model is a fifth of its size, and DIRECTORY an ordinary checkpoint afterwards. Serve the demo
model with it:

    jaxserve launch --speculation.method draft_model --speculation.draft-model DIRECTORY

The head (https://arxiv.org/abs/2503.01840) reads the demo model's hidden states after three layers and guesses among
the VOCABULARY most frequent tokens. It is trained to guess DRAFTS tokens in a row. DIRECTORY has the published form:

    jaxserve launch --speculation.method eagle3 --speculation.draft-model DIRECTORY

--widen N makes a head for the model that `benchmarks.make_model --widen N` writes. Its hidden states are the demo
model's, and N - 1 times as many zeros.

Needs `pip install -e '.[train]'`. The last line says how often the most likely tokens of the two are the same, on
samples that no training has seen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import save_file

from examples.demo_model import data
from examples.demo_model import model as demo
from examples.demo_model.evaluate import load_params
from examples.demo_model.model import DemoConfig, PackedBatch, Params
from examples.demo_model.skills import SKILLS, Mixture
from examples.demo_model.train import ASSETS, hf_config, write_assets

TEACHER = DemoConfig()
# Drafts save time in long outputs, so these skills have the largest shares: lists, stories, JSON, tools.
MIXTURE = Mixture((0.05, 0.08, 0.05, 0.04, 0.03, 0.03, 0.20, 0.04, 0.18, 0.15, 0.06, 0.05, 0.03, 0.01))
ROWS, WARMUP = 4, 40
Loss = Callable[[Params, Params, PackedBatch], jax.Array]  # of the student, the teacher, a batch: a number


def distil(
    params: Params, loss: Loss, teacher: Params, batches: Sequence[PackedBatch], rate: float
) -> tuple[Params, list[float]]:
    """Train new weights on each batch once -> (the weights, the loss of each step). rate: the highest learning rate"""
    steps = len(batches)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(WARMUP, steps // 2), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.02))
    state = optimizer.init(params)

    @jax.jit
    def update(params: Params, state: optax.OptState, batch: PackedBatch):
        value, gradients = jax.value_and_grad(loss)(params, teacher, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    began, losses = time.monotonic(), []
    for step, batch in enumerate(batches):
        params, state, value = update(params, state, batch)
        losses.append(float(value))
        if (step + 1) % 25 == 0:
            print(f"step {step + 1}/{steps} loss {losses[-1]:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return params, losses


def batches_of(encoder: data.SampleEncoder, steps: int, seed: int = 1) -> list[PackedBatch]:
    """Return the batches of all steps."""
    return [data.training_batch(encoder, MIXTURE, seed, step, ROWS) for step in range(steps)]


# --- a draft model

SMALL = DemoConfig(
    hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
SMALL_RATE, SMALL_STEPS = 4e-3, 400


def logits_of(params: Params, batch: PackedBatch, places: jax.Array, model: DemoConfig) -> jax.Array:
    """Return the logits of the tokens at `places`, int32 [N], of a batch: float32 [N, V]."""
    tokens, segments, positions = (jnp.asarray(each) for each in (batch.tokens, batch.segments, batch.positions))
    hidden = demo.hidden_states(params, tokens, segments, positions, model).reshape(-1, model.hidden_size)[places]
    return hidden @ params["model.embed_tokens.weight"].T


def first_params(teacher: Params, seed: int) -> Params:
    """Return new weights. The embeddings are the teacher's, in their first principal directions."""
    params = demo.init_params(SMALL, seed)
    embeddings = np.asarray(teacher["model.embed_tokens.weight"])
    _, _, directions = np.linalg.svd(embeddings, full_matrices=False)
    return params | {"model.embed_tokens.weight": jnp.asarray(embeddings @ directions[: SMALL.hidden_size].T)}


def loss_fn(params: Params, teacher: Params, batch: PackedBatch) -> jax.Array:
    """Return the mean cross-entropy between the two models' next tokens of answers, in nats."""
    is_answer = (jnp.asarray(batch.weights) == 1.0).reshape(-1)
    places = jnp.nonzero(is_answer, size=is_answer.shape[0] // 2, fill_value=0)[0]
    wanted = jax.nn.softmax(logits_of(teacher, batch, places, TEACHER))
    losses = -jnp.sum(wanted * jax.nn.log_softmax(logits_of(params, batch, places, SMALL)), axis=-1)
    return jnp.sum(losses * is_answer[places]) / jnp.sum(is_answer[places])


@jax.jit
def same_token(params: Params, teacher: Params, batch: PackedBatch) -> jax.Array:
    """Return for each token of an answer whether the most likely tokens of both are the same; elsewhere nan: [B, T]."""
    places = jnp.arange(np.prod(batch.tokens.shape))
    own, wanted = logits_of(params, batch, places, SMALL), logits_of(teacher, batch, places, TEACHER)
    same = (jnp.argmax(own, axis=-1) == jnp.argmax(wanted, axis=-1)).reshape(batch.tokens.shape)
    return jnp.where(jnp.asarray(batch.weights) == 1.0, same, jnp.nan)


def write(directory: Path, params: Params, encoder: data.SampleEncoder) -> None:
    """Write a checkpoint with the demo model's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(ASSETS / name, directory / name)
    write_assets(directory, params, SMALL, encoder.tokenizer.get_vocab())


# --- an EAGLE-3 head

TAPS = (1, 2, 4)  # the layers after which it reads the teacher's hidden states
VOCABULARY = 768  # of 2048 tokens: 99.3 % of those of answers
DRAFTS, DISCOUNT = 4, 0.8  # guesses in a row, and the weight of each relative to the one before
LAST_STATE = 12.0  # root mean square of the teacher's hidden states after its last layer; the head begins with 1
HEAD_RATE, HEAD_STEPS = 2e-3, 250
LAYER = DemoConfig(num_hidden_layers=1, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)


@dataclass(frozen=True, eq=False)
class Head:
    """A head. tokens: int [V'], those it guesses."""

    tokens: np.ndarray

    def first_params(self, teacher: Params, seed: int) -> Params:
        """Return new weights: it begins with the teacher's last hidden state and has the teacher's output head."""
        size, rng = LAYER.hidden_size, np.random.default_rng(seed)
        params = {name.removeprefix("model."): p for name, p in demo.init_params(LAYER, seed).items()}
        layer = {name.replace("layers.0", "midlayer"): p for name, p in params.items() if name.startswith("layers.")}
        for name in ("q_proj", "k_proj", "v_proj"):  # of both halves
            part = layer[f"midlayer.self_attn.{name}.weight"]
            layer[f"midlayer.self_attn.{name}.weight"] = jnp.concatenate([part, part[::-1]], axis=1) / 2**0.5
        fused = rng.normal(0.0, 0.002, (size, 3 * size)) + np.eye(size, 3 * size, k=2 * size) / LAST_STATE
        return layer | {
            "fc.weight": jnp.asarray(fused, jnp.float32),
            "midlayer.hidden_norm.weight": jnp.ones(size),
            "norm.weight": teacher["model.norm.weight"],
            "lm_head.weight": teacher["model.embed_tokens.weight"][self.tokens],
        }

    def guesses(
        self, params: Params, teacher: Params, batch: PackedBatch
    ) -> Iterator[tuple[jax.Array, jax.Array, jax.Array]]:
        """Yield for each draft its logits [B, T, V'], the teacher's probabilities [B, T, V], where it counts [B, T].

        Draft k of place i is the token behind place i + 1 + k. The first one is made from the teacher's hidden states
        of place i and the token behind it, each other one from the head's own hidden state and one token more.
        The tokens of answers count.
        """
        eps = LAYER.rms_norm_eps
        arrays = batch.tokens, batch.segments, batch.positions, batch.weights == 1.0
        tokens, segments, positions, is_answer = (jnp.asarray(each) for each in arrays)
        states = demo.layer_outputs(teacher, tokens, segments, positions, TEACHER)
        hidden = jnp.concatenate([states[tap - 1] for tap in TAPS], axis=-1) @ params["fc.weight"].T
        last = demo.rms_norm(states[-1], teacher["model.norm.weight"], TEACHER.rms_norm_eps)
        wanted = jax.nn.softmax(last @ teacher["model.embed_tokens.weight"].T)
        embeddings = teacher["model.embed_tokens.weight"][tokens]
        start = "midlayer."
        w = {n.removeprefix(start).removesuffix(".weight"): p for n, p in params.items() if n.startswith(start)}
        bias, keys, values = demo.attention_bias(segments), list[jax.Array](), list[jax.Array]()
        b, t, _ = embeddings.shape
        kv, h = LAYER.num_key_value_heads, LAYER.head_dim
        place = jnp.arange(t)
        for draft in range(DRAFTS):
            ahead = 1 + draft
            there = (place + ahead < t)[None, :] & (jnp.roll(segments, -ahead, axis=1) == segments)
            x = demo.rms_norm(jnp.roll(embeddings, -ahead, axis=1), w["input_layernorm"], eps)
            joined = jnp.concatenate([x, demo.rms_norm(hidden, w["hidden_norm"], eps)], axis=-1)
            rope = demo.rope_tables(positions + draft, LAYER)
            q = demo.rotate((joined @ w["self_attn.q_proj"].T).reshape(b, t, -1, h), *rope).reshape(b, t, kv, -1, h)
            keys.append(demo.rotate((joined @ w["self_attn.k_proj"].T).reshape(b, t, kv, h), *rope))
            values.append((joined @ w["self_attn.v_proj"].T).reshape(b, t, kv, h))
            # a draft sees the places before it as they are after a step, and the drafts of its own place
            scores = [jnp.einsum("btkgh,bskh->bkgts", q, keys[0]) * h**-0.5 + bias]
            scores += [jnp.einsum("btkgh,btkh->bkgt", q, each)[..., None] * h**-0.5 for each in keys[1:]]
            weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
            out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :t], values[0])
            for number, each in enumerate(values[1:]):
                out += jnp.moveaxis(weights[..., t + number], 3, 1)[..., None] * each[:, :, :, None]
            hidden = hidden + out.reshape(b, t, -1) @ w["self_attn.o_proj"].T
            hidden = hidden + demo.mlp(demo.rms_norm(hidden, w["post_attention_layernorm"], eps), w)
            own = demo.rms_norm(hidden, params["norm.weight"], eps) @ params["lm_head.weight"].T
            yield own, jnp.roll(wanted, -ahead, axis=1), there & jnp.roll(is_answer, -ahead, axis=1)

    def loss(self, params: Params, teacher: Params, batch: PackedBatch) -> jax.Array:
        """Return the mean cross-entropy of the drafts, the later ones with less weight, in nats.

        The teacher's probability of the tokens that it cannot guess counts 0.
        """
        total, share = jnp.zeros(()), 1.0
        for own, wanted, counts in self.guesses(params, teacher, batch):
            losses = -jnp.sum(wanted[..., self.tokens] * jax.nn.log_softmax(own), axis=-1)
            total += share * jnp.mean(losses, where=counts)
            share *= DISCOUNT
        return total / sum(DISCOUNT**draft for draft in range(DRAFTS))

    def same_token(self, params: Params, teacher: Params, batch: PackedBatch) -> jax.Array:
        """Return for each place before an answer's token how many of the drafts, mean, are right; elsewhere nan."""
        found = []
        for own, wanted, counts in self.guesses(params, teacher, batch):
            same = jnp.asarray(self.tokens)[jnp.argmax(own, axis=-1)] == jnp.argmax(wanted, axis=-1)
            found.append(jnp.where(counts, same, jnp.nan))
        return jnp.nanmean(jnp.stack(found), axis=0)

    def write(self, directory: Path, params: Params, encoder: data.SampleEncoder, widen: int = 1) -> None:
        """Write it in the published form. widen: for a model whose hidden states are so many times as wide"""
        directory.mkdir(parents=True, exist_ok=True)
        own = {
            "hidden_size": widen * LAYER.hidden_size,
            "rms_norm_eps": LAYER.rms_norm_eps / widen,  # the mean of squares is over more numbers
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.tokens),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]},
            "tie_word_embeddings": False,
        }
        config = hf_config(LAYER, encoder.tokenizer.get_vocab()) | own
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: widened(name, np.asarray(p), widen).astype(ml_dtypes.bfloat16) for name, p in params.items()}
        tensors["d2t"] = self.tokens - np.arange(len(self.tokens))
        tensors["t2d"] = np.isin(np.arange(TEACHER.vocab_size), self.tokens)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def widened(name: str, weight: np.ndarray, factor: int) -> np.ndarray:
    """Return a weight for hidden states that are `factor` times as wide, of which all but the first part are 0."""
    size = LAYER.hidden_size
    more = (factor - 1) * size
    if weight.ndim == 1:  # of a norm
        return np.pad(weight / factor**0.5, (0, more))
    into_hidden = name.endswith(("fc.weight", "o_proj.weight", "down_proj.weight"))
    if not name.endswith(("o_proj.weight", "down_proj.weight")):  # it reads one or several rows side by side
        rows = weight.reshape(len(weight), -1, size)
        weight = np.pad(rows, ((0, 0), (0, 0), (0, more))).reshape(len(weight), -1)
    return np.pad(weight, ((0, more), (0, 0))) if into_hidden else weight


def frequent_tokens(batches: Sequence[PackedBatch]) -> np.ndarray:
    """Return the VOCABULARY tokens that answers have most often, ascending."""
    answers = np.concatenate([np.asarray(each.targets)[np.asarray(each.weights) == 1.0] for each in batches])
    counts = np.bincount(answers, minlength=TEACHER.vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:VOCABULARY])


# --- both


Same = Callable[[PackedBatch], jax.Array]  # see `same_token`


def agreement(same: Same, encoder: data.SampleEncoder, per_skill: int) -> dict[str, float]:
    """Return by skill how often two models' most likely tokens of held-out answers are the same."""
    found, samples = dict[str, float](), data.held_out_samples(2, per_skill)
    for skill in SKILLS:
        encoded = [encoder.encode(each) for each in samples if each.skill == skill]
        encoded = [each for each in encoded if len(each) <= data.ROW_TOKENS]
        batch = data.rows_of_one(encoded + [data.Encoded([0], [])] * (per_skill - len(encoded)))  # of one shape
        found[skill] = float(np.nanmean(same(batch)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--head", action="store_true", help="an EAGLE-3 head")
    parser.add_argument("--widen", type=int, help="with --head")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--per-skill", type=int, default=20, help="held-out samples of each skill")
    arguments = parser.parse_args()
    if arguments.widen is not None and not arguments.head:
        parser.error("--widen is for --head")
    teacher, encoder = load_params(ASSETS), data.SampleEncoder(ASSETS)
    batches = batches_of(encoder, arguments.steps or (HEAD_STEPS if arguments.head else SMALL_STEPS))
    if arguments.head:
        head = Head(frequent_tokens(batches))
        params, _ = distil(head.first_params(teacher, 0), head.loss, teacher, batches, HEAD_RATE)
        head.write(arguments.directory, params, encoder, arguments.widen or 1)
        same = jax.jit(head.same_token)
    else:
        params, _ = distil(first_params(teacher, 0), loss_fn, teacher, batches, SMALL_RATE)
        write(arguments.directory, params, encoder)
        same = same_token
    shares = agreement(lambda batch: same(params, teacher, batch), encoder, arguments.per_skill)
    print("the same token: " + ", ".join(f"{skill} {share:.2f}" for skill, share in shares.items()))


if __name__ == "__main__":
    main()
