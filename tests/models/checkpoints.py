"""Tiny random checkpoints in the published form, for tests that need files to load or to damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import build

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def random_tensors(hf: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors by checkpoint name."""
    rng = np.random.default_rng(seed)
    parts = [part for spec in build(from_hf(hf), jnp.dtype("float32")).specs for part in spec.parts]
    return {part.name: rng.normal(0, 0.2, part.shape).astype(np.float32) for part in parts}


def write_checkpoint(directory: Path, hf: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """config.json and one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_sharded(directory: Path, hf: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 2) -> Path:
    """config.json, several safetensors files and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def write_words(directory: Path, vocab_size: int) -> Path:
    """A tokenizer of the words w0, w1, ... with [CLS] and [SEP] around a text, as an encoder's is."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(4, vocab_size))]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    backend.add_special_tokens(words[:4])
    backend.post_processor = tokenizers.processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def train_tokenizer(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer of a kind: bytes (GPT-2's), pieces (Llama's BPE), unigram or words (BERT's)."""
    texts = ["user and assistant say hello to the world", "the system says no more than that"] * 4
    models, steps = tokenizers.models, tokenizers.pre_tokenizers
    trainers, special = tokenizers.trainers, ["<unk>", "<s>", "</s>"]
    backend, trainer, step, decoder = {
        "bytes": lambda: (
            tokenizers.Tokenizer(models.BPE()),
            trainers.BpeTrainer(
                vocab_size=300, initial_alphabet=steps.ByteLevel.alphabet(), special_tokens=special[1:]
            ),  # type: ignore[call-arg]
            steps.ByteLevel(add_prefix_space=False),
            tokenizers.decoders.ByteLevel(),
        ),
        "pieces": lambda: (
            tokenizers.Tokenizer(models.BPE(unk_token="<unk>")),
            trainers.BpeTrainer(vocab_size=80, special_tokens=special),  # type: ignore[call-arg]
            steps.Metaspace(),
            tokenizers.decoders.Metaspace(),
        ),
        "unigram": lambda: (
            tokenizers.Tokenizer(models.Unigram()),
            trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>"),
            steps.Metaspace(),
            tokenizers.decoders.Metaspace(),
        ),
        "words": lambda: (
            tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>")),  # type: ignore[call-arg]
            trainers.WordPieceTrainer(vocab_size=80, special_tokens=special),  # type: ignore[call-arg]
            steps.BertPreTokenizer(),
            tokenizers.decoders.WordPiece(),
        ),
    }[kind]()
    backend.pre_tokenizer, backend.decoder = step, decoder  # type: ignore[assignment]
    backend.train_from_iterator(texts, trainer)
    return backend


def write_modules(directory: Path, types: list[str], modes: dict[str, Any]) -> Path:
    """The files of sentence-transformers: these modules, with this pooling."""
    modules = [{"idx": i, "path": f"{i}_{t}", "type": f"sentence_transformers.models.{t}"} for i, t in enumerate(types)]
    (directory / "modules.json").write_text(json.dumps(modules))
    if "Pooling" in types:
        folder = directory / f"{types.index('Pooling')}_Pooling"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(modes))
    return directory
