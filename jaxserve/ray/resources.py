"""What a replica takes of the cluster: CPUs, devices, and the placement group that keeps them together.

One process drives all devices of an engine, so a replica is one actor with all of them in one bundle. Ray is not
imported here.
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


def resource_options(model: Mapping[str, Any], config: Config, kind: str) -> dict[str, Any]:
    """Return ray_actor_options and the placement group of an engine's deployment. Raises ConfigError."""
    actor = dict((model.get("deployment_config") or {}).get("ray_actor_options") or {})
    if model.get("runtime_env") is not None:
        actor.setdefault("runtime_env", model["runtime_env"])
    count = config.mesh.tensor * config.mesh.expert
    group = model.get("placement_group_config")
    accelerator = model.get("accelerator_type")
    if accelerator is not None and kind == "cpu":
        raise ConfigError(f"accelerator_type: {accelerator} is no type of CPU", fix="leave it out")
    if group is None:
        actor = _device_options(kind, count) | actor
        if accelerator is not None:
            actor.setdefault("accelerator_type", accelerator)
        return {"ray_actor_options": actor}
    bundle = _bundle(group, kind, count)
    if accelerator is not None:
        bundle.setdefault(f"accelerator_type:{accelerator}", TYPE_AMOUNT)
    return {
        "ray_actor_options": _actor_options(bundle) | actor,
        "placement_group_bundles": [bundle],
        "placement_group_strategy": group.get("strategy", "PACK"),
    }


def _device_options(kind: str, count: int) -> dict[str, Any]:
    if kind == "gpu":
        return {"num_cpus": 1, "num_gpus": count}
    return {"num_cpus": 1, "resources": {"TPU": count}} if kind == "tpu" else {"num_cpus": 1}


def _bundle(group: Any, kind: str, count: int) -> dict[str, float]:
    """Return the resources of one engine. bundle_per_worker is one device's share, as in `ray.serve.llm`."""
    if not isinstance(group, dict) or set(group) - {"bundles", "bundle_per_worker", "strategy"}:
        raise ConfigError("placement_group_config: its keys are bundles or bundle_per_worker, and strategy")
    if ("bundles" in group) == ("bundle_per_worker" in group):
        raise ConfigError("placement_group_config: give either bundles or bundle_per_worker")
    if group.get("strategy", "PACK") not in STRATEGIES:
        raise ConfigError(f"placement_group_config: strategy must be one of {', '.join(STRATEGIES)}")
    if "bundle_per_worker" in group:
        bundle = {name: amount * count for name, amount in group["bundle_per_worker"].items()}
    else:
        bundle = _only(group["bundles"])
    device = _DEVICES.get(kind)
    if device is not None and bundle.get(device, 0) != count:
        raise ConfigError(
            f"placement_group_config: the bundle has {bundle.get(device, 0):g} {device}, and the mesh takes {count}",
            fix=f"write {device}: {count}, or set tensor_parallel_size",
        )
    return bundle


def _only(bundles: Any) -> dict[str, float]:
    if not isinstance(bundles, list) or not bundles:
        raise ConfigError("placement_group_config: bundles must be a list")
    if len(bundles) > 1:
        raise ConfigError(
            f"placement_group_config: {len(bundles)} bundles, and an engine under Ray Serve runs on one host",
            fix="write one bundle with all devices of the engine",
        )
    return dict(bundles[0])


def _actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return what the actor itself takes: the whole bundle."""
    rest = dict(bundle)
    options: dict[str, Any] = {"num_cpus": rest.pop("CPU", 0)}
    if gpus := rest.pop("GPU", 0):
        options["num_gpus"] = gpus
    if memory := rest.pop("memory", 0):
        options["memory"] = memory
    return options | ({"resources": rest} if rest else {})
