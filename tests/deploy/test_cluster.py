"""deploy/kubernetes: KubeRay, LeaderWorkerSet and the Gateway API inference extension, held to the code.

The fields that are checked here are those of the published schemas that matter; schemas.py checks all of them.
"""

import importlib
import re
import tomllib
from typing import Any

import pytest
import yaml

from jaxserve.api.health import router
from jaxserve.cli.options import load_config
from jaxserve.ray.settings import RaySettings
from tests.api.conftest import LiveServer
from tests.deploy import schemas
from tests.deploy.manifests import KUBERNETES, ROOT, documents, instruction, pod
from tests.deploy.test_deploy import MARGIN

PORT = int(instruction("EXPOSE"))

# the model server protocol of the inference extension and llm-d's router: what the picker's plugins of
# router-values.yaml read
PICKED_BY = {
    "queue-scorer": "vllm:num_requests_waiting",
    "kv-cache-utilization-scorer": "vllm:kv_cache_usage_perc",
    "prefix-cache-scorer": "vllm:cache_config_info",
}


def rayservice() -> Any:
    [found] = documents(KUBERNETES / "ray" / "rayservice.yaml")
    return found["spec"]


def test_the_ray_service_is_an_application_of_jaxserve() -> None:
    spec = rayservice()
    serve = yaml.safe_load(spec["serveConfigV2"])
    [application] = serve["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    settings = RaySettings.parse(application["args"], {})
    [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= settings.config.server.drain_timeout + MARGIN
    assert spec["rayClusterDeletionDelaySeconds"] >= settings.config.server.drain_timeout
    assert {"name": "serve", "containerPort": serve["http_options"]["port"]} in container["ports"]
    actor = settings.engine["ray_actor_options"]
    limits, asked = container["resources"]["limits"], container["resources"]["requests"]
    assert actor["num_gpus"] == limits["nvidia.com/gpu"] and actor["num_cpus"] < int(asked["cpu"])
    scaling = settings.engine["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (group["minReplicas"], group["maxReplicas"])


def test_the_ray_cluster_is_closed_and_of_the_version_of_the_extra() -> None:
    cluster = rayservice()["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [extra] = project["optional-dependencies"]["ray"]
    assert re.fullmatch(r"ray\[serve\]>=([\d.]+),<3", extra)[1] == cluster["rayVersion"].removesuffix(".0")  # type: ignore[index]
    assert "api_key" not in rayservice()["serveConfigV2"]  # the dashboard shows it


def test_a_leader_worker_set_starts_the_server() -> None:
    found, service = documents(KUBERNETES / "leaderworkerset" / "leaderworkerset.yaml")
    template = found["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (1, "RecreateGroupOnPodRestart")
    spec = template["workerTemplate"]["spec"]
    [container] = spec["containers"]
    environ = {each["name"]: each.get("value", "secret") for each in container["env"]}
    config = load_config(container["args"][1:], {**environ, "JAXSERVE_SERVER__HOST": "0.0.0.0"})
    assert container["args"][0] == "launch" and config.mesh.device == "gpu" and config.server.needs_key
    assert spec["terminationGracePeriodSeconds"] >= config.server.drain_timeout + MARGIN
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    assert service["spec"]["ports"] == [{"name": "http", "port": PORT, "targetPort": "http"}]
    labels = template["workerTemplate"]["metadata"]["labels"].items()
    assert labels <= service["spec"]["selector"].items()
    probes = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes <= {getattr(route, "path", None) for route in router.routes}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_of_hosts_starts_one_engine(rank: int) -> None:
    found, service = documents(KUBERNETES / "leaderworkerset" / "hosts.yaml")
    template = found["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    assert found["spec"]["startupPolicy"] == "LeaderCreated"  # the leader is ready when the others have joined
    spec = template["workerTemplate"]["spec"]
    [container] = spec["containers"]
    given = {"LWS_GROUP_SIZE": 2, "LWS_WORKER_INDEX": rank, "LWS_LEADER_ADDRESS": "jaxserve-hosts-0.jaxserve-hosts"}
    words = [re.sub(r"\$\((\w+)\)", lambda match: str(given[match[1]]), word) for word in container["args"]]
    environ = {each["name"]: each.get("value", "secret") for each in container["env"]}
    config = load_config(words[1:], environ)
    mesh = config.mesh
    assert (mesh.hosts, mesh.host_rank, mesh.leader) == (2, rank, ("jaxserve-hosts-0.jaxserve-hosts", 29500))
    assert mesh.tensor == 2 * container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(mesh.group_key_file) == f"{mounts['group-key']}/key"
    assert spec["terminationGracePeriodSeconds"] >= config.server.drain_timeout + MARGIN
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    labels = template["workerTemplate"]["metadata"]["labels"].items()
    assert labels <= service["spec"]["selector"].items()


def test_the_pool_finds_the_pods_and_their_metrics() -> None:
    pool, route = documents(KUBERNETES / "gateway" / "pool.yaml")
    [kustomization] = documents(KUBERNETES / "base" / "kustomization.yaml")
    assert pool["spec"]["selector"]["matchLabels"] == kustomization["labels"][0]["pairs"]
    assert pool["spec"]["targetPorts"] == [{"number": PORT}]
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    group = pool["apiVersion"].partition("/")[0]
    assert backend == {"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}
    [patch] = documents(KUBERNETES / "gateway" / "open-metrics.yaml")
    [container] = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == pod()["containers"][0]["name"]
    environ = {each["name"]: each["value"] for each in container["env"]}
    assert not load_config([], environ).server.metrics_auth


def test_the_picker_reads_metrics_that_there_are() -> None:
    [values] = documents(KUBERNETES / "gateway" / "router-values.yaml")
    epp = values["router"]["epp"]
    said = yaml.safe_load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]])
    plugins = {each["type"] for each in said["plugins"]}
    [profile] = said["schedulingProfiles"]
    assert {each["pluginRef"] for each in profile["plugins"]} == plugins == {*PICKED_BY, "max-score-picker"}
    with LiveServer() as server:
        text = server.http.get("/metrics").text
    assert set(PICKED_BY.values()) <= set(re.findall(r"^([\w:]+)", text, re.MULTILINE))
    [info] = re.findall(r"^vllm:cache_config_info\{(.*)\} ", text, re.MULTILINE)
    assert {"block_size", "num_gpu_blocks"} <= set(re.findall(r"(\w+)=", info))


CRD = """
kind: CustomResourceDefinition
spec:
  group: example.com
  names: {kind: Thing}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              required: [size]
              properties:
                size: {type: integer}
                port: {x-kubernetes-int-or-string: true}
                labels: {type: object, additionalProperties: {type: string}}
"""


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"size": 1, "port": "http", "labels": {"a": "b"}}, 0),
        ({"size": 1, "sizes": 2}, 1),
        ({"port": 80}, 1),
        ({"size": "1", "labels": {"a": 1}}, 2),
    ],
)
def test_schemas_find_what_is_wrong(tmp_path: Any, spec: dict[str, Any], wrong: int) -> None:
    path = tmp_path / "crd.yaml"
    path.write_text(CRD)
    [schema] = schemas.schemas_of([path]).values()
    thing = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "a"}, "spec": spec}
    assert len(list(schemas.problems(thing, schema))) == wrong
