"""The configuration: one frozen tree, validated once, with the same keys in YAML, as flags and in the environment.

This file defines the keys, their defaults and their limits. It reads nothing from a model or a device: "auto" values
stay "auto" here. The component that knows the value resolves it, into a new Config (`resolved`). cli/options.py parses
files, flags and environment variables.

    CacheSection                     the KV cache
    ApiKey                           named API keys: `server.keys`
    MeshSection                      the devices of an engine, and how many engines run
    ModelEntry, ModelsSection        several models behind one address, each served by processes of its own
    AdapterEntry, LoraSection        adapters of a model
    ModelSection ... LoggingSection  the other sections
    Config                           all sections
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Secret,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from jaxserve.config_types import (
    WEEK,
    Auto,
    Bytes,
    DirPath,
    DirPaths,
    FilePath,
    Float,
    HostNames,
    Int,
    Key,
    Names,
    Origins,
    Seconds,
    SecretSeed,
    Section,
    Text,
    TextOrTemplate,
    Url,
    Words,
    json_list,
    reveal,
)
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)


class CacheSection(Section):
    """The paged KV cache."""

    page_size: Annotated[Int, Field(ge=1, le=4096)] | Auto = Field(
        "auto", description="Tokens per page. auto: 16 on CPU and GPU, 128 on TPU."
    )
    num_pages: Annotated[Int, Field(ge=1, lt=2**31)] | Auto = Field(
        "auto", description="Number of pages. auto: as many as memory_fraction allows."
    )
    num_window_pages: Annotated[Int, Field(ge=1, lt=2**31)] | Auto = Field(
        "auto",
        description="Number of pages of the sliding-window layers, which only store the window. auto: enough for "
        "max_num_seqs requests, or half of num_pages. If layers have windows of several widths, or chunks, it is the "
        "number of the widest, and the others get their share.",
    )
    num_state_pages: Annotated[Int, Field(ge=2, lt=2**31)] | Auto = Field(
        "auto",
        description="Number of recurrent states, for models whose layers have one: of running requests, and cached. "
        "auto: twice max_num_seqs, at least max_num_seqs + 3, or half of the cache's memory.",
    )
    state_interval: Annotated[Int, Field(ge=1, lt=2**31)] | Auto = Field(
        "auto",
        description="Tokens between two recurrent states that the prefix cache keeps of a prompt or an output, rounded "
        "up to pages; more where a step computes over four of a prompt. auto: 2048, on a CPU 512; 128 if all are short "
        "convolutions.",
    )
    memory_fraction: Float = Field(
        0.9,
        ge=0.01,
        le=1,
        description="Share of XLA's memory that weights, KV cache and activations may use.",
    )
    prefix_cache: bool = Field(True, description="Reuse the KV pages of equal prompt prefixes.")
    host_memory: Bytes | None = Field(
        None,
        description="Memory of the host for pages that are evicted from the prefix cache, e.g. 8GiB. They are loaded "
        "again instead of computed. null: none.",
    )
    disk: DirPath | None = Field(
        None,
        description="Directory of a file for these pages, so that they survive a restart. The file has the size of "
        "cache.host_memory, and only its pages in use need memory. null: no file.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = Field(
        "auto",
        description="Data type of keys and values. auto: that of the activations. int8 and fp8 (E4M3) have a float32 "
        "scale for each token and head.",
    )

    @field_validator("host_memory")
    @classmethod
    def _of_prefixes(cls, host_memory: int | None, info: ValidationInfo) -> int | None:
        if host_memory is not None and not info.data.get("prefix_cache", True):
            raise ValueError("it needs cache.prefix_cache")
        return host_memory

    @field_validator("disk")
    @classmethod
    def _of_host_pages(cls, disk: Path | None, info: ValidationInfo) -> Path | None:
        if disk is not None and info.data.get("host_memory", 1) is None:
            raise ValueError("it needs cache.host_memory")
        return disk


DEFAULT_KEY = "default"  # the name of server.api_key
MAX_KEYS = 256  # the key of each request is compared with all of them
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, 32 bytes."""
    return hashlib.sha256(key.encode()).digest()


def _digest(value: SecretStr) -> SecretStr:
    if not _DIGEST.fullmatch(value.get_secret_value()):
        raise ValueError("should be 64 hexadecimal digits")
    return value


