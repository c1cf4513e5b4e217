"""The hosts of an engine from the variables of a cluster."""

import pytest

from jaxserve.cli.options import first_node, load_config
from jaxserve.errors import ConfigError

LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "jaxserve-0.jaxserve.default"}
SLURM = {
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
GKE = {"TPU_WORKER_HOSTNAMES": "slice-0.jobs,slice-1.jobs", "TPU_WORKER_ID": "1"}


def hosts(environ: dict[str, str], *flags: str) -> tuple[int, int, str]:
    mesh = load_config(flags, environ).mesh
    return mesh.hosts, mesh.host_rank, mesh.leader[0]


@pytest.mark.parametrize(
    ("name", "environ", "expected"),
    [
        ("lws", LWS, (4, 2, "jaxserve-0.jaxserve.default")),
        ("slurm", SLURM, (3, 1, "gpu07")),
        ("gke", GKE, (2, 1, "slice-0.jobs")),
    ],
)
def test_a_cluster_says_the_hosts(name: str, environ: dict[str, str], expected: tuple[int, int, str]) -> None:
    assert hosts(environ, "--mesh.cluster", name) == expected
    assert hosts(environ, "--mesh.cluster=auto") == expected
    assert hosts(environ | {"JAXSERVE_MESH__CLUSTER": name}) == expected
    assert hosts(environ)[:2] == (1, 0), "only if it is asked for"


def test_what_is_given_stays() -> None:
    given = hosts(LWS, "--mesh.cluster", "lws", "--node-rank", "3", "--master-addr", "10.0.0.1")
    assert given == (4, 3, "10.0.0.1")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[001-004,9],login1", "gpu001"),
        ("gpu[7,9]-ib,x", "gpu7-ib"),
        ("a-b.c[12]", "a-b.c12"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("cluster", "environ", "message"),
    [
        ("auto", {}, "none of LWS_LEADER_ADDRESS, SLURM_STEP_NODELIST, TPU_WORKER_HOSTNAMES is set"),
        ("auto", LWS | GKE, "the variables of lws and gke are set"),
        ("lws", GKE, "LWS_GROUP_SIZE is not set"),
        ("slurm", SLURM | {"SLURM_STEP_NUM_TASKS": "24"}, "24 tasks on 3 nodes"),
        ("slurm", SLURM | {"SLURM_STEP_NODELIST": "["}, "no list of nodes"),
        ("gke", GKE | {"TPU_WORKER_ID": "one"}, "TPU_WORKER_ID is 'one'"),
        ("gke", GKE | {"TPU_WORKER_ID": "2"}, "there are 2 hosts"),
        ("k8s", LWS, "mesh.cluster"),
    ],
)
def test_variables_that_do_not_fit_are_named(cluster: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_config(["--mesh.cluster", cluster], environ)
