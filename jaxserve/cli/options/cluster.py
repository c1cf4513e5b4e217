"""Which host of an engine over several hosts this is, from the variables that a cluster sets (`mesh.cluster`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import ConfigError

Environment = Mapping[str, str]
KEYS = ("hosts", "host_rank", "leader_address")  # of the section mesh


def fill_hosts(tree: dict[str, Any], environ: Environment) -> None:
    """Put the keys of the hosts into the section `mesh` if mesh.cluster is set. Keys that are given stay.

    tree: nested plain data, changed in place. Raises ConfigError if the variables are missing or wrong.
    """
    mesh = tree.get("mesh")
    if isinstance(mesh, dict) and (name := str(mesh.get("cluster") or "none")) != "none" and name in _named():
        tree["mesh"] = dict(zip(KEYS, found(name, environ), strict=True)) | mesh


def _named() -> list[str]:
    return ["auto", *_CLUSTERS]


def found(cluster: str, environ: Environment) -> tuple[int, int, str]:
    """Return the number of hosts, this host's rank, and the address of the leader. cluster: a name or "auto".

    Raises ConfigError.
    """
    if cluster == "auto":
        there = [name for name, (mark, _) in _CLUSTERS.items() if environ.get(mark)]
        if len(there) != 1:
            marks = ", ".join(mark for mark, _ in _CLUSTERS.values())
            state = f"the variables of {' and '.join(there)} are" if there else f"none of {marks} is"
            raise ConfigError(f"mesh.cluster auto: {state} set", fix=f"name the cluster: {', '.join(_CLUSTERS)}")
        cluster = there[0]
    return _CLUSTERS[cluster][1](environ)


def _lws(environ: Environment) -> tuple[int, int, str]:
    hosts, rank = _number(environ, "LWS_GROUP_SIZE"), _number(environ, "LWS_WORKER_INDEX")
    return hosts, rank, _text(environ, "LWS_LEADER_ADDRESS")


def _slurm(environ: Environment) -> tuple[int, int, str]:
    """Read the job step of this process: `srun` with one task on each node."""
    hosts, tasks = _number(environ, "SLURM_STEP_NUM_NODES"), _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks != hosts:
        raise ConfigError(
            f"mesh.cluster slurm: the step has {tasks} tasks on {hosts} nodes", fix="srun --ntasks-per-node=1"
        )
    return hosts, _number(environ, "SLURM_NODEID"), first_node(_text(environ, "SLURM_STEP_NODELIST"))


def _tpu(environ: Environment) -> tuple[int, int, str]:
    """Read the slice of TPUs that GKE describes."""
    names = [name for name in _text(environ, "TPU_WORKER_HOSTNAMES").split(",") if name]
    return len(names), _number(environ, "TPU_WORKER_ID"), names[0]


# name -> (a variable that is set there and nowhere else, what reads it)
_CLUSTERS: Mapping[str, tuple[str, Callable[[Environment], tuple[int, int, str]]]] = {
    "lws": ("LWS_LEADER_ADDRESS", _lws),
    "slurm": ("SLURM_STEP_NODELIST", _slurm),
    "gke": ("TPU_WORKER_HOSTNAMES", _tpu),
}


def first_node(nodes: str) -> str:
    """Return the first name of SLURM's list of nodes, such as node[001-004,9],login1. Raises ConfigError."""
    match = re.fullmatch(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?(?:,.*)?", nodes)
    if match is None:
        raise ConfigError(f"mesh.cluster slurm: {nodes!r} is no list of nodes", fix="set mesh.leader_address")
    return "".join(part or "" for part in match.groups())


def _text(environ: Environment, name: str) -> str:
    if not (text := environ.get(name, "")):
        raise ConfigError(f"mesh.cluster: the variable {name} is not set", fix="set mesh.hosts and its ranks by flags")
    return text


def _number(environ: Environment, name: str) -> int:
    text = _text(environ, name)
    if not text.isdecimal():
        raise ConfigError(f"mesh.cluster: {name} is {text!r}, and should be a number")
    return int(text)
