"""deploy/: every file parses, and names only flags, keys, routes, ports, extras and metrics that exist."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.health import router
from jaxserve.errors import ConfigError
from tests.api.conftest import LiveServer

from . import manifests
from .manifests import DEPLOY, KUBERNETES, MONITORING, ROOT, STARTS, Start, documents, of_kind, pod

MARGIN = 10  # seconds from the end of a drain to the end of the process


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_it_is_yaml(path: Path) -> None:
    assert all(isinstance(each, dict) for each in documents(path))


@pytest.mark.parametrize("start", STARTS)
def test_a_start_is_understood_and_has_time_to_drain(start: str) -> None:
    found = STARTS[start]()
    config = found.config
    assert found.grace >= config.server.drain_timeout + MARGIN
    kept = [found.environ["XDG_CACHE_HOME"], found.environ["HF_HOME"], str(config.store.path)]
    assert all(any(Path(path).is_relative_to(volume) for volume in found.volumes) for path in kept)


@pytest.mark.parametrize("start", ["image", "compose", "kubernetes"])
def test_a_container_is_reached_from_outside(start: str) -> None:
    server = STARTS[start]().config.server
    assert (server.host, server.port) == ("0.0.0.0", int(manifests.instruction("EXPOSE")))
    assert server.needs_key or start == "image"


def test_what_is_wrong_is_found() -> None:
    good = manifests.compose()
    for bad in (
        good._replace(words=[*good.words, "--max-num-seq", "4"]),
        good._replace(environ={**good.environ, "JAXSERVE_SERVER__HOSTS": "0.0.0.0"}),
        good._replace(words=["launch", "--port", "http"]),
    ):
        with pytest.raises(ConfigError):
            assert isinstance(bad, Start) and bad.config


def test_ports_agree() -> None:
    port = int(manifests.instruction("EXPOSE"))
    [container] = pod()["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": port}]
    for service in of_kind("Service"):
        assert service["spec"]["ports"] == [{"name": "http", "port": port, "targetPort": "http"}]
    compose = documents(DEPLOY / "compose.yaml")[0]["services"]["jaxserve"]
    assert compose["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"http://127.0.0.1:{port}/" in manifests.instruction("HEALTHCHECK")


def test_probes_are_routes() -> None:
    routes = {getattr(route, "path", None) for route in router.routes}
    [container] = pod()["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "readiness": "/health",
        "liveness": "/live",
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    [monitor] = of_kind("ServiceMonitor")
    asked = {endpoint["path"] for endpoint in monitor["spec"]["endpoints"]} | {
        probe["path"] for probe in probes.values()
    }
    asked |= set(re.findall(r"127\.0\.0\.1:\d+(/\w+)", manifests.instruction("HEALTHCHECK")))
    assert asked == {"/health", "/live", "/metrics"} <= routes


def test_a_volume_of_the_group_is_safe_for_compiled_programs() -> None:
    """jaxserve/system.py takes a directory that a group may write only if the group is the user's own."""
    ids = re.search(r"groupadd --gid (\d+) (\w+) .*useradd --uid (\d+) --gid (\w+)", manifests.DOCKERFILE)
    assert ids is not None and ids[2] == ids[4] and manifests.instruction("USER") == f"{ids[3]}:{ids[1]}"
    security = pod()["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (
        int(ids[3]),
        int(ids[1]),
        int(ids[1]),
    )


def labels_of(service: Any) -> set[tuple[str, str]]:
    return {*service["metadata"].get("labels", {}).items(), ("app.kubernetes.io/name", "jaxserve")}


def test_selectors_select() -> None:
    [kustomization] = documents(KUBERNETES / "base" / "kustomization.yaml")
    assert kustomization["labels"][0]["pairs"] == {"app.kubernetes.io/name": "jaxserve"}
    [budget] = of_kind("PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"] == kustomization["labels"][0]["pairs"]
    [monitor] = of_kind("ServiceMonitor")
    wanted = set(monitor["spec"]["selector"]["matchLabels"].items())
    assert [each["metadata"]["name"] for each in of_kind("Service") if wanted <= labels_of(each)] == ["jaxserve"]
    [autoscaler], [workload] = of_kind("HorizontalPodAutoscaler"), of_kind("StatefulSet")
    assert autoscaler["spec"]["scaleTargetRef"] == {
        **{key: workload[key] for key in ("apiVersion", "kind")},
        "name": workload["metadata"]["name"],
    }


