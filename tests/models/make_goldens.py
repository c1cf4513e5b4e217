"""Makes tests/models/goldens/ with transformers' own models. Needs torch and transformers; the tests need neither.

    pip install torch transformers safetensors numpy
    python -m tests.models.make_goldens [case ...]

For each case of families.py: writes the published checkpoint (names and shapes as transformers saves them, weights
drawn by name), loads it back through `from_pretrained`, and stores logits of a prompt, greedy tokens, and how far
transformers itself moves in bfloat16.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # pyright: ignore[reportMissingImports]

from tests.models.families import CASES, NUM_GREEDY, prompt, tensors_of

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
    for name in sys.argv[1:] or [*CASES, "mxfp4"]:
        make_mxfp4() if name == "mxfp4" else make(name)
