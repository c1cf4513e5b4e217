"""jaxserve: an LLM inference server in JAX. The public names; each is loaded when it is first used.

`import jaxserve` alone imports no jax, because the API process must start fast and hold no device.
"""

import importlib

TYPE_CHECKING = False  # typing's; under `python -m jaxserve` the working directory is still on the import path here

if TYPE_CHECKING:
    from jaxserve.config import Config
    from jaxserve.engine.engine import Completion
    from jaxserve.library.async_engine import AsyncEngine
    from jaxserve.library.in_process import Engine
    from jaxserve.library.serving import launch_server
    from jaxserve.text.detokenizer import RequestOutput
    from jaxserve.types.sampling import GrammarSpec, SamplingParams

__all__ = [
    "AsyncEngine",
    "Completion",
    "Config",
    "Engine",
    "GrammarSpec",
    "RequestOutput",
    "SamplingParams",
    "launch_server",
]

_HOMES = {
    "AsyncEngine": "jaxserve.library.async_engine",
    "Completion": "jaxserve.engine.engine",
    "Config": "jaxserve.config",
    "Engine": "jaxserve.library.in_process",
    "GrammarSpec": "jaxserve.types.sampling",
    "RequestOutput": "jaxserve.text.detokenizer",
    "SamplingParams": "jaxserve.types.sampling",
    "launch_server": "jaxserve.library.serving",
}

_ARGUMENTS = "give its arguments to Engine or AsyncEngine, by the same names"
_FILES = "leave it out: of a directory of safetensors each device reads its own part"
_METRICS = "use Engine.core.stats(), or /metrics of a server"
_NO_CODE = "leave it out: no code of plug-ins is run; SamplingParams has logit_bias, allowed_token_ids and constraints"
# names that vLLM and SGLang export -> what to write instead
INSTEAD = {
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs", "ServerArgs"), _ARGUMENTS),
    **dict.fromkeys(("AsyncLLM", "AsyncLLMEngine"), "from jaxserve import AsyncEngine"),
    **dict.fromkeys(("LLM", "LLMEngine"), "from jaxserve import Engine"),
    **dict.fromkeys(("GuidedDecodingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt"), "use a dict"),
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Vector"), _METRICS),
    **dict.fromkeys(
        (
            *("AdapterLogitsProcessor", "BatchUpdate", "LogitsContext", "LogitsProcRequestState", "LogitsProcessor"),
            *("RequestLogitsProcessor", "VllmConfig", "async_tensor_h2d", "gpu_sync_allowed", "process_dict_updates"),
        ),
        _NO_CODE,
    ),
    **dict.fromkeys(
        (
            *("ShardedStateLoader", "TensorizerArgs", "TensorizerConfig"),
            *("tensorize_vllm_model", "tensorizer_kwargs_arg"),
        ),
        _FILES,
    ),
    **dict.fromkeys(("add_dataset_parser", "get_samples"), "use jaxserve bench serve --dataset FILE"),
    **dict.fromkeys(("cached_tokenizer_from_config", "get_tokenizer"), "use Engine.tokenizer"),
    "BeamSearchParams": "use Engine.chat(messages, use_beam_search=True, n=...)",
    "KVTransferConfig": "leave it out: host_memory=SIZE keeps evicted pages, and Engine.handover gives pages away",
    "LateChunkingParams": "give the chunks of a text to Engine.embed",
    "LoRARequest": "use Engine.load_adapter(name, path), and adapter=name in a request",
    "PoolerConfig": "leave it out: pooling is read from the files of sentence-transformers",
    "PoolingParams": "give its fields to Engine.embed, as in embed(texts, dimensions=...)",
    "ProfilerConfig": "leave it out: jax.profiler.trace(directory) records what runs inside it",
    "RequestOutputKind": "leave it out: AsyncEngine.generate yields what is new, Engine.generate the whole",
    "current_platform": "use jax.devices()",
    "example_hidden_states_connector": "use SamplingParams(extras=ExtraParams(hidden_states='all'), logprobs=0)",
    "hf_api": "use huggingface_hub",
    "init_logger": "use logging.getLogger",
}


def __getattr__(name: str) -> object:
    if name in INSTEAD:  # of an AttributeError `from jaxserve import ...` would drop the words
        raise ImportError(f"jaxserve has no {name}: {INSTEAD[name]}", name="jaxserve")
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
