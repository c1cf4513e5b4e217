"""Turn the arguments of the Serve application, named as in `ray.serve.llm`, into jaxserve's flags and Ray's options.

    llm_configs:
      - model_loading_config: {model_id: qwen3-0.6b, model_source: Qwen/Qwen3-0.6B}
        accelerator_type: H100
        engine_kwargs: {max_num_seqs: 256, cache: {memory_fraction: 0.9}}
        deployment_config: {autoscaling_config: {min_replicas: 1, max_replicas: 4}}

A key has its effect or is refused by name.

A replica takes CPUs, devices and a placement group from the cluster. One process drives all devices that an engine has
on a host. Each host is therefore one actor with one bundle: the replica is in the first bundle, and followers are in
the others (deployments.py). Ray is not imported here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.cli.options import load_config, parse_flags
from jaxserve.config import Config, suggestion
from jaxserve.engine.hosts.agreement import check_hosts
from jaxserve.errors import ConfigError

KINDS = ("cpu", "gpu", "tpu")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
TYPE_AMOUNT = 0.001  # amount of the resource accelerator_type:X, as Ray itself requests it

_DEVICES = {"gpu": "GPU", "tpu": "TPU"}


def num_hosts(model: Mapping[str, Any], config: Config) -> int:
    """Return the number of hosts of an engine: mesh.hosts, or the number of bundles. Raises ConfigError."""
    group = model.get("placement_group_config")
    bundles = group.get("bundles") if isinstance(group, dict) else None
    given = len(bundles) if isinstance(bundles, list) and bundles else config.mesh.hosts
    if config.mesh.hosts not in (1, given):
        message = f"placement_group_config: {given} bundles, and mesh.hosts is {config.mesh.hosts}"
        raise ConfigError(message, fix="give one bundle for each host, or leave mesh.hosts out")
    return given


def resource_options(model: Mapping[str, Any], config: Config, kind: str) -> dict[str, Any]:
    """Return ray_actor_options and the placement group of an engine's deployment. Raises ConfigError.

    config: configuration that has the number of hosts
    """
    actor = dict((model.get("deployment_config") or {}).get("ray_actor_options") or {})
    if model.get("runtime_env") is not None:
        actor.setdefault("runtime_env", model["runtime_env"])
    hosts = config.mesh.hosts
    if config.mesh.is_auto:
        raise ConfigError(
            "auto of mesh.tensor and mesh.expert does not work under Ray, which is asked for a number of devices",
            fix="set both; jaxserve plan MODEL --mesh N shows the splits of N devices that fit",
        )
    count, rest = divmod(math.prod(config.mesh.split), hosts)
    if rest:
        raise ConfigError(
            f"mesh: {count * hosts + rest} devices on {hosts} hosts", fix="take the same number of each host"
        )
    group = model.get("placement_group_config")
    accelerator = model.get("accelerator_type")
    if accelerator is not None and kind == "cpu":
        raise ConfigError(f"accelerator_type: {accelerator} is no type of CPU", fix="leave it out")
    if group is None and hosts == 1:
        actor = _actor_options(_device_bundle(kind, count)) | actor
        if accelerator is not None:
            actor.setdefault("accelerator_type", accelerator)
        return {"ray_actor_options": actor}
    bundles = [_device_bundle(kind, count)] * hosts if group is None else _bundles(group, kind, count, hosts)
    if accelerator is not None:
        bundles = [{f"accelerator_type:{accelerator}": TYPE_AMOUNT} | bundle for bundle in bundles]
    return {
        "ray_actor_options": _actor_options(bundles[0]) | actor,
        "placement_group_bundles": bundles,
        "placement_group_strategy": (group or {}).get("strategy", "PACK"),
    }


def follower_options(engine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of the actor of each host but the first. engine: options of the engine's deployment"""
    shared = {name: value for name, value in engine["ray_actor_options"].items() if name == "runtime_env"}
    return [_actor_options(bundle) | shared for bundle in engine.get("placement_group_bundles", ())[1:]]