class ApiKey(BaseModel):
    """An API key and its name. Objects created with the key belong to the name."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Name of the key's owner.")
    value: Key | None = Field(None, description="The key.")
    sha256: Annotated[SecretStr, AfterValidator(_digest)] | None = Field(
        None, description="The SHA-256 hash of the key, in hexadecimal, instead of the key."
    )

    weight: float = Field(
        1.0, gt=0, le=1000, allow_inf_nan=False, description="Share of the engine, relative to the other keys."
    )
    max_running: int | None = Field(
        None, ge=1, le=2**20, description="Requests of the key that run at once; further ones wait. Default: no limit."
    )
    max_queued: int | None = Field(
        None, ge=0, le=2**20, description="Requests of the key that may wait; more are refused. Default: no limit."
    )
    tokens_per_minute: int | None = Field(
        None, ge=1, le=2**40, description="Tokens, prompt and output, that refill evenly. Default: no limit."
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> ApiKey:
        if (self.value is None) == (self.sha256 is None):
            raise ValueError("give value or sha256, one of them")
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key, 32 bytes."""
        return digest_of(reveal(self.value)) if self.sha256 is None else bytes.fromhex(reveal(self.sha256))


ApiKeys = Annotated[tuple[ApiKey, ...], BeforeValidator(json_list), Field(max_length=MAX_KEYS)]


def check_distinct(keys: Sequence[ApiKey], single: SecretStr | None, admin: SecretStr | None) -> None:
    """Raise ValueError for a duplicate name, and for a key with two names, because its owner would be ambiguous.

    single, admin: server.api_key and server.admin_api_key
    """
    names = Counter([key.name for key in keys] + [DEFAULT_KEY] * (single is not None))
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"the name {repeated[0]!r} is given twice ({DEFAULT_KEY!r} is that of server.api_key)")
    others = {digest_of(reveal(key)) for key in (single, admin) if key is not None}
    digests = Counter([key.digest for key in keys] + list(others))
    if repeated := [key.name for key in keys if digests[key.digest] > 1]:
        raise ValueError(f"the key {repeated[0]!r} is the same as another one")


DEFAULT_PORT = 29500