def test_the_network_is_open_for_what_the_pods_need() -> None:
    [policy] = of_kind("NetworkPolicy")
    [kustomization] = documents(KUBERNETES / "base" / "kustomization.yaml")
    assert policy["spec"]["podSelector"]["matchLabels"] == kustomization["labels"][0]["pairs"]
    [rule] = policy["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [port["name"] for port in pod()["containers"][0]["ports"]]
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {53, 443}


def test_every_pod_has_shared_memory_and_a_cache_that_is_no_empty_directory() -> None:
    """Everybody may write an emptyDir, so no compiled programs are kept there."""
    specs = [pod()]
    for path in (*(KUBERNETES / "leaderworkerset").glob("*.yaml"), KUBERNETES / "ray" / "rayservice.yaml"):
        spec = documents(path)[0]["spec"]
        if "rayClusterConfig" in spec:
            specs += [group["template"]["spec"] for group in spec["rayClusterConfig"]["workerGroupSpecs"]]
        else:
            specs.append(spec["leaderWorkerTemplate"]["workerTemplate"]["spec"])
    assert len(specs) == 4
    for spec in specs:
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        assert (mounts["shm"], mounts["cache"]) == ("/dev/shm", "/var/cache/jaxserve")
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert "cache" not in volumes or "ephemeral" in volumes["cache"]
        assert spec["securityContext"]["fsGroup"] == 10001


@pytest.mark.parametrize("path", sorted(KUBERNETES.rglob("kustomization.yaml")), ids=lambda path: path.parent.name)
def test_a_kustomization_names_files_that_are_there(path: Path) -> None:
    [said] = documents(path)
    named = [*said.get("resources", []), *(patch["path"] for patch in said.get("patches", []))]
    assert named and all((path.parent / name).exists() for name in named)


def test_devices_are_extras_and_platforms() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    platforms = {}
    for path in (KUBERNETES / "overlays").glob("*/devices.yaml"):
        [container] = documents(path)[0]["spec"]["template"]["spec"]["containers"]
        [tag] = [each["newTag"] for each in documents(path.parent / "kustomization.yaml")[0]["images"]]
        environ = {**manifests.kubernetes().environ, **{entry["name"]: entry["value"] for entry in container["env"]}}
        platforms[tag] = manifests.kubernetes()._replace(environ=environ).config.mesh.device
    assert platforms == {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
    assert set(re.findall(r"EXTRAS=([a-z]+)", manifests.DOCKERFILE)) == platforms.keys() - {"cpu"} <= extras.keys()


def expressions() -> Iterator[str]:
    """Yield what dashboards, alerts and the adapter of the autoscaler ask of Prometheus."""
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    [rules] = of_kind("PrometheusRule")
    yield from (rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"])
    yield documents(MONITORING / "adapter-values.yaml")[0]["rules"]["custom"][0]["seriesQuery"]


def test_they_ask_for_metrics_that_there_are(tmp_path: Path) -> None:
    with LiveServer(store=tmp_path) as server:
        server.post("/v1/completions", {"model": "demo", "prompt": "Hi"})
        server.post("/v1/completions", {"model": "demo", "prompt": "Hi", "n": 1000})
        text = server.http.get("/metrics").text
    # what the engine itself counts is in its details, and the fake engine has none; a label's first value comes late
    there = set(re.findall(r"^# TYPE (\S+)", text, re.M)) | set(re.findall(r"^([\w:]+)", text, re.M))
    asked = {name for text in expressions() for name in re.findall(r"((?:jaxserve:|process_)\w+)", text)}
    assert len(asked) > 20
    assert asked - there - {"jaxserve:rebuilds", "jaxserve:request_errors_total"} == set()


def test_the_autoscaler_reads_the_metric_that_the_adapter_makes() -> None:
    rule = documents(MONITORING / "adapter-values.yaml")[0]["rules"]["custom"][0]
    series = rule["seriesQuery"].partition("{")[0]
    made = re.sub(rule["name"]["matches"], rule["name"]["as"].replace("$1", r"\1"), series)
    [autoscaler] = of_kind("HorizontalPodAutoscaler")
    assert [metric["pods"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]] == [made]


def test_the_secret_has_the_keys_that_are_read() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    asked = {word["key"]: word.get("optional", False) for word in secrets(list(manifests.objects()))}
    assert asked == {"api_key": False, "admin_api_key": False, "hf_token": True}
    assert set(re.findall(r"--from-literal=(\w+)=", text)) == asked.keys()


def secrets(tree: Any) -> Iterator[Any]:
    """Yield the references to the secret in a tree of plain data."""
    if isinstance(tree, dict):
        if tree.get("name") == "jaxserve-keys":
            yield tree
        tree = list(tree.values())
    for part in tree if isinstance(tree, list) else ():
        yield from secrets(part)