def _device_bundle(kind: str, count: int) -> dict[str, float]:
    device = _DEVICES.get(kind)
    return {"CPU": 1} if device is None else {"CPU": 1, device: count}


def _bundles(group: Any, kind: str, count: int, hosts: int) -> list[dict[str, float]]:
    """Return the resources of each host from placement_group_config. Raises ConfigError.

    count: devices of a host. bundle_per_worker is one device's share, as in `ray.serve.llm`.
    """
    if not isinstance(group, dict) or set(group) - {"bundles", "bundle_per_worker", "strategy"}:
        raise ConfigError("placement_group_config: its keys are bundles or bundle_per_worker, and strategy")
    if ("bundles" in group) == ("bundle_per_worker" in group):
        raise ConfigError("placement_group_config: give either bundles or bundle_per_worker")
    if group.get("strategy", "PACK") not in STRATEGIES:
        raise ConfigError(f"placement_group_config: strategy must be one of {', '.join(STRATEGIES)}")
    if "bundle_per_worker" in group:
        bundles = [{name: amount * count for name, amount in group["bundle_per_worker"].items()}] * hosts
    elif isinstance(group["bundles"], list) and group["bundles"]:
        bundles = [dict(bundle) for bundle in group["bundles"]]
    else:
        raise ConfigError("placement_group_config: bundles must be a list")
    device = _DEVICES.get(kind)
    for bundle in bundles:
        if device is not None and bundle.get(device, 0) != count:
            raise ConfigError(
                f"placement_group_config: a bundle has {bundle.get(device, 0):g} {device}, and the mesh takes {count}",
                fix=f"write {device}: {count} for each host, or set tensor_parallel_size",
            )
    return bundles


