"""The configuration: one frozen tree, validated once, one spelling in YAML, as flags and in the environment.

This file owns the keys, their defaults and their limits. It reads nothing from a model or a device: "auto" values
stay "auto" here and are resolved by whoever knows the answer, into a new Config (`resolved`).
Parsing of files, flags and environment variables is cli/options/settings.py's.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from jaxserve.config_keys import ApiKey, ApiKeys, check_distinct
from jaxserve.config_types import (
    WEEK,
    Auto,
    DirPath,
    Float,
    Int,
    Key,
    Names,
    Origins,
    Seconds,
    SecretSeed,
    Text,
    TextOrTemplate,
    Url,
)
from jaxserve.errors import ConfigError

SECRETS = ("api_key", "admin_api_key", "keys", "watermark_key")  # of the section server; never printed


class Section(BaseModel):
    """A part of the tree: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


class ModelSection(Section):
    """The model that is served."""

    path: Text | None = Field(None, description="Hub id or directory; null: the embedded demo model.")
    served_name: Names = Field((), description="Names clients may use; the first is shown. Default: the path.")
    tokenizer: Text | None = Field(None, description="Hub id or directory of the tokenizer, if not the model's.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and activations. auto: float32 on CPU, bfloat16 elsewhere."
    )
    max_model_len: Annotated[Int, Field(ge=8, le=2**26)] | None = Field(
        None, description="Context in tokens. Default: the model's own."
    )
    chat_template: TextOrTemplate | None = Field(
        None, description="A file with a Jinja template, or the template itself."
    )
    tool_parser: Text = Field("auto", description="Parser of tool calls in the output, by name; none: off.")
    reasoning_parser: Text = Field("auto", description="Parser of reasoning in the output, by name; none: off.")
    revision: Text | None = Field(None, description="Branch, tag or commit on the hub.")
    quantization: None = Field(None, description="Reserved.")
    load_format: Literal["auto", "safetensors", "random"] = Field(
        "auto", description="random: weights drawn on the device from runtime.random_seed (null: 0), for benchmarks."
    )


class MeshSection(Section):
    """How one engine is spread over devices, and how many engines there are."""

    replicas: Int = Field(1, ge=1, le=64, description="Independent engines behind one endpoint.")
    data: Int = Field(1, ge=1, le=4096, description="Devices over which requests are split.")
    tensor: Int = Field(1, ge=1, le=4096, description="Devices over which heads, FFN and vocabulary are split.")
    expert: Int = Field(1, ge=1, le=4096, description="Devices over which experts are split.")
    device: Literal["auto", "cpu", "gpu", "tpu"] = Field("auto", description="Platform to run on.")


class CacheSection(Section):
    """The paged KV cache."""

    page_size: Annotated[Int, Field(ge=1, le=4096)] | Auto = Field(
        "auto", description="Tokens a page. auto: 16 on CPU and GPU, 128 on TPU."
    )
    num_pages: Annotated[Int, Field(ge=1, lt=2**31)] | Auto = Field(
        "auto", description="Pages in the pool. auto: what memory_fraction leaves."
    )
    num_window_pages: Annotated[Int, Field(ge=1, lt=2**31)] | Auto = Field(
        "auto",
        description="Pages of the layers with a sliding window, which keep the window only. auto: enough for "
        "all requests at once, or half as many as the others have.",
    )
    memory_fraction: Float = Field(0.9, ge=0.01, le=1, description="Share of the memory XLA holds, for everything.")
    prefix_cache: bool = Field(True, description="Share the KV pages of equal prompt prefixes.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: the model's.")


