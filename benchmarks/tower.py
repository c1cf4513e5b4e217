"""Time the tower of a published model with random weights on this device, or write the files of such a model.

    python -m benchmarks.tower Qwen3-VL-2B [--weights bfloat16]
    python -m benchmarks.tower Qwen3-VL-2B --write DIR [--layers 28]

For each number of patches: the seconds of the halves of a block and of the mergers, of the longest piece, the least
seconds of a block (operations over the machine's measured rate), its share of what the block takes, and the seconds of
the whole tower.

--write: the files of the model without weights, for `jaxserve launch --model DIR --model.load-format random`. The
vocabulary is the demo model's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.floors import measure_machine
from benchmarks.tokenizer_files import copy_tokenizer
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import LoadedModel, random_model
from jaxserve.models.vision.config import VisionConfig
from jaxserve.runtime.compilation.compiler import compile_all
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import RunnerSetup
from jaxserve.runtime.towers import MOST_SECONDS, TowerRunner, num_parts
from jaxserve.types.picture import Picture
from jaxserve.types.step import EncodePart
from tests.models.published import PUBLISHED

HEADER = (
    "| patches | attend, s | mlp, s | deep, s | end, s | longest piece, s | a block's least, s | share | tower, s |\n"
    + "|---" * 9
    + "|"
)

_PICTURE, _START, _STOP = "<|fim_middle|>", "<|fim_prefix|>", "<|fim_suffix|>"  # special texts that no prompt needs
_TEMPLATE = f"""{{%- for m in messages -%}}<|im_start|>{{{{ m.role }}}}
{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{{% for part in m.content -%}}
{{% if part.type == 'image' %}}{_START}{_PICTURE}{_STOP}{{% else %}}{{{{ part.text }}}}{{% endif %}}
{{%- endfor %}}{{% endif %}}<|im_end|>
{{% endfor -%}}<|im_start|>assistant
"""


def make_model(directory: Path, name: str, layers: int | None = None, blocks: int | None = None) -> None:
    """Write the files of a published model with a tower, without weights.

    layers: of the language model. blocks: of the tower, then without deepstack. None: as published
    """
    directory.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    vocab = {"vocab_size": 1 + max(ids.values()), "image_token_id": ids[_PICTURE], "eos_token_id": ids["<|im_end|>"]}
    hf: dict[str, Any] = PUBLISHED[name].hf | vocab | {"dtype": "bfloat16"}
    if layers is not None:
        hf |= {"num_hidden_layers": layers}
    if blocks is not None:
        hf |= {"vision_config": hf["vision_config"] | {"depth": blocks, "deepstack_visual_indexes": []}}
    (directory / "config.json").write_text(json.dumps(hf, indent=2))
    least, most = (3136, 12_845_056) if hf["architectures"][0].startswith("Qwen2_5") else (65_536, 16_777_216)
    sizes = {"size": {"shortest_edge": least, "longest_edge": most}}
    (directory / "preprocessor_config.json").write_text(json.dumps(sizes))


def block_operations(config: VisionConfig, patches: int) -> tuple[float, float]:
    """Return the operations of the products of the halves of a block that attends whole."""
    size, ffn = config.hidden_size, config.intermediate_size
    return 8.0 * patches * size**2 + 4.0 * patches**2 * size, 2.0 * patches * (3 if config.gated else 2) * size * ffn


def make_tower(
    name: str, weights: str, directory: Path, *, blocks: int | None = None, size: int | None = None
) -> tuple[TowerRunner, LoadedModel]:
    """Return the runner of a model's tower, with its programs compiled, and the model with random weights.

    blocks: see `make_model`. size: patches of the programs to compile; None: all
    """
    make_model(directory, name, layers=3, blocks=blocks)  # deepstack needs three
    mesh = make_mesh(jax.default_backend())
    activations = "float32" if mesh.platform == "cpu" else "bfloat16"
    model = read_config(directory).replace(activation_dtype=activations)
    loaded = random_model(directory, dtype=jnp.dtype(weights), config=model, mesh=mesh.mesh)
    config = RunnerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=1024,
        page_size=16,
        num_pages=256,
        cache_dtype=jnp.dtype(activations),
    )
    setup = RunnerSetup.of(loaded, config, mesh)
    assert setup.tower is not None
    programs = setup.program_set((256,), config.max_model_len).encode()
    if size is not None:
        programs = [
            program for program in programs if program.name == "allocate_pictures" or f"[{size}]" in program.name
        ]
    compiled = compile_all(programs)
    return TowerRunner(setup.tower, compiled, compiled["allocate_pictures"]), loaded


def tower_seconds(runner: TowerRunner, leaves: tuple[jax.Array, ...], picture: Picture) -> float:
    """Return the seconds of a whole picture. Its rows are the first of the pool."""
    size = runner.limits.size_of(picture.num_patches)
    part = EncodePart((picture,), 0, len(runner.limits.pieces[size]), list(range(picture.num_tokens)))
    began = time.perf_counter()
    jax.block_until_ready((runner.run(leaves, part), runner.pool))
    return time.perf_counter() - began


def main() -> None:
    """Measure the tower of the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[name for name, model in PUBLISHED.items() if "vision_config" in model.hf])
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--write", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, help="of the language model, with --write")
    options = parser.parse_args()
    if options.write is not None:
        make_model(options.write, options.name, options.layers)
        return
    rate = measure_machine().rate
    with tempfile.TemporaryDirectory() as directory:
        runner, loaded = make_tower(options.name, options.weights, Path(directory))
    config = loaded.config.vision
    assert config is not None
    runner.warm_up(loaded.leaves, MOST_SECONDS)
    print(f"{options.name}, {options.weights}, {rate / 1e9:.0f} GFLOP/s\n{HEADER}")
    for size in runner.limits.sizes:
        taken = {kind: seconds for (kind, patches), seconds in runner.limits.seconds.items() if patches == size}
        longest, first = max(taken.values()), [taken.get(kind, 0.0) for kind in ("attend", "project")]
        half = sum(first) + num_parts(size) * taken.get("queries", 0.0)
        least = sum(block_operations(config, size)) / rate
        share = least / (half + taken["mlp"])
        seconds = half, taken["mlp"], taken.get("deep", 0.0), taken["end"], longest, least
        cells = [f"{each:.3f}" for each in seconds]
        grid = 1, config.merge, size // config.merge
        picture = Picture(bytes(32), bytes(size * config.width), grid, 0, size // config.merge**2)
        whole = tower_seconds(runner, loaded.leaves, picture)
        print(f"| {size} | {' | '.join(cells)} | {share:.0%} | {whole:.2f} |", flush=True)


if __name__ == "__main__":
    main()