def _actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return the resources of the actor itself: the whole bundle."""
    rest = dict(bundle)
    options: dict[str, Any] = {"num_cpus": rest.pop("CPU", 0)}
    if gpus := rest.pop("GPU", 0):
        options["num_gpus"] = gpus
    if memory := rest.pop("memory", 0):
        options["memory"] = memory
    return options | ({"resources": rest} if rest else {})


ROUTER = "jaxserve.ray.router:PrefixRouter"
STATS_SECONDS = 1.0  # seconds between two readings of a replica's load
STOP_SECONDS = 15.0  # an engine must end within this time after its requests
SPARE = 1.25  # requests that a replica accepts, as a multiple of max_num_seqs
FULL = 0.75  # requests of a replica at which replicas are added, as a multiple of max_num_seqs
INGRESS_REQUESTS = 10_000  # most requests of one ingress, waiting or answered; the engines limit what runs

_APP_KEYS = ("llm_configs", "ingress_deployment_config")
_MODEL_KEYS = (
    *("model_loading_config", "llm_engine", "engine_kwargs", "accelerator_type", "accelerator_config"),
    *("placement_group_config", "deployment_config", "runtime_env", "log_engine_metrics"),
)
_DEPLOYMENT_KEYS = (
    *("name", "num_replicas", "autoscaling_config", "ray_actor_options", "request_router_config", "logging_config"),
    *("max_ongoing_requests", "max_queued_requests", "max_replicas_per_node", "health_check_period_s"),
    *("health_check_timeout_s", "graceful_shutdown_wait_loop_s", "graceful_shutdown_timeout_s"),
)
_REFUSED = {
    "ingress_cls_config": "leave it out: the ingress passes requests on as they are",
    "lora_config": "write engine_kwargs: {lora: {slots: 4, adapters: [{name: NAME, path: DIR}]}}",
    "server_cls": "leave it out: the engine is jaxserve's",
    "callback_config": "leave it out: no code of the configuration is run",
    "experimental_configs": "leave it out: an answer's parts are passed on at once, those that wait together",
    "user_config": "write engine_kwargs: a change starts new replicas",
    "tokenizer_source": "leave it out: the tokenizer is the model's",
}
# keys that are refused here -> the option of Serve to use in their place
_NOT_HERE = {
    **dict.fromkeys(("server.host", "server.port", "server.ssl_keyfile", "server.ssl_certfile"), "http_options"),
    **dict.fromkeys(("server.header_timeout", "server.send_timeout", "server.max_unread_bytes"), "http_options"),
    "server.workers": "ingress_deployment_config: {num_replicas: N}",
    "mesh.replicas": "deployment_config: {num_replicas: N}, or its autoscaling_config",
    "models.served": "one application for each model",
    "lora.keep": "lora.adapters: there is no store",
    **dict.fromkeys(("mesh.cluster", "mesh.host_rank"), "placement_group_config: {bundles: [...]}, one for each host"),
    **dict.fromkeys(
        ("mesh.leader_address", "mesh.leader_port", "mesh.group_key_file"), "nothing: each replica has its own"
    ),
    "store.path": "nothing: files and batches of one replica would be unknown to the others",
}


@dataclass(frozen=True)
class RaySettings:
    """The settings of one application.

    words: flags of `jaxserve launch`, which each replica reads beside its own environment
    engine, ingress: options of the two deployments. followers: options of the actor of each host but the first
    variables: environment variables of the engines, from their runtime_env
    """

    words: tuple[str, ...]
    config: Config
    engine: dict[str, Any]
    ingress: dict[str, Any]
    followers: list[dict[str, Any]]
    variables: dict[str, str]
    log_engine_metrics: bool

    @classmethod
    def parse(cls, args: Mapping[str, Any], environ: Mapping[str, str]) -> RaySettings:
        """Read an application's arguments. Raises ConfigError for a key or a value that does not fit."""
        _check_keys("args", args, _APP_KEYS)
        models = args.get("llm_configs")
        if not isinstance(models, list) or len(models) != 1:
            raise ConfigError("llm_configs: it must be a list of one model", fix="write one application for each model")
        model = _mapping("llm_configs", models[0])
        _check_keys("llm_configs", model, _MODEL_KEYS)
        if model.get("llm_engine", "jaxserve") != "jaxserve":
            raise ConfigError(f"llm_engine: {model['llm_engine']} is not served here", fix="leave it out")
        words = _words(model)
        config = load_config(words, environ)
        kind = _kind(model, config)
        words += ["--mesh.device", kind, "--mesh.hosts", str(num_hosts(model, config))]
        config = load_config(words, environ)
        check_hosts(config)
        engine = _engine_options(model, config, kind)
        return cls(
            words=tuple(words),
            config=config,
            engine=engine,
            ingress=_ingress_options(_section(args, "ingress_deployment_config"), config),
            followers=follower_options(engine),
            variables=_section(_section(engine["ray_actor_options"], "runtime_env"), "env_vars"),
            log_engine_metrics=_flag(model, "log_engine_metrics"),
        )


def _words(model: Mapping[str, Any]) -> list[str]:
    """Turn model_loading_config and engine_kwargs into flags. Raises ConfigError for a flag that is not served."""
    words = [*_model_words(_section(model, "model_loading_config")), "--store.path", "null"]
    given: list[str] = []
    for name, value in _section(model, "engine_kwargs").items():
        given += _flags_of(str(name), value)
    for key in parse_flags(given).values:
        if key in _NOT_HERE:
            raise ConfigError(f"engine_kwargs: {key} is not jaxserve's under Ray Serve", fix=f"use {_NOT_HERE[key]}")
    return words + given


def _model_words(loading: Mapping[str, Any]) -> list[str]:
    """Return the flags of the model. Without model_loading_config it is the demo model.

    model_source is a directory or a hub id; by default it is the model_id.
    """
    _check_keys("model_loading_config", loading, ("model_id", "model_source"))
    if not loading:
        return []
    name = loading.get("model_id")
    source = loading.get("model_source", name)
    if not isinstance(name, str) or not isinstance(source, str):
        raise ConfigError(
            "model_loading_config: model_id and model_source must be texts", fix="name a directory or a hub id"
        )
    return [source, "--model.served-name", name]