class SchedulerSection(Section):
    """Continuous batching."""

    max_num_seqs: Annotated[Int, Field(ge=1, le=4096)] | Auto = Field(
        "auto", description="Requests that run at once. auto: 64 on CPU, 512 else."
    )
    max_num_batched_tokens: Annotated[Int, Field(ge=1, le=2**20)] | Auto = Field(
        "auto", description="Tokens in one step, decode and prefill. auto: 512 on CPU, 8192 else."
    )
    policy: Literal["fcfs", "lpm", "priority"] = Field("fcfs", description="Order of the waiting queue.")
    max_queued_requests: Int = Field(4096, ge=1, le=10**6, description="Waiting requests; one more is answered 429.")
    max_queued_tokens: Annotated[Int, Field(ge=1, le=10**10)] | None = Field(
        None, description="Waiting prompt tokens; more is answered 429."
    )
    prefill_chunk_size: Annotated[Int, Field(ge=1, le=2**20)] | None = Field(
        None, description="Prompt tokens in one step, all requests together. Default: what the step has room for."
    )
    aging_steps: Int = Field(
        1024, ge=1, le=10**9, description="Steps after which a waiting request is not overtaken any more."
    )
    new_token_ratio: Float = Field(
        0.7, gt=0, le=1, description="Share of a request's max_tokens that admission reserves, at the start."
    )


class RuntimeSection(Section):
    """The device side."""

    attention: Literal["auto", "reference", "xla", "native", "triton", "mosaic_gpu", "tpu"] = Field(
        "auto", description="Attention backend. An explicit choice never falls back."
    )
    deterministic: bool = Field(False, description="Bitwise the same output whatever else is running.")
    compile_cache: Auto | DirPath | None = Field(
        "auto",
        union_mode="left_to_right",
        description="Directory of compiled programs. auto: jaxserve/xla in the user's cache; null: none.",
    )
    random_seed: Int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="Seeds requests that bring none, alike at each start. null: drawn and logged at each.",
    )


class ServerSection(Section):
    """HTTP."""

    host: Text = Field("127.0.0.1", description="Address to listen on; 0.0.0.0: all of this machine's.")
    port: Int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: Key | None = Field(None, description="Clients must send it as a bearer token. null: anyone may use it.")
    admin_api_key: Key | None = Field(None, description="Opens the admin routes. null: they are off.")
    keys: ApiKeys = Field((), description="More keys: [{name, value or sha256}]. What one stores others do not see.")
    watermark_key: SecretSeed | None = Field(
        None, description="Secret number: drawn text carries its watermark unless a request says no."
    )
    request_timeout: Seconds | None = Field(None, description="Seconds a request may take in all.")
    queue_timeout: Seconds | None = Field(None, description="Seconds a request may wait in the queue.")
    drain_timeout: Float = Field(30.0, ge=0, le=WEEK, description="Seconds given to running requests on SIGTERM.")
    watchdog_timeout: Float = Field(
        60.0,
        gt=1,
        le=WEEK,
        description="Seconds without a heartbeat, or in one turn, after which the engine is restarted.",
    )
    max_body_bytes: Annotated[Int, Field(ge=1024, le=2**31)] | Auto = Field(
        "auto",
        description="Largest body but uploads; more is 413. auto: 8 MiB, or 32 bytes for each token of the context, at "
        "most 64 MiB.",
    )
    header_timeout: Seconds = Field(10.0, description="Seconds for a request's headers; then it is closed.")
    body_timeout: Seconds = Field(60.0, description="Seconds for a body, and one more for each 10 kB of it.")
    send_timeout: Seconds = Field(60.0, description="Seconds a client may not read; then it is closed.")
    max_unread_bytes: Int = Field(
        4 * 2**20,
        ge=64 * 2**10,
        le=2**31,
        description="Held for a stream whose client does not read, then it ends; of all streams 16 times as much.",
    )
    cors_origins: Origins = Field((), description="Origins of browsers that may call; none: no CORS headers.")
    reasoning_field: Literal["reasoning_content", "both"] = Field(
        "reasoning_content", description="Field of answers that holds the reasoning. both: also vLLM's reasoning."
    )
    metrics_auth: bool = Field(False, description="Ask for the key on /metrics too.")
    ssl_keyfile: Text | None = Field(None, description="File of the private key, for https.")
    ssl_certfile: Text | None = Field(None, description="File of the certificate, for https.")

    @property
    def needs_key(self) -> bool:
        """Clients must send a key."""
        return self.api_key is not None or bool(self.keys)

    @field_validator("keys")
    @classmethod
    def _distinct(cls, keys: tuple[ApiKey, ...], info: ValidationInfo) -> tuple[ApiKey, ...]:
        check_distinct(keys, info.data.get("api_key"), info.data.get("admin_api_key"))
        return keys


