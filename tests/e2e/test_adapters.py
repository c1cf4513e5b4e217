"""Adapters of a whole server: loaded by a route, known in every worker."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from jaxserve import launch_server
from jaxserve.config import Config
from jaxserve.library.serving import RunningServer
from tests.conftest import ONE_ROW
from tests.models.lora import peft_config, random_pairs, write_adapter
from tests.waiting import LAST_RESORT, wait_until

ADMIN = {"authorization": "Bearer root"}
LAYERS = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.mlp.down_proj": (256, 640)}  # the demo model's


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapters" / "sql", random_pairs(LAYERS, 4, 1), peft_config(4))
    return tmp_path / "adapters"


def statuses(server: RunningServer, model: str, count: int = 12) -> list[int]:
    """Of requests with a connection each, which any worker may accept."""

    def ask() -> int:
        body = {"model": model, "prompt": "Once", "max_tokens": 1, "temperature": 0}
        return httpx2.post(
            f"{server.url}/v1/completions", json=body, headers={"connection": "close"}, timeout=LAST_RESORT
        ).status_code

    return sorted({ask() for _ in range(count)})


def call(server: RunningServer, route: str, **body: str) -> int:
    return httpx2.post(f"{server.url}{route}", json=body, headers=ADMIN, timeout=LAST_RESORT).status_code


def models(server: RunningServer) -> list[str]:
    return [each["id"] for each in httpx2.get(f"{server.url}/v1/models", timeout=LAST_RESORT).json()["data"]]


@pytest.mark.slow
def test_every_worker_knows_what_a_route_has_loaded(compile_cache: str, allowed: Path) -> None:
    keys = {"workers": 2, "admin_api_key": "root", "weights_directories": [str(allowed)], "slots": 2}
    with launch_server(compile_cache=compile_cache, **ONE_ROW, **keys) as server:
        assert statuses(server, "sql") == [404]
        assert call(server, "/v1/load_lora_adapter", lora_name="sql", lora_path="sql") == 200
        assert statuses(server, "sql") == [200] and models(server)[-1] == "sql"
        assert call(server, "/v1/unload_lora_adapter", lora_name="sql") == 200
        assert statuses(server, "sql") == [404] and "sql" not in models(server)


@pytest.mark.slow
def test_what_routes_have_loaded_is_loaded_again_after_a_restart(
    compile_cache: str, allowed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [random_pairs(LAYERS, 4, seed) for seed in range(3)]
    changed, gone = (write_adapter(allowed / name, pairs[2], peft_config(4)) for name in ("changed", "gone"))
    config = Config.parse(
        {
            "server": {"port": 0, "admin_api_key": "root", "weights_directories": [str(allowed)]},
            "scheduler": ONE_ROW,
            "lora": {"slots": 2, "keep": True},
            "store": {"path": str(tmp_path / "store")},
            "runtime": {"compile_cache": compile_cache},
        }
    )
    with launch_server(config=config) as server:
        for name in ("sql", "changed", "gone"):
            assert call(server, "/v1/load_lora_adapter", lora_name=name, lora_path=name) == 200
    write_adapter(changed, pairs[0], peft_config(4))
    gone.rename(allowed / "elsewhere")
    with launch_server(config=config) as server:
        assert statuses(server, "sql", 1) == [200]
        wait_until(lambda: models(server)[-1] == "sql", "only one of three is listed")
        assert statuses(server, "changed", 1) == statuses(server, "gone", 1) == [404]
        assert call(server, "/v1/unload_lora_adapter", lora_name="sql") == 200
    assert "'changed' is not loaded" in caplog.text and "has changed since it was loaded" in caplog.text
    assert "the adapter 'gone' is not loaded again" in caplog.text
    with launch_server(config=config) as server:
        assert "sql" not in models(server)