def _flags_of(name: str, value: Any) -> list[str]:
    """Return the flags of a key and its value.

    `max_model_len: 8192` is --max-model-len=8192, and `scheduler: {policy: lpm}` is --scheduler.policy=lpm.
    """
    if name in Config.model_fields and isinstance(value, dict):
        return [word for key, inner in value.items() for word in _flags_of(f"{name}.{key}", inner)]
    flag = "--" + name.replace("_", "-")
    if value is None:
        return [f"{flag}=null"] if "." in name else []  # in vLLM None means the default
    if isinstance(value, list) and not any(isinstance(each, dict | list) for each in value):
        return [f"{flag}={_text(each)}" for each in value]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _kind(model: Mapping[str, Any], config: Config) -> str:
    """Return the platform: from accelerator_config, else from mesh.device, else gpu, as in `ray.serve.llm`.

    auto would run on the CPU without a message, because Ray hides GPUs from actors that did not request any.
    """
    accelerator = _section(model, "accelerator_config")
    _check_keys("accelerator_config", accelerator, ("kind",))
    chosen = config.mesh.device
    kind = accelerator.get("kind", "gpu" if chosen == "auto" else chosen)
    if kind not in KINDS:
        raise ConfigError(f"accelerator_config: kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if chosen not in ("auto", kind):
        raise ConfigError(f"accelerator_config: {kind} and mesh.device {chosen} differ", fix="leave one out")
    return kind


def _engine_options(model: Mapping[str, Any], config: Config, kind: str) -> dict[str, Any]:
    given = _section(model, "deployment_config")
    _check_keys("deployment_config", given, _DEPLOYMENT_KEYS)
    running = _max_num_seqs(config, kind)
    options: dict[str, Any] = {
        "name": "JaxserveEngine:" + _name(model, config),
        "max_ongoing_requests": math.ceil(SPARE * running),
        "max_queued_requests": config.scheduler.max_queued_requests,
        "graceful_shutdown_timeout_s": config.server.drain_timeout + STOP_SECONDS,
    }
    options |= given
    options["request_router_config"] = {
        "request_router_class": ROUTER,
        "request_routing_stats_period_s": STATS_SECONDS,
    } | _section(given, "request_router_config")
    if options.get("num_replicas") == "auto" or options.get("autoscaling_config") is not None:
        target = {"target_ongoing_requests": max(1.0, FULL * running)}
        options["autoscaling_config"] = target | _section(given, "autoscaling_config")
    return options | resource_options(model, config, kind)


def _ingress_options(given: Mapping[str, Any], config: Config) -> dict[str, Any]:
    _check_keys("ingress_deployment_config", given, _DEPLOYMENT_KEYS)
    options: dict[str, Any] = {
        "name": "JaxserveIngress",
        "max_ongoing_requests": INGRESS_REQUESTS,
        "graceful_shutdown_timeout_s": config.server.drain_timeout + STOP_SECONDS,
        "ray_actor_options": {"num_cpus": 0},
    }
    return options | dict(given)


def _max_num_seqs(config: Config, kind: str) -> int:
    asked = config.scheduler.max_num_seqs
    return asked if asked != "auto" else 64 if kind == "cpu" else 512


def _name(model: Mapping[str, Any], config: Config) -> str:
    """Return the model's name for a deployment. Each run of characters that it may not have becomes `--`."""
    name = _section(model, "model_loading_config").get("model_id") or config.model.path or "demo"
    return re.sub(r"[^\w.]+", "--", str(name))


def _check_keys(where: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in given:
        if key in _REFUSED and key not in known:
            raise ConfigError(f"{where}: {key} is not served", fix=_REFUSED[key])
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}{suggestion(str(key), known)}")


def _section(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = given.get(key)
    return {} if value is None else dict(_mapping(key, value))


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: it must be a mapping")
    return value


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, True)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}: it must be true or false")
    return value