class StoreSection(Section):
    """Files and batches."""

    path: Auto | DirPath | None = Field(
        "auto",
        union_mode="left_to_right",
        description="Directory of the durable store. auto: ~/.local/share/jaxserve, without files and batches if it "
        "cannot be used; null: neither.",
    )


class LoggingSection(Section):
    """Log lines and traces."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level shown.")
    format: Literal["auto", "text", "json"] = Field("auto", description="auto: text.")
    requests: bool = Field(False, description="Log a line a request; never its text.")
    otlp_endpoint: Url | None = Field(None, description="Send OpenTelemetry spans here (OTLP over HTTP).")
    stats_interval: Seconds = Field(10.0, description="Seconds between the engine's log lines when busy.")


class Config(Section):
    """The whole tree."""

    model: ModelSection = ModelSection()  # type: ignore[call-arg]
    mesh: MeshSection = MeshSection()  # type: ignore[call-arg]
    cache: CacheSection = CacheSection()  # type: ignore[call-arg]
    scheduler: SchedulerSection = SchedulerSection()  # type: ignore[call-arg]
    runtime: RuntimeSection = RuntimeSection()  # type: ignore[call-arg]
    server: ServerSection = ServerSection()  # type: ignore[call-arg]
    store: StoreSection = StoreSection()  # type: ignore[call-arg]
    logging: LoggingSection = LoggingSection()  # type: ignore[call-arg]

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> Config:
        """A Config from nested plain data. Raises ConfigError naming every wrong key and value, but no secret."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    def replace(self, **sections: dict[str, Any]) -> Config:
        """A new, validated Config with some keys changed: `config.replace(model={"path": "..."})`."""
        tree = self.model_dump(exclude_unset=True)
        for name, changes in sections.items():
            tree[name] = tree.get(name, {}) | changes
        return Config.parse(tree)

    def without_secrets(self) -> Config:
        """What a process needs that answers no clients."""
        return self.replace(server=dict.fromkeys(SECRETS) | {"keys": ()})

    @classmethod
    def of(cls, model: str | None = None, **keys: Any) -> Config:
        """A Config from bare key names, for code: `Config.of("DIR", max_num_seqs=8, num_pages=64)`.

        Raises ConfigError for a name that no section has, or that more than one has.
        """
        tree: dict[str, dict[str, Any]] = {"model": {"path": model}}
        for name, value in keys.items():
            sections = [key.partition(".")[0] for key in known_keys() if key.partition(".")[2] == name]
            if name == "dtype":
                sections = ["model"]
            if len(sections) != 1:
                raise ConfigError(f"no key {name!r}" if not sections else f"{name!r} is in {sections}")
            tree.setdefault(sections[0], {})[name] = value
        return cls.parse(tree)


def known_keys() -> dict[str, FieldInfo]:
    """Every key of the tree, `section.name`, with its field."""
    keys: dict[str, FieldInfo] = {}
    for section, field in Config.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        keys |= {f"{section}.{name}": inner for name, inner in field.annotation.model_fields.items()}
    return keys


def suggestion(word: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """ ", did you mean ...?" with the choice nearest to `word`; empty if none is near."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f", did you mean {near[0]}?" if near else ""


def _explain(error: ValidationError) -> str:
    """All wrong keys in one line; the alternatives of one key (a number, or auto) together. Shows no secret."""
    reasons: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        where = [str(part) for part in detail["loc"]]
        rest = where[1:2]
        key = ".".join(where if rest == ["keys"] else where[:2])
        if detail["type"] == "extra_forbidden" and len(where) <= 2:
            reasons[f"unknown key {key}{suggestion(key, [*known_keys(), *Config.model_fields])}"] = []
            continue
        reasons.setdefault(key, []).append(detail["msg"].removeprefix("Value error, ").removeprefix("Input "))
        if rest and rest[0] not in SECRETS:
            shown[key] = f", not {detail['input']!r:.80}"
    lines = (
        f"{key}: {' or '.join(dict.fromkeys(words))}".removesuffix(": ") + shown.get(key, "")
        for key, words in reasons.items()
    )
    return "; ".join(lines)