class MeshSection(Section):
    """How an engine uses several devices, and how many engines run."""

    replicas: Int = Field(
        1, ge=1, le=64, description="Number of engines behind one address, each with its own devices."
    )
    prefill_replicas: Int = Field(
        0,
        ge=0,
        le=63,
        description="How many of them only compute prompts, and pass the KV pages to the others, which produce the "
        "tokens. 0: each does both.",
    )
    prefill_min_tokens: Int = Field(
        256,
        ge=1,
        le=2**26,
        description="With prefill_replicas: a prompt with fewer tokens that are not cached is computed where its "
        "tokens are produced.",
    )
    data: Int = Field(
        1, ge=1, le=4096, description="Only 1: an engine does not split its requests over devices. Use replicas."
    )
    tensor: Annotated[Int, Field(ge=1, le=4096)] | Auto = Field(
        1,
        description="Tensor parallelism: number of devices that share heads, FFN and vocabulary. auto: chosen with "
        "expert, which is then auto too unless it is given: the split of the devices that the model allows and that "
        "has room for the most tokens.",
    )
    expert: Annotated[Int, Field(ge=1, le=4096)] | Auto = Field(
        1,
        description="Expert parallelism: number of devices that share the experts. auto: see tensor.",
    )
    device: Literal["auto", "cpu", "gpu", "tpu"] = Field("auto", description="Platform to run on.")
    hosts: Int = Field(
        1, ge=1, le=1024, description="Number of machines whose devices one engine uses; each runs this command."
    )
    cluster: Literal["none", "auto", "lws", "slurm", "gke"] = Field(
        "none",
        description="Whose variables say hosts, host_rank and leader_address where they are not given: "
        "LeaderWorkerSet's (lws), SLURM's, those of TPU slices on GKE, or the ones that are there (auto).",
    )
    host_rank: Int = Field(
        0, ge=0, le=1023, description="Which of these machines this is. 0: the leader, which schedules and serves HTTP."
    )
    leader_address: Text = Field(
        "127.0.0.1",
        description="Name or IPv4 address of the leader, HOST or HOST:PORT, where it listens for the other machines.",
    )
    leader_port: Annotated[Int, Field(ge=1, le=65535)] | None = Field(
        None, description="The port there. Default: that of leader_address, or 29500."
    )
    group_key_file: FilePath | None = Field(
        None,
        description="File with a secret of at least 16 characters, the same on all machines. Only a leader at a "
        "loopback address needs none.",
    )
    join_timeout: Seconds = Field(600.0, description="Seconds that the leader waits for the other machines.")

    @property
    def is_auto(self) -> bool:
        """Whether the engine is to choose how its devices are split."""
        return "auto" in (self.tensor, self.expert)

    @property
    def split(self) -> tuple[int, int]:
        """The numbers tensor and expert, which must not be auto."""
        assert self.tensor != "auto" and self.expert != "auto"
        return self.tensor, self.expert

    @property
    def leader(self) -> tuple[str, int]:
        """Host and port of the leader."""
        host, _, port = self.leader_address.partition(":")
        return host, self.leader_port or int(port or DEFAULT_PORT)

    @model_validator(mode="before")
    @classmethod
    def _both_auto(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and "auto" in (keys.get("tensor"), keys.get("expert")):
            return {"tensor": "auto", "expert": "auto"} | keys
        return keys

    @field_validator("prefill_replicas")
    @classmethod
    def _leaves_some(cls, count: int, info: ValidationInfo) -> int:
        if count >= (replicas := info.data.get("replicas", count + 1)) and count:
            raise ValueError(f"mesh.replicas is {replicas}, and one of them must produce tokens")
        return count

    @field_validator("leader_port")
    @classmethod
    def _one_port(cls, port: int | None, info: ValidationInfo) -> int | None:
        named = info.data.get("leader_address", "").partition(":")[2]
        if port is not None and named and int(named) != port:
            raise ValueError(f"leader_address has port {named}")
        return port

    @field_validator("leader_address")
    @classmethod
    def _has_a_port(cls, address: str) -> str:
        host, colon, port = address.partition(":")
        if not host or (colon and not (port.isdecimal() and 0 < int(port) < 2**16)):
            raise ValueError("should be HOST or HOST:PORT")
        return address

    @field_validator("host_rank")
    @classmethod
    def _is_a_host(cls, rank: int, info: ValidationInfo) -> int:
        if rank >= (hosts := info.data.get("hosts", rank + 1)):
            raise ValueError(f"there are {hosts} hosts, from 0 to {hosts - 1}")
        return rank


MAX_MODELS = 64
NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"  # of a model or an adapter, as requests send it
# what each model may set for itself
OWN_SECTIONS = ("model", "mesh", "cache", "scheduler", "runtime", "speculation", "lora")


def own_sections(value: Any) -> Any:
    """Check the settings of one model, a path or sections. Raises ValueError."""
    if not isinstance(value, str | dict):
        raise ValueError("should be the path of a YAML file, or sections")
    if isinstance(value, dict) and (shared := [name for name in value if name not in OWN_SECTIONS]):
        raise ValueError(f"the section {str(shared[0])[:40]!r} is for all models: set it beside `models`")
    if isinstance(value, dict) and (
        bare := [name for name, keys in value.items() if not isinstance(keys, dict | None)]
    ):
        raise ValueError(f"the section {bare[0]!r} should be a mapping")
    return value


class ModelEntry(BaseModel):
    """One of several models."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=rf"^{NAME}$", description="Name that requests send as `model`.")
    config: Annotated[Text | dict[str, Any], BeforeValidator(own_sections)] = Field(
        default_factory=dict,
        description="Path of a YAML file, or the sections themselves: what differs from the sections of the main file.",
    )
    load: Literal["start", "demand"] = Field(
        "demand", description="start: loaded with the server. demand: by the first request."
    )
    idle_seconds: Seconds | None = Field(
        None, description="Unload the model after this many seconds without a request. null: never."
    )


_Checked = TypeVar("_Checked")
_Entry = TypeVar("_Entry", ModelEntry, "AdapterEntry")


def _distinct(entries: Sequence[_Entry]) -> Sequence[_Entry]:
    counts = Counter(entry.name for entry in entries)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"the name {repeated[0]!r} is given twice")
    return entries


ModelEntries = Annotated[
    tuple[ModelEntry, ...], BeforeValidator(json_list), AfterValidator(_distinct), Field(max_length=MAX_MODELS)
]


class ModelsSection(Section):
    """Several models behind one address, each served by processes of its own."""

    served: ModelEntries = Field(
        (),
        description="The models: [{name, config, load, idle_seconds}]; the first is the default. Empty: one model, "
        "that of the section `model`.",
    )
    max_loaded: Annotated[Int, Field(ge=1, le=64)] | None = Field(
        None,
        description="Maximum number of models that are loaded at once. For one more, the one without requests that "
        "was used longest ago is unloaded. null: no limit.",
    )
    wait_seconds: Float = Field(
        300.0, ge=0, le=WEEK, description="Seconds that a request waits for its model to load before status 503."
    )

    @field_validator("max_loaded")
    @classmethod
    def _has_room(cls, most: int | None, info: ValidationInfo) -> int | None:
        at_start = sum(entry.load == "start" for entry in info.data.get("served", ()))
        if most is not None and most < at_start:
            raise ValueError(f"{at_start} models are loaded at the start")
        return most


DEFAULT_STORE = "~/.local/share/jaxserve"  # the meaning of store.path: auto
_LISTS = ("keys", "served", "adapters")  # lists whose errors name the entry
SECRETS = ("api_key", "admin_api_key", "keys", "watermark_key")  # in the section server; never printed


class ModelSection(Section):
    """Which model to serve."""

    path: Text | None = Field(None, description="Hub id, local directory or GGUF file. null: the embedded demo model.")
    served_name: Names = Field(
        (), description="Model names that clients may use; responses show the first. Default: the path."
    )
    tokenizer: Text | None = Field(
        None, description="Hub id or local directory of the tokenizer. Default: the model's."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of weights and activations. On a CPU activations are float32 with bfloat16 weights too. "
        "auto: bfloat16; on a CPU float32, unless the checkpoint is bfloat16 and the C kernels run.",
    )
    quantization: Literal["auto", "none", "int8", "fp8", "int4", "mxfp4", "nvfp4"] = Field(
        "auto",
        description="auto: weights of 8 and 4 bits as published, others not quantized. none: all are converted to "
        "dtype. Others: linear layers and experts are quantized at load, to 8 bits with a scale for 128 numbers or 4 "
        "bits with one for 32 (nvfp4: 16); embeddings, heads, norms and routers are not.",
    )
    quantize_head: bool = Field(False, description="Quantize the output head too, with a quantization at load.")
    max_model_len: Annotated[Int, Field(ge=8, le=2**26)] | None = Field(
        None, description="Context length in tokens, prompt plus output. Default: the model's."
    )
    chat_template: TextOrTemplate | None = Field(
        None, description="Path of a Jinja template, or the template itself. Default: the model's."
    )
    tool_parser: Text = Field(
        "auto", description="Name of the tool call parser. auto: chosen for the model; none: off."
    )
    reasoning_parser: Text = Field(
        "auto", description="Name of the parser for reasoning. auto: chosen for the model; none: off."
    )
    classifier_from_token: Words = Field(
        (),
        description="The words by which a reranker says not relevant and relevant, e.g. no,yes. Default: as the "
        "model's files say.",
    )
    revision: Text | None = Field(None, description="Branch, tag or commit of the model on the hub.")
    load_format: Literal["auto", "safetensors", "random"] = Field(
        "auto",
        description="auto: by the files. safetensors: as published. random: drawn, by runtime.random_seed (null: 0).",
    )


class SchedulerSection(Section):
    """Continuous batching."""

    max_num_seqs: Annotated[Int, Field(ge=1, le=4096)] | Auto = Field(
        "auto", description="Maximum number of requests that run at once. auto: 64 on CPU, 512 elsewhere."
    )
    max_num_batched_tokens: Annotated[Int, Field(ge=1, le=2**20)] | Auto = Field(
        "auto", description="Maximum number of tokens per step, decode plus prefill. auto: 512 on CPU, 8192 elsewhere."
    )
    policy: Literal["fcfs", "lpm", "priority"] = Field(
        "fcfs",
        description="Order of the waiting queue. fcfs: by arrival. lpm: the longest cached prefix first. priority: the "
        "lowest `priority` of the requests first.",
    )
    max_queued_requests: Int = Field(
        4096, ge=1, le=10**6, description="Maximum number of waiting requests. Further ones get status 429."
    )
    max_queued_tokens: Annotated[Int, Field(ge=1, le=10**10)] | None = Field(
        None, description="Maximum number of waiting prompt tokens. Further requests get status 429."
    )
    prefill_chunk_size: Annotated[Int, Field(ge=1, le=2**20)] | None = Field(
        None, description="Maximum number of prompt tokens per step. Default: max_num_batched_tokens."
    )
    aging_steps: Int = Field(
        1024, ge=1, le=10**9, description="Number of steps after which no request may pass a waiting request."
    )
    new_token_ratio: Float = Field(
        0.7,
        gt=0,
        le=1,
        description="Initial share of max_tokens for which admission reserves pages. It adapts to the load.",
    )


class RuntimeSection(Section):
    """Attention backend, reproducibility and compilation."""

    attention: Literal["auto", "reference", "xla", "native", "triton", "mosaic_gpu", "tpu"] = Field(
        "auto", description="Attention backend. auto: the best for the platform. An explicit choice never falls back."
    )
    experts: Literal["auto", "xla", "triton"] = Field(
        "auto",
        description="What multiplies rows by routed experts. auto: Triton kernels on a GPU, a Pallas kernel on a "
        "TPU from v5e on (for rows in bfloat16), C kernels with native attention, else XLA. An explicit choice never "
        "falls back.",
    )
    activations: Literal["auto", "exact", "rounded"] = Field(
        "auto",
        description="Activations in linear layers. exact: as they are. rounded: as the weight's form allows, which is "
        "faster with many rows. auto: rounded on a GPU or a TPU for checkpoints that were made for activations of 8 "
        "bits, else exact. A GPU of compute capability 8.9 or more rounds to 8 bits for int8 and FP8 with one scale "
        "for a row, Hopper also for groups of 128, a TPU for int8 with one scale for a row; with runtime.deterministic "
        "these round nothing. A CPU with AVX512_BF16 and AVX512_VNNI rounds to bfloat16 for weights in bfloat16 and to "
        "8 bits for int8 and int4; with AVX2 or NEON's dot products only the latter. All else stays exact.",
    )
    deterministic: bool = Field(
        False, description="Batch-invariant: the output is bitwise independent of other requests."
    )
    compile_cache: Auto | DirPath | None = Field(
        "auto",
        union_mode="left_to_right",
        description="Directory for compiled programs. auto: jaxserve/xla in the user's cache directory; null: none.",
    )
    bundle: DirPath | None = Field(
        None,
        description="Directory of compiled programs that jaxserve compile wrote. They are loaded, and nothing is "
        "compiled; if they do not fit this machine or configuration, the start is refused with the reason.",
    )
    wait_for_programs: bool = Field(
        False,
        description="Be ready only when every program is compiled. If false, on a CPU, requests are served as soon as "
        "one program of each kind is there, and the others are compiled meanwhile. A GPU, a TPU, a bundle, several "
        "hosts, runtime.deterministic, speculation and cache.host_memory always wait.",
    )
    random_seed: Int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="Seed for requests without a seed, the same at each start. null: drawn at each start, and logged "
        "at the level debug.",
    )


# Guesses if their number is not configured. N-grams cost nothing until they are computed; the others are computed one
# after the other, and an MTP head was trained to make one.
NUM_DRAFTS = {"off": 0, "ngram": 15, "draft_model": 4, "eagle3": 4, "mtp": 3}


class SpeculationSection(Section):
    """Several tokens per step: guessed tokens are verified together. The output does not change."""

    method: Literal["auto", "off", "ngram", "draft_model", "mtp", "eagle3"] = Field(
        "auto",
        description="Where guesses come from. ngram: what followed the last tokens earlier in prompt and output. "
        "draft_model: a small model with the same vocabulary. mtp: the checkpoint's own head for multi-token "
        "prediction. eagle3: a head in EAGLE-3's form that was made for this model. auto: draft_model, if one is given "
        "and by the sizes of both models worth its time on this platform, else off; the start says which.",
    )
    draft_model: Text | None = Field(
        None,
        description="The model of method draft_model or the head of eagle3, as model.path: a directory or a name on "
        "the hub.",
    )
    draft_revision: Text | None = Field(
        None, description="Branch, tag or commit of speculation.draft_model on the hub."
    )
    num_speculative_tokens: Int | None = Field(
        None,
        ge=1,
        le=31,
        description="Maximum number of guessed tokens per step. null: 15 of ngram, 3 of mtp, 4 of the others.",
    )
    prompt_lookup_min: Int = Field(2, ge=1, le=64, description="With ngram: number of last tokens that must match.")
    prompt_lookup_max: Int = Field(
        8, ge=1, le=64, description="With ngram: the longest match wins; matches of this many tokens count as equal."
    )

    @field_validator("prompt_lookup_max")
    @classmethod
    def _ordered(cls, most: int, info: ValidationInfo) -> int:
        if most < (least := info.data.get("prompt_lookup_min", most)):
            raise ValueError(f"it must be at least prompt_lookup_min, {least}")
        return most

    @field_validator("prompt_lookup_min", "prompt_lookup_max")
    @classmethod
    def _of_ngram(cls, value: int, info: ValidationInfo) -> int:
        default = cls.model_fields[str(info.field_name)].default  # as `jaxserve config show` writes it
        method, named = info.data.get("method"), info.data.get("draft_model") is not None
        if value != default and (method in ("draft_model", "mtp", "eagle3") or (method == "auto" and named)):
            raise ValueError("it is for the method ngram")
        return value

    @field_validator("draft_model", "draft_revision")
    @classmethod
    def _of_method(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("method", "auto") not in ("auto", "draft_model", "eagle3"):
            raise ValueError("it is for the methods draft_model and eagle3")
        if value is not None and info.field_name == "draft_revision" and info.data.get("draft_model") is None:
            raise ValueError("it needs speculation.draft_model")
        return value

    @model_validator(mode="after")
    def _with_model(self) -> SpeculationSection:
        if self.method in ("draft_model", "eagle3") and self.draft_model is None:
            raise ValueError(f"the method {self.method} needs speculation.draft_model")
        return self

    @property
    def source(self) -> Literal["off", "ngram", "draft_model", "mtp", "eagle3"]:
        """The method, and for auto the one that is used if it is worth its time."""
        if self.method == "auto":
            return "off" if self.draft_model is None else "draft_model"
        return self.method

    @property
    def max_drafts(self) -> int:
        """Most guessed tokens of a request in a step; 0: no speculation."""
        return self.num_speculative_tokens or NUM_DRAFTS[self.source] if self.source != "off" else 0

    @property
    def on_device(self) -> bool:
        """Whether the device makes the guesses."""
        return self.source in ("draft_model", "mtp", "eagle3")


class AdapterEntry(BaseModel):
    """An adapter that is loaded at the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=rf"^{NAME}$", description="Name that requests send as `model`.")
    path: Text = Field(description="Directory with adapter_config.json and adapter_model.safetensors.")
    pinned: bool = Field(False, description="Keep it on the devices.")


