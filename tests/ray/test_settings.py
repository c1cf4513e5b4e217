"""The arguments of a Serve application: `ray.serve.llm`'s names have their effect here or are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.errors import ConfigError
from jaxserve.ray.settings import RaySettings

ROOT = Path(__file__).parents[2]
CPU: dict[str, Any] = {"accelerator_config": {"kind": "cpu"}}


def parsed(model: dict[str, Any], environ: dict[str, str] | None = None, **args: Any) -> RaySettings:
    return RaySettings.parse({"llm_configs": [model], **args}, environ or {})


def test_the_preset_serves_the_demo_model() -> None:
    [said] = yaml.safe_load((ROOT / "configs" / "ray.yaml").read_text(encoding="utf-8"))["applications"]
    settings = RaySettings.parse(said["args"], {})
    assert said["import_path"] == "jaxserve.ray:build_app"
    assert settings.config.model.path is None and settings.config.mesh.device == "cpu"
    assert settings.engine["name"] == "JaxserveEngine:demo"
    assert (settings.engine["max_ongoing_requests"], settings.config.scheduler.max_num_seqs) == (20, 16)
    assert settings.engine["autoscaling_config"]["target_ongoing_requests"] == 12


def test_names_of_ray_serve_llm() -> None:
    settings = parsed(
        {
            "model_loading_config": {"model_id": "org/my model", "model_source": "/models/mine"},
            "llm_engine": "jaxserve",
            "accelerator_type": "H100",
            "engine_kwargs": {
                "max_model_len": 4096,
                "tensor_parallel_size": 2,
                "enable_prefix_caching": True,
                "seed": None,
                "scheduler": {"max_num_seqs": 100, "max_queued_requests": 7},
            },
            "deployment_config": {"num_replicas": 3, "health_check_period_s": 5},
            "runtime_env": {"env_vars": {"A": "b"}},
            "log_engine_metrics": False,
        }
    )
    config = settings.config
    assert (str(config.model.path), config.model.served_name) == ("/models/mine", ("org/my model",))
    assert (config.model.max_model_len, config.mesh.tensor, config.mesh.device) == (4096, 2, "gpu")
    assert config.store.path is None and not settings.log_engine_metrics
    engine = settings.engine
    assert engine["name"] == "JaxserveEngine:org--my--model" and engine["num_replicas"] == 3
    assert (engine["max_ongoing_requests"], engine["max_queued_requests"]) == (125, 7)
    assert "autoscaling_config" not in engine and engine["health_check_period_s"] == 5
    assert engine["graceful_shutdown_timeout_s"] > config.server.drain_timeout
    assert engine["ray_actor_options"] == {
        "num_cpus": 1,
        "num_gpus": 2,
        "accelerator_type": "H100",
        "runtime_env": {"env_vars": {"A": "b"}},
    }
    assert engine["request_router_config"]["request_router_class"] == "jaxserve.ray.router:PrefixRouter"


def test_a_source_is_the_id_unless_it_is_given() -> None:
    assert str(parsed({"model_loading_config": {"model_id": "a/b"}, **CPU}).config.model.path) == "a/b"


def test_replicas_read_their_own_environment() -> None:
    """A key is in no argument of the application, which Ray's dashboard shows."""
    settings = parsed(CPU, {"JAXSERVE_SERVER__API_KEY": "sesame"})
    assert settings.config.server.needs_key and "sesame" not in json.dumps([settings.words, settings.engine])


def test_autoscaling_goes_by_what_an_engine_runs() -> None:
    asked = {"num_replicas": "auto", "max_ongoing_requests": 9}
    engine = parsed({**CPU, "engine_kwargs": {"max_num_seqs": 8}, "deployment_config": asked}).engine
    assert engine["autoscaling_config"] == {"target_ongoing_requests": 6.0} and engine["max_ongoing_requests"] == 9
    own = {"autoscaling_config": {"max_replicas": 3, "target_ongoing_requests": 2}}
    assert parsed({**CPU, "deployment_config": own}).engine["autoscaling_config"] == own["autoscaling_config"]


@pytest.mark.parametrize("group", [{"bundle_per_worker": {"GPU": 1, "CPU": 2}}, {"bundles": [{"GPU": 4, "CPU": 8}]}])
def test_a_replica_is_one_actor_with_all_devices_in_one_bundle(group: dict[str, Any]) -> None:
    model = {"placement_group_config": {**group, "strategy": "STRICT_PACK"}, "accelerator_type": "L4"}
    engine = parsed({**model, "engine_kwargs": {"tensor_parallel_size": 4}}).engine
    assert engine["placement_group_bundles"] == [{"GPU": 4, "CPU": 8, "accelerator_type:L4": 0.001}]
    assert engine["placement_group_strategy"] == "STRICT_PACK"
    assert engine["ray_actor_options"] == {
        "num_cpus": 8,
        "num_gpus": 4,
        "resources": {"accelerator_type:L4": 0.001},
    }


