"""Measure a tower beside llama.cpp's mtmd on this CPU: the same random weights, the same picture, by turns.

    python -m venv PEER && PEER/bin/pip install xllamacpp gguf
    python -m benchmarks.beside_llamacpp.tower Qwen3-VL-2B --peer PEER/bin/python [--rounds 5] [--forms F32 F16]

The picture is square and needs no resizing. In each round every side encodes it once, one after the other, on all
cores of this process. Each side's best seconds are printed, the share of them that the floor is (operations over the
machine's measured rate), and llama.cpp's seconds over ours, above 1 if ours is faster. Ours computes in float32, with
weights of float32 or bfloat16. The rows of both are compared too: it is one model.

Other work on the machine makes seconds longer, but hardly CPU seconds: `taskset -c 0 ... --cpu` compares those.

The wheel of xllamacpp is compiled for AVX2: on a processor with AVX-512 build it from source.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.floors import measure_machine
from benchmarks.tower import block_operations, make_tower, tower_seconds
from jaxserve.media.images import patches_of
from jaxserve.media.processor import PictureSettings
from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.models.vision.config import VisionConfig
from jaxserve.runtime.towers import TowerRunner
from jaxserve.types.picture import Picture
from tests.models.published import PUBLISHED

_PEER = Path(__file__).with_name("tower_peer.py")
_NAMES = ("Qwen3-VL-2B", "Qwen3-VL-8B")  # of one kind, which `tower_peer.make` writes


def tower_operations(config: VisionConfig, patches: int) -> float:
    """Return the operations of all products of a picture."""
    merged = config.hidden_size * config.merge**2
    rows = 2.0 * (patches // config.merge**2) * merged * (merged + config.out_size)
    blocks = config.depth * sum(block_operations(config, patches))
    return blocks + config.row_parts * rows + 2.0 * patches * config.width * config.hidden_size


def cpu_rate() -> float:
    """Return operations of float32 products in a CPU second, as `measure_machine` does in a second."""
    a, b = (jnp.full(shape, 0.5, jnp.float32) for shape in ((1024, 1024), (1024, 4096)))
    product, spent = jax.jit(jnp.matmul), []
    for _ in range(6):  # the first one is compiled
        began = time.process_time()
        product(a, b).block_until_ready()
        spent.append(time.process_time() - began)
    return 2.0 * 1024 * 1024 * 4096 / min(spent)


class Peer:
    """llama.cpp with the weights in one form, in a process of its own, which encodes when it is told to."""

    def __init__(self, python: Path, directory: Path, form: str, picture: Path, threads: int) -> None:
        self._rows = directory / f"rows-{form}.npy"
        words = ["run", directory, form, picture, threads, self._rows]
        command = [str(python), str(_PEER), *map(str, words)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self) -> tuple[float, float]:
        """Encode the picture once. Returns its seconds, and CPU seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp ended with code {self._process.wait()}")
        wall, cpu = line.split()
        return float(wall), float(cpu)

    def rows(self) -> np.ndarray:
        """Return the rows of the first encode, float32 [tokens, parts * D]."""
        return np.load(self._rows)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def write_weights(loaded: LoadedModel, config: VisionConfig, directory: Path) -> None:
    """Write the tower's weights in float32 and its sizes, which `tower_peer.make` reads."""
    specs = zip(loaded.structure.specs, loaded.leaves, strict=True)
    tensors = {spec.name: np.asarray(leaf, np.float32) for spec, leaf in specs if spec.name.startswith("visual.")}
    np.savez(directory / "tower.npz", **tensors)  # pyright: ignore[reportArgumentType]  its stub has no names
    (directory / "config.json").write_text(json.dumps(dataclasses.asdict(config)))


def our_rows(runner: TowerRunner, picture: Picture) -> np.ndarray:
    """Return the rows of the pool that a picture was encoded to, float32 [tokens, parts * D]."""
    rows = np.asarray(runner.pool)[:, : picture.num_tokens]
    return rows.swapaxes(0, 1).reshape(picture.num_tokens, -1)


def main() -> None:
    """Measure both sides by turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=_NAMES)
    parser.add_argument("--peer", type=Path, required=True, help="Python of an environment with xllamacpp and gguf")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", nargs="+", default=["F32", "F16", "BF16"], help="of llama.cpp's weights")
    parser.add_argument("--weights", nargs="+", default=["float32", "bfloat16"], help="of ours")
    parser.add_argument("--side", type=int, default=512, help="pixels of the picture's side")
    parser.add_argument("--blocks", type=int, help="of the tower, then without deepstack; else as published")
    parser.add_argument("--cpu", action="store_true", help="compare CPU seconds")
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    rate = cpu_rate() if options.cpu else measure_machine().rate
    pixels = np.random.default_rng(0).integers(0, 256, (options.side, options.side, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = (options.side // PUBLISHED[options.name].hf["vision_config"].get("patch_size", 16)) ** 2
        ours = {
            weights: make_tower(options.name, weights, root / weights, blocks=options.blocks, size=size)
            for weights in options.weights
        }
        last, loaded = ours[options.weights[-1]]
        config = loaded.config.vision
        assert config is not None
        write_weights(loaded, config, root)
        make = [options.peer, _PEER, "make", root / "tower.npz", root / "config.json", root, *options.forms]
        subprocess.run(list(map(str, make)), check=True)
        settings = PictureSettings(
            patch_size=config.patch_size, merge_size=config.merge, min_pixels=1, max_pixels=options.side**2
        )
        patches, side = patches_of(pixels, settings), options.side // config.patch_size
        picture = Picture(bytes(32), patches.tobytes(), (1, side, side), 0, side**2 // config.merge**2)
        np.save(root / "picture.npy", pixels)
        peers = {form: Peer(options.peer, root, form, root / "picture.npy", threads) for form in options.forms}
        best = dict.fromkeys([*ours, *peers], math.inf)
        for _ in range(1 + options.rounds):  # the first run takes longer
            for name, (runner, model) in ours.items():
                began = time.process_time()
                wall = tower_seconds(runner, model.leaves, picture)
                best[name] = min(best[name], time.process_time() - began if options.cpu else wall)
            for name, peer in peers.items():
                best[name] = min(best[name], peer.seconds()[options.cpu])
        rows = our_rows(last, picture)
        for name, peer in peers.items():
            peer.close()
            print(f"{name}: rows differ by {np.abs(peer.rows() - rows).max() / np.abs(rows).max():.1e} of the largest")
    least = tower_operations(config, side**2) / rate
    seen = f"{config.depth} blocks, {picture.num_patches} patches, {threads} threads, {rate / 1e9:.0f} GFLOP/s"
    print(f"{options.name}, {seen}: {least:.2f} s")
    beside = [f"over ours {name}" for name in ours]
    print(f"| | {'CPU s' if options.cpu else 's'} | floor | {' | '.join(beside)} |\n{'|---' * (3 + len(ours))}|")
    for name, seconds in best.items():
        ratios = " | ".join(f"{seconds / best[each]:.2f}" for each in ours)
        print(
            f"| {'llama.cpp' if name in peers else 'ours'} {name} | {seconds:.2f} | {least / seconds:.0%} | {ratios} |"
        )


if __name__ == "__main__":
    main()