AdapterEntries = Annotated[
    tuple[AdapterEntry, ...], BeforeValidator(json_list), AfterValidator(_distinct), Field(max_length=1024)
]


class LoraSection(Section):
    """Adapters (LoRA): variants of the model, many in one batch."""

    slots: Int = Field(
        0,
        ge=0,
        le=1024,
        description="Adapters that are on the devices at once; each step computes all of them. More wait in the memory "
        "of the host. 0: no adapters.",
    )
    max_rank: Int = Field(
        16, ge=1, le=512, description="Highest rank of an adapter; rounded up to a power of two, at least 16."
    )
    adapters: AdapterEntries = Field(
        (), description="Adapters that are loaded at the start: [{name, path, pinned}]. It needs lora.slots."
    )
    keep: bool = Field(
        False,
        description="Keep in the store which adapters routes have loaded, and load them again at the next start. It "
        "needs lora.slots and a store.",
    )

    @field_validator("adapters", "keep")
    @classmethod
    def _has_slots(cls, value: _Checked, info: ValidationInfo) -> _Checked:
        if value and not info.data.get("slots"):
            raise ValueError("it needs lora.slots")
        return value


class ServerSection(Section):
    """The HTTP server."""

    host: Text = Field("127.0.0.1", description="Address to listen on. 0.0.0.0: all addresses of this machine.")
    port: Int = Field(8000, ge=0, le=65535, description="Port to listen on. 0: any free port.")
    workers: Int = Field(
        1, ge=1, le=64, description="Processes that serve HTTP on the port, for one engine. 1: no further process."
    )
    api_key: Key | None = Field(
        None, description="API key that clients send as a bearer token. null: no key is needed."
    )
    admin_api_key: Key | None = Field(
        None, description="API key for the admin routes. null: these routes are disabled."
    )
    keys: ApiKeys = Field(
        (), description="More API keys: [{name, value or sha256}]. What one stores is invisible to the others."
    )
    weights_directories: DirPaths = Field(
        (), description="Directories that admin routes may load weights from, beside the model's own."
    )
    watermark_key: SecretSeed | None = Field(
        None, description="Secret number of the watermark in sampled text; requests can switch it off."
    )
    request_timeout: Seconds | None = Field(None, description="Maximum duration of a request in seconds.")
    queue_timeout: Seconds | None = Field(None, description="Maximum time of a request in the queue in seconds.")
    drain_timeout: Float = Field(
        30.0, ge=0, le=WEEK, description="Seconds that running requests have to finish after SIGTERM."
    )
    watchdog_timeout: Float = Field(
        60.0,
        gt=1,
        le=WEEK,
        description="Restart the engine after this many seconds without a heartbeat or in one step of its loop.",
    )
    max_body_bytes: Annotated[Int, Field(ge=1024, le=2**31)] | Auto = Field(
        "auto",
        description="Maximum bytes of a request body, except uploads. Larger ones get status 413. auto: 8 MiB, or "
        "32 bytes per token of the context if that is more, at most 64 MiB; for a model that takes pictures, 32 MiB.",
    )
    header_timeout: Seconds = Field(
        10.0, description="Close a connection whose request headers take longer than this many seconds."
    )
    body_timeout: Seconds = Field(60.0, description="Seconds that a request body may take, plus 1 s per 10 kB.")
    send_timeout: Seconds = Field(
        60.0, description="Close the connection if the client reads nothing for this many seconds."
    )
    ping_interval: Seconds | None = Field(
        5.0,
        description="A stream without events sends a comment, or Anthropic's ping, every so many seconds, so that no "
        "proxy or client gives it up. null: none.",
    )
    max_unread_bytes: Int = Field(
        4 * 2**20,
        ge=64 * 2**10,
        le=2**31,
        description="End a stream with more unread bytes than this; all streams together: 16 times as many.",
    )
    cors_origins: Origins = Field(
        (), description="Web origins that browsers may call from (CORS). Empty: no CORS headers."
    )
    allowed_hosts: Auto | HostNames = Field(
        "auto",
        union_mode="left_to_right",
        description="Host names that requests may be for, beside IP addresses, localhost and names of .local and "
        ".internal; *.example.com: all below. Others get status 403, so that no web page can give its own name to this "
        "server (DNS rebinding). auto: any; without an API key on a loopback address, this machine's name. *: any, and "
        "without an API key what pages of other origins send without a preflight is taken too, which cors_origins "
        "otherwise decides.",
    )
    reasoning_field: Literal["reasoning_content", "both"] = Field(
        "reasoning_content", description="Response field for the reasoning. both: also `reasoning`, as in vLLM."
    )
    metrics_auth: bool = Field(False, description="Require an API key for /metrics too.")
    ssl_keyfile: Text | None = Field(None, description="Path of the private key, for https.")
    ssl_certfile: Text | None = Field(None, description="Path of the certificate, for https.")

    @property
    def needs_key(self) -> bool:
        """Whether clients must send an API key."""
        return self.api_key is not None or bool(self.keys)

    @field_validator("keys")
    @classmethod
    def _distinct(cls, keys: tuple[ApiKey, ...], info: ValidationInfo) -> tuple[ApiKey, ...]:
        check_distinct(keys, info.data.get("api_key"), info.data.get("admin_api_key"))
        return keys


