"""The configuration: one frozen tree, validated once, one spelling in YAML, as flags and in the environment.

This file owns the keys, their defaults and their limits. It reads nothing from a model or a device: "auto" values
stay "auto" here and are resolved by whoever knows the answer, into a new Config (`resolved`).
Parsing of files, flags and environment variables is cli/settings.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from jaxserve.errors import ConfigError

Auto = Literal["auto"]


def _one_or_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _expand(value: Any) -> Any:
    return str(Path(value).expanduser()) if isinstance(value, str | Path) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_list)]
DirPath = Annotated[Path, BeforeValidator(_expand)]


class Section(BaseModel):
    """A part of the tree: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ModelSection(Section):
    """What is served."""

    path: str | None = Field(None, description="Hub id or directory; none: the embedded demo model.")
    served_name: Names = Field((), description="Names clients may use; the first is shown. Default: the path.")
    tokenizer: str | None = Field(None, description="Hub id or directory of the tokenizer, if not the model's.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and activations. auto: float32 on CPU, bfloat16 elsewhere."
    )
    max_model_len: int | None = Field(None, ge=8, description="Context in tokens. Default: the model's own.")
    chat_template: str | None = Field(None, description="A file with a Jinja template, or the template itself.")
    tool_parser: str = Field("auto", description="Parser of tool calls in the output, by name; none: off.")
    reasoning_parser: str = Field("auto", description="Parser of reasoning in the output, by name; none: off.")
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    quantization: None = Field(None, description="Reserved.")
    load_format: Literal["auto", "safetensors", "random"] = Field(
        "auto", description="random: weights drawn on the device from runtime.random_seed, for benchmarks."
    )


class MeshSection(Section):
    """How one engine is spread over devices, and how many engines there are."""

    replicas: int = Field(1, ge=1, le=64, description="Independent engines behind one endpoint.")
    data: int = Field(1, ge=1)
    tensor: int = Field(1, ge=1, description="Devices over which heads, FFN and vocabulary are split.")
    expert: int = Field(1, ge=1, description="Devices over which experts are split.")
    device: Literal["auto", "cpu", "gpu", "tpu"] = Field("auto", description="Platform to run on.")


class CacheSection(Section):
    """The paged KV cache."""

    page_size: int | Auto = Field("auto", description="Tokens a page. auto: 16 on CPU and GPU, 128 on TPU.")
    num_pages: int | Auto = Field("auto", description="Pages in the pool. auto: what memory_fraction leaves.")
    num_window_pages: int | Auto = Field(
        "auto",
        description="Pages of the layers with a sliding window, which keep the window only. auto: enough for "
        "all requests at once, or half as many as the others have.",
    )
    memory_fraction: float = Field(0.9, gt=0, le=1, description="Share of the memory XLA holds, for everything.")
    prefix_cache: bool = Field(True, description="Share the KV pages of equal prompt prefixes.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: the model's.")


class SchedulerSection(Section):
    """Continuous batching."""

    max_num_seqs: int | Auto = Field("auto", description="Requests that run at once. auto: 64 on CPU, 512 else.")
    max_num_batched_tokens: int | Auto = Field(
        "auto", description="Tokens in one step, decode and prefill. auto: 512 on CPU, 8192 else."
    )
    policy: Literal["fcfs", "lpm", "priority"] = Field("fcfs", description="Order of the waiting queue.")
    max_queued_requests: int = Field(4096, ge=1, description="Waiting requests; one more is answered 429.")
    max_queued_tokens: int | None = Field(None, ge=1, description="Waiting prompt tokens; more is answered 429.")
    prefill_chunk_size: int | None = Field(
        None, ge=1, description="Prompt tokens in one step, all requests together. Default: what the step has room for."
    )
    aging_steps: int = Field(1024, ge=1, description="Steps after which a waiting request is passed by nobody.")
    new_token_ratio: float = Field(
        0.7, gt=0, le=1, description="Share of a request's max_tokens that admission reserves, at the start."
    )


class RuntimeSection(Section):
    """The device side."""

    attention: Literal["auto", "reference", "xla", "native", "triton", "mosaic_gpu", "tpu"] = Field(
        "auto", description="Attention backend. An explicit choice never falls back."
    )
    deterministic: bool = Field(False, description="Bitwise the same output whatever else is running.")
    compile_cache: DirPath | None = Field(
        Path("~/.cache/jaxserve/xla"), description="Directory of compiled programs; null: none."
    )
    random_seed: int = Field(0, ge=0, lt=2**63, description="Seeds requests that bring none.")


class ServerSection(Section):
    """HTTP."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 takes a free one.")
    api_key: str | None = Field(None, description="Clients must send it as a bearer token.")
    admin_api_key: str | None = Field(None, description="Opens the admin routes.")
    watermark_key: int | None = Field(
        None, ge=0, lt=2**63, description="Secret: drawn text carries its watermark unless a request says no."
    )
    request_timeout: float | None = Field(None, gt=0, description="Seconds a request may take in all.")
    queue_timeout: float | None = Field(None, gt=0, description="Seconds a request may wait in the queue.")
    drain_timeout: float = Field(30.0, ge=0, description="Seconds given to running requests on SIGTERM.")
    watchdog_timeout: float = Field(
        60.0, gt=1, description="Seconds without a heartbeat, or in one turn, after which the engine is restarted."
    )
    max_body_bytes: int = Field(64 * 2**20, ge=1024, description="Largest body but uploads; more is 413.")
    header_timeout: float = Field(10.0, gt=0, description="Seconds for a request's headers; then it is cut.")
    body_timeout: float = Field(60.0, gt=0, description="Seconds for a body, and one more for each 10 kB of it.")
    send_timeout: float = Field(60.0, gt=0, description="Seconds a client may not read; then it is cut.")
    cors_origins: Names = Field((), description="Origins of browsers that may call; none: no CORS headers.")
    metrics_auth: bool = Field(False, description="Ask for the key on /metrics too.")
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None


class StoreSection(Section):
    """Files and batches."""

    path: DirPath = Field(Path("~/.local/share/jaxserve"), description="Directory of the durable store.")


class LoggingSection(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else lines.")
    requests: bool = Field(False, description="Log a line a request; never its text.")
    otlp_endpoint: str | None = Field(None, description="Send OpenTelemetry spans here (OTLP over HTTP).")
    stats_interval: float = Field(10.0, gt=0, description="Seconds between the engine's log lines when busy.")


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

    def replace(self, **sections: dict[str, Any]) -> Config:
        """A new, validated Config with some keys changed: `config.replace(model={"path": "..."})`."""
        tree = self.model_dump()
        for name, changes in sections.items():
            tree[name] = tree[name] | changes
        return Config.model_validate(tree)

    @classmethod
    def of(cls, model: str | None = None, **keys: Any) -> Config:
        """A Config from bare key names, for code: `Config.of("DIR", max_num_seqs=8, num_pages=64)`.

        Raises ConfigError for a name that no section has, or that more than one has.
        """
        tree: dict[str, dict[str, Any]] = {"model": {"path": model}}
        for name, value in keys.items():
            sections = [s for s, field in cls.model_fields.items() if name in _fields_of(field.annotation)]
            if name == "dtype":
                sections = ["model"]
            if len(sections) != 1:
                raise ConfigError(f"no key {name!r}" if not sections else f"{name!r} is in {sections}")
            tree.setdefault(sections[0], {})[name] = value
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError("; ".join(f"{e['loc'][-1]}: {e['msg']}" for e in error.errors())) from None


def _fields_of(section: Any) -> Mapping[str, Any]:
    assert issubclass(section, Section)
    return section.model_fields