@pytest.mark.parametrize(
    "keys",
    [
        {"placement_group_config": {"bundles": [{"GPU": 2, "CPU": 3}, {"GPU": 2, "CPU": 3}]}},
        {"placement_group_config": {"bundle_per_worker": {"GPU": 1, "CPU": 1.5}}, "mesh": {"hosts": 2}},
    ],
)
def test_a_bundle_for_each_host(keys: dict[str, Any]) -> None:
    group = {**keys["placement_group_config"], "strategy": "STRICT_SPREAD"}
    kwargs = {"tensor_parallel_size": 4} | {name: value for name, value in keys.items() if name == "mesh"}
    model = {"placement_group_config": group, "runtime_env": {"env_vars": {"A": "b"}}}
    settings = parsed({**model, "engine_kwargs": kwargs})
    assert settings.config.mesh.hosts == 2 and "--mesh.hosts" in settings.words
    assert settings.engine["placement_group_bundles"] == [{"GPU": 2, "CPU": 3}] * 2
    assert settings.engine["placement_group_strategy"] == "STRICT_SPREAD"
    actor = {"num_cpus": 3, "num_gpus": 2, "runtime_env": {"env_vars": {"A": "b"}}}
    assert settings.engine["ray_actor_options"] == actor and settings.followers == [actor]


def test_hosts_without_a_placement_group_get_one() -> None:
    kwargs = {"tensor_parallel_size": 4, "nnodes": 2, "max_num_seqs": 4}
    settings = parsed({"accelerator_type": "L4", "engine_kwargs": kwargs})
    assert settings.engine["placement_group_bundles"] == [{"accelerator_type:L4": 0.001, "CPU": 1, "GPU": 2}] * 2
    assert settings.followers == [{"num_cpus": 1, "num_gpus": 2, "resources": {"accelerator_type:L4": 0.001}}]


def test_chips_of_a_tpu_are_a_resource() -> None:
    model = {"accelerator_config": {"kind": "tpu"}, "engine_kwargs": {"tensor_parallel_size": 4}}
    assert parsed(model).engine["ray_actor_options"] == {"num_cpus": 1, "resources": {"TPU": 4}}


def test_options_of_the_ingress() -> None:
    settings = parsed(CPU, ingress_deployment_config={"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}})
    assert (settings.ingress["num_replicas"], settings.ingress["ray_actor_options"]) == (2, {"num_cpus": 1})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"lora_config": {}}, "lora_config is not served"),
        ({"server_cls": "a:B"}, "server_cls is not served"),
        ({"engine_kwarg": {}}, "unknown key engine_kwarg, did you mean engine_kwargs"),
        ({"llm_engine": "vLLM"}, "llm_engine: vLLM"),
        ({"model_loading_config": {"model_id": "a", "tokenizer_source": "b"}}, "tokenizer_source is not served"),
        ({"model_loading_config": {"model_id": "a", "model_source": {"bucket_uri": "s3://b"}}}, "must be texts"),
        ({"engine_kwargs": {"max_num_seq": 3}}, "unknown flag --max-num-seq"),
        ({"engine_kwargs": {"pipeline_parallel_size": 2}}, "--pipeline-parallel-size"),
        ({"engine_kwargs": {"port": 1}}, "server.port is not jaxserve's under Ray Serve"),
        ({"engine_kwargs": {"store": {"path": "/x"}}}, "store.path is not jaxserve's under Ray Serve"),
        ({"engine_kwargs": {"lora": {"slots": 1, "keep": True}}}, "lora.keep is not jaxserve's under Ray Serve"),
        ({"engine_kwargs": {"server": {"workers": 2}}}, "server.workers is not jaxserve's"),
        ({"deployment_config": {"user_config": {}}}, "user_config is not served"),
        ({"accelerator_config": {"kind": "cpu", "topology": "2x2"}}, "unknown key topology"),
        ({"accelerator_config": {"kind": "npu"}}, "kind must be one of cpu, gpu, tpu"),
        ({**CPU, "engine_kwargs": {"mesh": {"device": "gpu"}}}, "cpu and mesh.device gpu differ"),
        ({**CPU, "accelerator_type": "H100"}, "H100 is no type of CPU"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}, {"GPU": 1}]}}, "mesh: 1 devices on 2 hosts"),
        ({"placement_group_config": {"bundles": []}}, "bundles must be a list"),
        ({"placement_group_config": {"bundles": [{"GPU": 2}]}}, "has 2 GPU, and the mesh takes 1"),
        ({"placement_group_config": {"bundles": [{}] * 2}, "engine_kwargs": {"nnodes": 3}}, "2 bundles, .* is 3"),
        ({"engine_kwargs": {"nnodes": 2, "tp": 2, "cache": {"host_memory": "1GB"}}}, "cache.host_memory does not work"),
        ({"engine_kwargs": {"tp": "auto"}}, "auto of mesh.tensor and mesh.expert does not work under Ray"),
        ({"engine_kwargs": {"node_rank": 1}}, "mesh.host_rank is not jaxserve's under Ray Serve"),
        ({"engine_kwargs": {"master_addr": "a"}}, "mesh.leader_address is not jaxserve's under Ray Serve"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}], "strategy": "X"}}, "strategy must be one of"),
        ({"log_engine_metrics": "yes"}, "must be true or false"),
    ],
)
def test_what_does_not_fit_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(model)


def test_one_model_for_each_application() -> None:
    for args in ({}, {"llm_configs": []}, {"llm_configs": [CPU, CPU]}):
        with pytest.raises(ConfigError, match="a list of one model"):
            RaySettings.parse(args, {})
    with pytest.raises(ConfigError, match="ingress_cls_config is not served"):
        parsed(CPU, ingress_cls_config={})


def test_the_ingress_has_the_variables_of_the_engines() -> None:
    """Its key is theirs."""
    variables = {"JAXSERVE_SERVER__API_KEY": "k"}
    assert parsed({**CPU, "runtime_env": {"env_vars": variables}}).variables == variables
    assert parsed({**CPU, "runtime_env": {"pip": ["x"]}}).variables == parsed(CPU).variables == {}