class StoreSection(Section):
    """The store of files, batches, responses, conversations and threads."""

    path: Auto | DirPath | None = Field(
        "auto",
        union_mode="left_to_right",
        description="Directory of files, batches and responses. auto: ~/.local/share/jaxserve if usable; "
        "null: no store, which disables the routes of files, batches and stored responses.",
    )
    thread_expiry: Seconds = Field(
        3600.0, description="Seconds after its last request that a thread of /v1/messages is kept."
    )
    thread_quota: Bytes = Field(
        256 * 2**20,
        description="Bytes of the threads of one API key. Beyond, those used longest ago are dropped.",
    )


class MediaSection(Section):
    """Pictures in requests, for models that take them."""

    allowed_hosts: HostNames = Field(
        (),
        description="Hosts from which pictures may be fetched by URL; *.example.com: all below, *: any. Only public "
        "addresses are fetched from. Empty: pictures come as data: URLs only.",
    )
    max_items: Int = Field(
        16,
        ge=0,
        le=256,
        description="Maximum number of pictures in a prompt. 0: no tower is loaded, and the model is served as text.",
    )
    max_bytes: Bytes = Field(
        20 * 2**20, description="Maximum bytes of an encoded picture, e.g. of a JPEG; at most 64 MiB."
    )
    max_pixels: Int = Field(
        40_000_000,
        ge=1024,
        le=100_000_000,
        description="Maximum pixels of a picture before it is resized; all pictures of a prompt: 4 times as many.",
    )
    cache: Bytes = Field(
        256 * 2**20, description="Memory for pictures that were read, so that one sent again is not decoded again."
    )
    memory: Bytes = Field(
        2**30,
        description="Memory for all pictures that were read, those of running requests included. Beyond, requests with "
        "pictures get status 503.",
    )

    @field_validator("max_bytes")
    @classmethod
    def _as_large_as_a_body(cls, size: int) -> int:
        if size > 64 * 2**20:
            raise ValueError("should be at most 64MiB")
        return size


