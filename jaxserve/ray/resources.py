"""What a replica takes of the cluster: CPUs, devices, and the placement group that keeps them together.

One process drives all devices that an engine has on a host, so each host is one actor with one bundle: the replica in
the first one, followers in the others (group.py). Ray is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.config import Config
from jaxserve.errors import ConfigError

KINDS = ("cpu", "gpu", "tpu")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
TYPE_AMOUNT = 0.001  # of accelerator_type:X, as Ray itself asks for it

_DEVICES = {"gpu": "GPU", "tpu": "TPU"}


def num_hosts(model: Mapping[str, Any], config: Config) -> int:
    """Return the number of hosts of an engine: mesh.hosts, or the number of bundles. Raises ConfigError."""
    group = model.get("placement_group_config")
    bundles = group.get("bundles") if isinstance(group, dict) else None
    given = len(bundles) if isinstance(bundles, list) and bundles else config.mesh.hosts
    if config.mesh.hosts not in (1, given):
        raise ConfigError(f"placement_group_config: {given} bundles, and mesh.hosts is {config.mesh.hosts}")
    return given


def resource_options(model: Mapping[str, Any], config: Config, kind: str) -> dict[str, Any]:
    """Return ray_actor_options and the placement group of an engine's deployment. Raises ConfigError.

    config: with the number of hosts
    """
    actor = dict((model.get("deployment_config") or {}).get("ray_actor_options") or {})
    if model.get("runtime_env") is not None:
        actor.setdefault("runtime_env", model["runtime_env"])
    hosts = config.mesh.hosts
    count, rest = divmod(config.mesh.tensor * config.mesh.expert, hosts)
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
    """Return the options of the actor of each host but the first. engine: options of the deployment"""
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
    """Return what the actor itself takes: the whole bundle."""
    rest = dict(bundle)
    options: dict[str, Any] = {"num_cpus": rest.pop("CPU", 0)}
    if gpus := rest.pop("GPU", 0):
        options["num_gpus"] = gpus
    if memory := rest.pop("memory", 0):
        options["memory"] = memory
    return options | ({"resources": rest} if rest else {})
