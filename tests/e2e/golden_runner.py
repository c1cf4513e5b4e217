"""A family's golden model behind a runner, and the tokens that each prompt of a test gets alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.types.scheduling import SchedulerConfig
from tests.fakes import make_request, run_all
from tests.models import families
from tests.models.checkpoints import write_checkpoint
from tests.models.dense import dense_logits
from tests.quick import quick_programs


def start(
    case: str, directory: Path, compile_cache: str, changes: Mapping[str, Any] | None = None, **limits: Any
) -> tuple[LoadedModel, ModelRunner]:
    """Load the model of a golden, whose config has these changes, and make a runner of 4 rows with these limits."""
    hf = (families.CASES | families.STATE_CASES)[case]
    checkpoint = write_checkpoint(directory, hf, families.golden_tensors(case))
    mesh, config = make_mesh("cpu"), read_config(checkpoint).replace(**(changes or {}))
    model = load_model(checkpoint, dtype=jnp.dtype("float32"), mesh=mesh.mesh, config=config)
    fixed: dict[str, Any] = {
        "max_num_seqs": 4,
        "cache_dtype": jnp.dtype("float32"),
        "compile_cache": Path(compile_cache),
    }
    with quick_programs():
        return model, ModelRunner(model, RunnerConfig(**fixed, **limits), mesh)


def make_core(runner: ModelRunner, *, options: Mapping[str, Any] | None = None, **changes: Any) -> EngineCore:
    """A new scheduler over the compiled programs. options: further ones of the core"""
    sizes: dict[str, Any] = {
        "num_pages": runner.plan.num_pages,
        "groups": runner.plan.group_sizes,
        "page_size": runner.config.page_size,
        "max_num_seqs": runner.config.max_num_seqs,
        "max_num_batched_tokens": runner.config.max_num_batched_tokens,
        "max_model_len": runner.config.max_model_len,
    }
    fixed: dict[str, Any] = {"vocab_size": families.VOCAB, "eos_token_ids": (10**6,)}
    return EngineCore(runner, SchedulerConfig(**(sizes | changes)), CoreOptions(**(fixed | dict(options or {}))))


def tokens_of(core: EngineCore, prompts: Mapping[str, list[int]], count: int) -> dict[str, list[int]]:
    """The `count` tokens that each of the prompts gets, all together."""
    transcripts = run_all(core, [make_request(name, prompt, max_tokens=count) for name, prompt in prompts.items()])
    return {name: transcripts[name].token_ids for name in prompts}


def tokens_alone(
    runner: ModelRunner, new_core: Callable[[], EngineCore], prompts: Mapping[str, list[int]], count: int
) -> dict[str, list[int]]:
    """The tokens of each prompt alone, held to the model's logits over the whole sequence, with no pages."""
    found: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        found |= tokens_of(new_core(), {name: prompt}, count)
        ids = np.zeros(runner.config.max_model_len, np.int32)
        ids[: len(prompt) + count] = prompt + found[name]
        logits = np.asarray(dense_logits(runner.structure, runner.leaves, jnp.asarray(ids)))
        assert logits[len(prompt) - 1 : len(prompt) + count - 1].argmax(axis=1).tolist() == found[name]
    return found
