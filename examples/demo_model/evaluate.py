"""Measure the demo model's held-out accuracy, skill by skill: `python -m examples.demo_model.evaluate`.

An answer that has one right form is right when greedy decoding writes exactly it, the end token included; that is
so just when every token of it is the most likely one after the tokens before, so one forward pass tells. Lists,
stories and other free answers are decoded greedily and judged by the sample's own grade.
"""

from __future__ import annotations

import argparse
import functools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from examples.demo_model import data
from examples.demo_model.model import DemoConfig, PackedBatch, Params, forward
from examples.demo_model.skills import Sample

ROWS = 24
MAX_NEW_TOKENS = 140
# There is no cache: each step runs the whole rows, padded to a multiple of this many tokens.
WIDTH_STEP = 32


@functools.partial(jax.jit, static_argnames="model")
def _all_targets_first(params: Params, batch: PackedBatch, model: DemoConfig) -> jax.Array:
    """Return bool [B]: whether every target of weight 1 is the most likely token."""
    logits = forward(
        params, jnp.asarray(batch.tokens), jnp.asarray(batch.segments), jnp.asarray(batch.positions), model
    )
    hit = jnp.argmax(logits, axis=-1) == batch.targets
    return jnp.all(hit | (jnp.asarray(batch.weights) < 1.0), axis=1)


def teacher_forced(
    params: Params, model: DemoConfig, encoder: data.SampleEncoder, samples: Sequence[Sample]
) -> list[bool]:
    """Return whether greedy decoding gives each sample's expected answer."""
    encoded = [encoder.encode(sample) for sample in samples]
    encoded += [data.Encoded([0], [0])] * (-len(encoded) % ROWS)
    right: list[bool] = []
    for start in range(0, len(encoded), ROWS):
        batch = data.rows_of_one(encoded[start : start + ROWS])
        right += np.asarray(_all_targets_first(params, batch, model)).tolist()
    return right[: len(samples)]


@functools.partial(jax.jit, static_argnames="model")
def _next_tokens(params: Params, tokens: jax.Array, lengths: jax.Array, model: DemoConfig) -> jax.Array:
    """Return the most likely token [B] after the first `lengths` tokens of each row [B, T]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    logits = forward(params, tokens, jnp.ones_like(tokens), positions, model)
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return jnp.argmax(last, axis=-1)


def greedy(params: Params, model: DemoConfig, prompts: Sequence[list[int]], stop: set[int]) -> list[list[int]]:
    """Return the continuations of the prompts, with the stop token if it came within MAX_NEW_TOKENS."""
    tokens = np.zeros((len(prompts), max(map(len, prompts)) + MAX_NEW_TOKENS + WIDTH_STEP), np.int32)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    running = np.ones(len(prompts), bool)
    for _ in range(MAX_NEW_TOKENS):
        width = -(-int(lengths.max()) // WIDTH_STEP) * WIDTH_STEP
        # Copies: a dispatched array must not change under the device.
        chosen = np.asarray(_next_tokens(params, jnp.array(tokens[:, :width]), jnp.array(lengths), model))
        tokens[running, lengths[running]] = chosen[running]
        lengths[running] += 1
        running &= ~np.isin(chosen, list(stop))
        if not running.any():
            break
    return [tokens[row, len(prompt) : lengths[row]].tolist() for row, prompt in enumerate(prompts)]


def generated(
    params: Params, model: DemoConfig, encoder: data.SampleEncoder, samples: Sequence[Sample]
) -> list[str | None]:
    """Return each sample's greedy answer without its end token; None if it did not end."""
    vocabulary = encoder.tokenizer.get_vocab()
    stop = {vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"]}
    answers: list[str | None] = [None] * len(samples)
    prompts = [encoder.encode(sample).prompt for sample in samples]
    by_length = sorted(range(len(samples)), key=lambda i: len(prompts[i]))
    for start in range(0, len(samples), ROWS):
        chunk = by_length[start : start + ROWS]
        padded = chunk + chunk[:1] * (ROWS - len(chunk))
        for index, output in zip(chunk, greedy(params, model, [prompts[i] for i in padded], stop), strict=False):
            if output[-1] in stop:
                answers[index] = str(encoder.tokenizer.decode(output[:-1]))
    return answers


def graded(params: Params, model: DemoConfig, encoder: data.SampleEncoder, samples: Sequence[Sample]) -> list[bool]:
    """Return whether each sample is answered correctly, by its grade or by equality."""
    exact = [sample for sample in samples if sample.grade is None]
    free = [sample for sample in samples if sample.grade is not None]
    answers = generated(params, model, encoder, free)
    verdicts = {id(s): ok for s, ok in zip(exact, teacher_forced(params, model, encoder, exact), strict=True)}
    for sample, answer in zip(free, answers, strict=True):
        verdicts[id(sample)] = answer is not None and sample.grade is not None and sample.grade(answer)
    return [verdicts[id(sample)] for sample in samples]


def by_skill(samples: Sequence[Sample], right: Sequence[bool]) -> dict[str, float]:
    """Return the share of correct answers of each skill, in the samples' order, and of all."""
    marks: dict[str, list[bool]] = defaultdict(list)
    for sample, ok in zip(samples, right, strict=True):
        marks[sample.skill].append(ok)
    return {skill: sum(m) / len(m) for skill, m in marks.items()} | {"all": sum(right) / len(right)}


def load_params(directory: Path) -> Params:
    """Return the shipped weights in float32."""
    return {n: jnp.asarray(w.astype(np.float32)) for n, w in load_file(directory / "model.safetensors").items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[2] / "jaxserve" / "assets" / "demo"
    parser.add_argument("--assets", type=Path, default=default, help="directory of the model")
    parser.add_argument("--per-skill", type=int, default=100, help="held-out samples of each skill")
    parser.add_argument("--failures", type=int, default=0, help="wrong samples of each skill to print")
    arguments = parser.parse_args()
    encoder = data.SampleEncoder(arguments.assets)
    samples = data.held_out_samples(0, arguments.per_skill)
    samples = [sample for sample in samples if len(encoder.encode(sample)) <= data.ROW_TOKENS]
    right = graded(load_params(arguments.assets), DemoConfig(), encoder, samples)
    for skill, share in by_skill(samples, right).items():
        print(f"{skill:12} {share:6.1%}")
        wrong = [s for s, ok in zip(samples, right, strict=True) if s.skill == skill and not ok]
        for sample in wrong[: arguments.failures]:
            prompt, expected = encoder.texts(sample)
            written = generated(load_params(arguments.assets), DemoConfig(), encoder, [sample])[0]
            print(f"    {prompt[-160:]!r}\n      wanted {expected!r}\n      wrote  {written!r}")


if __name__ == "__main__":
    main()