class LoggingSection(Section):
    """Log lines and traces."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    format: Literal["auto", "text", "json"] = Field("auto", description="Format of log lines. auto: text.")
    requests: bool = Field(False, description="Log one line per request, without its text.")
    otlp_endpoint: Url | None = Field(
        None, description="URL for OpenTelemetry spans (OTLP over HTTP). null: no tracing."
    )
    stats_interval: Seconds = Field(10.0, description="Seconds between two log lines of a busy engine.")


# Keys by the names that they had in 0.3. Both names are read until 0.5, the old one with a warning.
RENAMED: Mapping[str, str] = {"runtime.products": "runtime.activations"}


class Config(Section):
    """All sections of the configuration."""

    model: ModelSection = ModelSection()  # type: ignore[call-arg]
    mesh: MeshSection = MeshSection()  # type: ignore[call-arg]
    cache: CacheSection = CacheSection()  # type: ignore[call-arg]
    scheduler: SchedulerSection = SchedulerSection()  # type: ignore[call-arg]
    runtime: RuntimeSection = RuntimeSection()  # type: ignore[call-arg]
    speculation: SpeculationSection = SpeculationSection()  # type: ignore[call-arg]
    lora: LoraSection = LoraSection()  # type: ignore[call-arg]
    server: ServerSection = ServerSection()  # type: ignore[call-arg]
    store: StoreSection = StoreSection()  # type: ignore[call-arg]
    models: ModelsSection = ModelsSection()  # type: ignore[call-arg]
    media: MediaSection = MediaSection()  # type: ignore[call-arg]
    logging: LoggingSection = LoggingSection()  # type: ignore[call-arg]

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> Config:
        """Build a Config from nested dicts. Raises ConfigError with every wrong key and value, but no secret."""
        tree, notices = with_current_names(tree)
        for notice in notices:
            logger.warning(notice)
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    def replace(self, **sections: dict[str, Any]) -> Config:
        """Return a new, validated Config with some keys changed: `config.replace(model={"path": "..."})`."""
        tree = self.model_dump(exclude_unset=True)
        for name, changes in sections.items():
            tree[name] = tree.get(name, {}) | changes
        return Config.parse(tree)

    def without_secrets(self) -> Config:
        """Return a copy without secrets, for a process that serves no clients."""
        return self.replace(server=dict.fromkeys(SECRETS) | {"keys": ()})

    def with_secrets(self) -> str:
        """Return the configuration as JSON with its secrets, for a process that serves clients. `parse` reads it."""
        return json.dumps(self.model_dump(exclude_unset=True), default=_plain)

    @classmethod
    def of(cls, model: str | None = None, **keys: Any) -> Config:
        """Build a Config from keys without their section: `Config.of("DIR", max_num_seqs=8, num_pages=64)`.

        Raises ConfigError for a key that no section or more than one section has.
        """
        tree: dict[str, dict[str, Any]] = {"model": {"path": model}}
        for name, value in keys.items():
            sections = [key.partition(".")[0] for key in [*known_keys(), *RENAMED] if key.partition(".")[2] == name]
            if name in _ALSO_ELSEWHERE:
                sections = [_ALSO_ELSEWHERE[name]]
            if not sections:
                names = (key.partition(".")[2] for key in known_keys())
                raise ConfigError(f"no key {name!r}{suggestion(name, names)}")
            if len(sections) > 1:
                raise ConfigError(
                    f"{' and '.join(sections)} have a key {name!r}",
                    fix=f"set one of them by Config.of(...).replace({sections[-1]}={{{name!r}: ...}})",
                )
            tree.setdefault(sections[0], {})[name] = value
        return cls.parse(tree)


_ALSO_ELSEWHERE = {"dtype": "model", "allowed_hosts": "server"}  # key -> the section that it means without one


def _plain(value: Any) -> Any:
    return reveal(value) if isinstance(value, Secret | SecretStr) else str(value)


def known_keys() -> dict[str, FieldInfo]:
    """Return every key as `section.name`, with its field."""
    keys: dict[str, FieldInfo] = {}
    for section, field in Config.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        keys |= {f"{section}.{name}": inner for name, inner in field.annotation.model_fields.items()}
    return keys


def old_name_notice(old: str) -> str:
    """Return the warning about a key of RENAMED."""
    return f"{old} is called {RENAMED[old]} now; the old name is read until version 0.5"


def with_current_names(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return nested dicts with today's names of the keys, and a warning for each old name.

    Raises ConfigError if a key has both names.
    """
    found, notices = dict(tree), []
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        keys = found.get(section)
        if isinstance(keys, Mapping) and name in keys:
            current = new.partition(".")[2]
            if current in keys:
                raise ConfigError(f"{old} and {new} are the same key", fix=f"leave {old} out")
            found[section] = {current if key == name else key: value for key, value in keys.items()}
            notices.append(old_name_notice(old))
    return found, notices


