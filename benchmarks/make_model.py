"""Make a model directory with random weights and a real tokenizer, in the published form.

    python -m benchmarks.make_model DIR [--hidden 1024 --layers 16 ...] [--tokenizer TOKENIZER_DIR]
    python -m benchmarks.make_model DIR --widen 2 --layers 24
    python -m benchmarks.make_model DIR --published Qwen3.5-0.8B --dtype bfloat16

The default is a Llama of about 190M parameters. Any server that reads Hugging Face directories can serve it.

--widen N: the demo model with rows, heads and intermediate sizes N times as wide and with more layers. What was added
contributes nothing, so it writes the demo model's texts, at the cost of a model of that size.

--published takes the widths of a model of tests/models/published.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.tokenizer_files import copy_tokenizer
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.structure import build
from jaxserve.models.tensor_names import published_names
from tests.models.published import PUBLISHED

STDDEV = 0.02


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama."""

    hidden: int = 1024
    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    ffn: int = 2816
    vocab: int = 8192
    context: int = 16384

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of every tensor of the checkpoint."""
        d, kv = self.hidden, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, d)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (d,)
            yield f"{layer}.post_attention_layernorm.weight", (d,)
            yield f"{layer}.self_attn.q_proj.weight", (d, d)
            yield f"{layer}.self_attn.k_proj.weight", (kv, d)
            yield f"{layer}.self_attn.v_proj.weight", (kv, d)
            yield f"{layer}.self_attn.o_proj.weight", (d, d)
            yield f"{layer}.mlp.gate_proj.weight", (self.ffn, d)
            yield f"{layer}.mlp.up_proj.weight", (self.ffn, d)
            yield f"{layer}.mlp.down_proj.weight", (d, self.ffn)
        yield "model.norm.weight", (d,)

    def config(self, dtype: str) -> dict[str, object]:
        """Return its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": dtype,
        }


@dataclass(frozen=True)
class PublishedShape:
    """Dimensions of a published model. name: in PUBLISHED. model_type: of config.json, which other servers read"""

    name: str
    model_type: str

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the published name and the shape of every tensor of the checkpoint."""
        config = from_hf(PUBLISHED[self.name].hf)
        parts = {part.name: part for spec in build(config, jnp.dtype("float32")).specs for part in spec.parts}
        for name, part in parts.items():
            yield published_names(name, config.tensor_names)[-1], part.shape

    def config(self, dtype: str) -> dict[str, object]:
        """Return its config.json."""
        return PUBLISHED[self.name].hf | {"model_type": self.model_type, "dtype": dtype, "eos_token_id": 1}


_MODEL_TYPES = {
    "Qwen3.5-0.8B": "qwen3_5_text",
    "Qwen3.5-9B": "qwen3_5_text",
    "LFM2-1.2B": "lfm2",
    "Falcon-H1-0.5B": "falcon_h1",
}


def make_model(
    directory: Path, shape: Shape | PublishedShape, *, dtype: str = "float32", tokenizer: Path | None = None
) -> None:
    """Write config.json, model.safetensors and the files of a tokenizer, by default the demo model's."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config(dtype), indent=2))
    rng = np.random.default_rng(0)
    target = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors = {name: _draw(rng, size).astype(target) for name, size in shape.tensors()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    copy_tokenizer(directory, tokenizer)


def widen(directory: Path, factor: int, layers: int) -> int:
    """Write the demo model with `factor` times its width and with `layers` layers. Returns the number of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(directory)
    with as_file(files("jaxserve") / "assets" / "demo") as demo:
        hf = json.loads((demo / "config.json").read_text())
        tensors = {name: value.astype(np.float32) for name, value in load_file(demo / "model.safetensors").items()}
        shutil.copyfile(demo / "generation_config.json", directory / "generation_config.json")
    wider = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {name: factor * hf[name] for name in wider} | {"num_hidden_layers": layers, "torch_dtype": "float32"}
    # the mean of squares is over more numbers
    changed = hf | sizes | {"rms_norm_eps": hf["rms_norm_eps"] / factor}
    rng, made = np.random.default_rng(0), dict[str, np.ndarray]()
    for layer in range(layers):
        for name in (each for each in tensors if each.startswith("model.layers.0.")):
            own = name.replace("layers.0.", f"layers.{layer}.")
            made[own] = _widened(tensors.get(own), tensors[name].shape, factor, rng)
            if layer >= hf["num_hidden_layers"] and ("o_proj" in name or "down_proj" in name):
                made[own][:] = 0  # the layer changes nothing
    norm, embeddings = "model.norm.weight", "model.embed_tokens.weight"
    made[norm] = _widened(tensors[norm], tensors[norm].shape, factor, rng)
    width = tensors[embeddings].shape[1]
    made[embeddings] = np.pad(tensors[embeddings], ((0, 0), (0, (factor - 1) * width)))
    (directory / "config.json").write_text(json.dumps(changed, indent=2))
    save_file(made, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.size for tensor in made.values())


def _widened(own: np.ndarray | None, shape: tuple[int, ...], factor: int, rng: np.random.Generator) -> np.ndarray:
    """Return a weight of `factor` times the shape, whose first part is `own`. None: random numbers."""
    made = np.zeros([factor * size for size in shape], np.float32)
    if len(shape) == 1:
        made[:] = 1
        made[: shape[0]] = 1 if own is None else own / np.sqrt(np.float32(factor))
    elif own is None:
        made[:] = _draw(rng, made.shape)
    else:
        made[: shape[0], : shape[1]] = own
    return made


def _draw(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    if len(size) == 1:
        return np.ones(size, np.float32)
    return rng.standard_normal(size, dtype=np.float32) * np.float32(STDDEV)


def main() -> None:
    """Make the model that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--widen", type=int, help="of the demo model; with --layers and nothing else")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    default = Shape()
    names = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "context")
    parser.add_argument("--published", choices=_MODEL_TYPES)
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    options = parser.parse_args()
    if options.widen is not None:
        count = widen(options.directory, options.widen, options.layers)
        return print(f"{options.directory}: {count / 1e6:.0f}M parameters, the texts of the demo model")
    shape: Shape | PublishedShape = Shape(**{name: getattr(options, name) for name in names})
    if options.published:
        shape = PublishedShape(options.published, _MODEL_TYPES[options.published])
    make_model(options.directory, shape, dtype=options.dtype, tokenizer=options.tokenizer)
    count = sum(int(np.prod(size)) for _, size in shape.tensors())
    print(f"{options.directory}: {count / 1e6:.0f}M parameters, {options.dtype}")


if __name__ == "__main__":
    main()
