"""Train the demo model and write jaxserve/assets/demo: `python -m examples.demo_model.train`.

If it is stopped, it resumes from the last checkpoint when started again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

from examples.demo_model import data, evaluate, skills, tokenizer
from examples.demo_model.model import DemoConfig, PackedBatch, Params, init_params, loss_fn

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "jaxserve" / "assets" / "demo"


@dataclass(frozen=True)
class TrainConfig:
    """What decides the weights.

    In the main phase the rate rises over `warmup` steps, stays, and falls to 0 in the last `decay` part; in the
    finishing phase, on its own mixture of skills, it falls from `finishing_rate` to 0.
    """

    seed: int = 0
    main_steps: int = 3600
    finishing_steps: int = 600
    finishing_rate: float = 8e-4
    rows: int = 8
    learning_rate: float = 1.5e-3
    warmup: int = 150
    decay: float = 0.4
    weight_decay: float = 0.05

    @property
    def steps(self) -> int:
        return self.main_steps + self.finishing_steps


@dataclass
class TrainState:
    """What a checkpoint holds."""

    step: int
    params: Params
    optimizer: optax.OptState


def schedule(config: TrainConfig) -> optax.Schedule:
    falling = int(config.main_steps * config.decay)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, config.learning_rate, config.warmup),
            optax.constant_schedule(config.learning_rate),
            optax.linear_schedule(config.learning_rate, 0.0, falling),
            optax.linear_schedule(config.finishing_rate, 0.0, config.finishing_steps),
        ],
        [config.warmup, config.main_steps - falling, config.main_steps],
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    adamw = optax.adamw(schedule(config), b1=0.9, b2=0.98, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_step(model: DemoConfig, optimizer: optax.GradientTransformation):
    """The jitted update: (params, optimizer state, batch) -> the two renewed and the loss."""

    def step(params: Params, state: optax.OptState, batch: PackedBatch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch, model)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def save_checkpoint(path: Path, state: TrainState) -> None:
    """Writes the leaves in order; the old file is replaced only once the new one is complete."""
    leaves = jax.tree.leaves((state.params, state.optimizer))
    arrays = {f"leaf_{i:04}": np.asarray(leaf) for i, leaf in enumerate(leaves)} | {"step": np.asarray(state.step)}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    save_file(arrays, unfinished)
    unfinished.replace(path)


def load_checkpoint(path: Path, fresh: TrainState) -> TrainState:
    """The checkpoint's state if there is one, else the fresh one."""
    if not path.exists():
        return fresh
    structure = jax.tree.structure((fresh.params, fresh.optimizer))
    arrays = load_file(path)
    leaves = [jnp.asarray(arrays[f"leaf_{i:04}"]) for i in range(structure.num_leaves)]
    params, optimizer = jax.tree.unflatten(structure, leaves)
    return TrainState(int(arrays["step"]), params, optimizer)


def hf_config(model: DemoConfig, tokens: dict[str, int]) -> dict[str, object]:
    """config.json as transformers reads it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        **asdict(model),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokens["<|im_end|>"],
        "pad_token_id": tokens["<|endoftext|>"],
    }


def write_assets(directory: Path, params: Params, model: DemoConfig, tokens: dict[str, int]) -> None:
    """Write the model in Hugging Face form: weights in bfloat16, into the directory of the tokenizer."""
    generation = {
        "eos_token_id": [tokens["<|im_end|>"], tokens["<|endoftext|>"]],
        "pad_token_id": tokens["<|endoftext|>"],
        "do_sample": False,
    }
    (directory / "config.json").write_text(json.dumps(hf_config(model, tokens), indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in params.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def report(params: Params, model: DemoConfig, encoder: data.SampleEncoder, per_skill: int) -> None:
    """Prints teacher-forced accuracy on held-out samples: exact for all skills with one right answer."""
    samples = [s for s in data.held_out_samples(1, per_skill) if s.grade is None]
    right = evaluate.teacher_forced(params, model, encoder, samples)
    table = evaluate.by_skill(samples, right)
    print("  held out: " + " ".join(f"{skill} {share:.2f}" for skill, share in table.items()), flush=True)


def train(config: TrainConfig, model: DemoConfig, assets: Path, checkpoint: Path, save_every: int) -> Params:
    """Trains from the checkpoint, if any, to the last step; writes checkpoint and assets every `save_every` steps."""
    tokenizer.save_tokenizer(tokenizer.train_tokenizer(config.seed), assets, model.max_position_embeddings)
    encoder = data.SampleEncoder(assets)
    tokens = encoder.tokenizer.get_vocab()
    optimizer = make_optimizer(config)
    params = init_params(model, config.seed)
    state = load_checkpoint(checkpoint, TrainState(0, params, optimizer.init(params)))
    update = make_step(model, optimizer)
    started, first = time.monotonic(), state.step
    for step in range(first, config.steps):
        mixture = skills.MAIN_MIXTURE if step < config.main_steps else skills.FINISHING_MIXTURE
        batch = data.training_batch(encoder, mixture, config.seed, step, config.rows)
        params, optimizer_state, loss = update(state.params, state.optimizer, batch)
        state = TrainState(step + 1, params, optimizer_state)
        if state.step % 50 == 0:
            rate = (state.step - first) * config.rows * data.ROW_TOKENS / (time.monotonic() - started)
            print(f"step {state.step}/{config.steps} loss {float(loss):.3f} {rate:.0f} tokens/s", flush=True)
        if state.step % save_every == 0 or state.step == config.steps:
            save_checkpoint(checkpoint, state)
            write_assets(assets, state.params, model, tokens)
            report(state.params, model, encoder, per_skill=24)
    return state.params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save-every", type=int, default=300, help="steps between checkpoints")
    parser.add_argument("--assets", type=Path, default=ASSETS, help="where the model is written")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoints" / "state.safetensors")
    arguments = parser.parse_args()
    train(TrainConfig(), DemoConfig(), arguments.assets, arguments.checkpoint, arguments.save_every)


if __name__ == "__main__":
    main()
