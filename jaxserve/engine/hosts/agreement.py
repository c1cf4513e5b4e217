"""Checks that the hosts of a group have the same key, versions and configuration before they touch a device."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from jaxserve.config import Config, MeshSection
from jaxserve.errors import ConfigError
from jaxserve.types.group import Hello
from jaxserve.version import __version__

MIN_KEY = 16  # characters
# Sections that determine the programs. All hosts take the leader's.
AGREED_SECTIONS = ("model", "mesh", "cache", "scheduler", "runtime", "speculation", "lora")
# Keys that each host has for itself.
LOCAL = (
    "mesh.cluster",
    "mesh.host_rank",
    "mesh.leader_address",
    "mesh.leader_port",
    "mesh.group_key_file",
    "mesh.join_timeout",
    "model.path",
    "model.tokenizer",
    "runtime.compile_cache",
    "lora.adapters",  # the leader tells the others which to read
    "lora.keep",
)


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts."""
    return {"jaxserve": __version__, "jax": metadata.version("jax"), "jaxlib": metadata.version("jaxlib")}


def group_key(section: MeshSection) -> bytes:
    """Return the secret of the group; empty if there is none and the leader is at a loopback address.

    Raises ConfigError if it is missing or too short.
    """
    if section.group_key_file is None:
        if _is_loopback(section.leader[0]):
            return b""
        raise ConfigError(
            f"mesh.leader_address {section.leader[0]} can be reached from other machines, and there is no key",
            fix="write a random text into a file on each host and set mesh.group_key_file to it",
        )
    try:
        key = section.group_key_file.read_bytes().strip()
    except OSError as error:
        fix = "set it to a file with a random text that the server may read, the same on each host"
        raise ConfigError(f"mesh.group_key_file cannot be read: {error}", fix=fix) from error
    if len(key) < MIN_KEY:
        message = f"mesh.group_key_file has {len(key)} characters, and {MIN_KEY} are needed"
        raise ConfigError(message, fix="write a longer random text into the file on each host")
    return key


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def check_hosts(config: Config) -> None:
    """Raise ConfigError if the configuration asks for something that an engine over several hosts cannot do."""
    if config.mesh.hosts == 1:
        return
    speculation = config.speculation
    drafts = "draft_model" if speculation.method == "auto" else f"method {speculation.method}"
    for name, used in (
        ("mesh.replicas", config.mesh.replicas > 1),
        ("mesh.data", config.mesh.data > 1),
        ("models.served", bool(config.models.served)),
        ("cache.host_memory", config.cache.host_memory is not None),
        (f"speculation.{drafts}", speculation.on_device),
    ):
        if used:
            raise ConfigError(
                f"{name} does not work together with mesh.hosts above 1", fix=f"leave {name} or mesh.hosts out"
            )
    if config.mesh.is_auto:  # the hosts must have the same split, and each sees the memory of its own devices only
        raise ConfigError(
            "auto of mesh.tensor and mesh.expert does not work together with mesh.hosts above 1",
            fix="set both; jaxserve plan MODEL --mesh N shows the splits of N devices that fit",
        )
    group_key(config.mesh)


def settings(config: Config) -> dict[str, Any]:
    """Return the keys that this host's command changes from their defaults and that the leader's must equal."""
    tree = config.model_dump(mode="json", exclude_defaults=True, include=set(AGREED_SECTIONS))
    named = {f"{section}.{name}": value for section, keys in tree.items() for name, value in keys.items()}
    return {key: value for key, value in named.items() if key not in LOCAL}


def hello(config: Config) -> Hello:
    """Return the first message of a follower."""
    return Hello(config.mesh.host_rank, config.mesh.hosts, versions(), settings(config))


def objection(config: Config, follower: Hello) -> str | None:
    """Return the reason why a follower cannot be in the leader's group; None if it can."""
    mesh = config.mesh
    if follower.num_hosts != mesh.hosts:
        return f"the leader has mesh.hosts {mesh.hosts}, and host {follower.rank} {follower.num_hosts}"
    if not 0 < follower.rank < mesh.hosts:
        return f"the leader is host 0, and there is no host {follower.rank} among {mesh.hosts}"
    own = versions()
    for name, version in sorted(follower.versions.items()):
        if version != own.get(name):
            return f"the leader has {name} {own.get(name)}, and host {follower.rank} {version}"
    tree = config.model_dump(mode="json", include=set(AGREED_SECTIONS))
    for key, value in sorted(follower.settings.items()):
        section, _, name = key.partition(".")
        if (leaders := tree.get(section, {}).get(name)) != value:
            return f"{key} is {leaders!r} at the leader and {value!r} on host {follower.rank}"
    return None


def for_followers(config: Config) -> str:
    """Return the leader's configuration as JSON, without the keys that each host has for itself."""
    tree = config.model_dump(mode="json", exclude_defaults=True, include=set(AGREED_SECTIONS))
    for key in LOCAL:
        section, _, name = key.partition(".")
        if key != "model.path":
            tree.get(section, {}).pop(name, None)
    return json.dumps(tree)


def followed(own: Config, leaders: str) -> Config:
    """Return the configuration of a follower: the leader's, with the keys that the follower has for itself.

    leaders: from `for_followers`. A follower without a model.path takes the leader's.
    """
    tree: dict[str, dict[str, Any]] = json.loads(leaders)
    mine: Mapping[str, Mapping[str, Any]] = own.model_dump(
        mode="json", exclude_defaults=True, include=set(AGREED_SECTIONS)
    )
    for key in LOCAL:
        section, _, name = key.partition(".")
        if name in mine.get(section, {}):
            tree.setdefault(section, {})[name] = mine[section][name]
    return Config.parse(tree)


def free_port(host: str) -> int:
    """Return a port of `host` on which nothing listens."""
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]