def suggestion(word: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ", did you mean ...?" with the choice most similar to `word`; "" if none is similar."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f", did you mean {near[0]}?" if near else ""


# pydantic's own messages about these errors speak of Python
_PLAIN_WORDS = {
    "tuple_type": "should be a list",
    "dataclass_type": "should be a mapping",
    "model_type": "should be a mapping",
    "dict_type": "should be a mapping",
    "extra_forbidden": "is no key here",
    "unexpected_keyword_argument": "is no key here",
    "missing": "is missing",
}


def _explain(error: ValidationError) -> str:
    """List all wrong keys in one line, with the allowed types of each key together. Shows no secret."""
    reasons: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        where = [str(part) for part in detail["loc"]]
        rest = where[1:2]
        key = ".".join(where if rest and rest[0] in _LISTS else where[:2])
        if detail["type"] == "extra_forbidden" and len(where) <= 2:
            reasons[f"unknown key {key}{suggestion(key, [*known_keys(), *Config.model_fields])}"] = []
            continue
        word = _PLAIN_WORDS.get(detail["type"]) or detail["msg"].partition(", unable to parse")[0]
        word = word.removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ")
        reasons.setdefault(key, []).append(word)
        if rest and rest[0] not in (*SECRETS, *_LISTS):
            shown[key] = f", not {detail['input']!r:.80}"
    lines = (
        f"{key}: {' or '.join(dict.fromkeys(words))}".removesuffix(": ") + shown.get(key, "")
        for key, words in reasons.items()
    )
    return "; ".join(lines)


def changed_keys(old: Config, new: Config) -> list[str]:
    """Return the names of the keys that differ, such as `server.port`."""
    return [
        f"{section}.{name}"
        for section in Config.model_fields
        for name in type(getattr(old, section)).model_fields
        if getattr(getattr(old, section), name) != getattr(getattr(new, section), name)
    ]
