"""Evicted pages in a file outlive a killed engine and a killed server, over real processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jaxserve import launch_server
from jaxserve.library.serving import RunningServer
from tests.conftest import FEW_PAGES
from tests.faults.helpers import engine_process, status
from tests.waiting import LAST_RESORT, wait_until

NUM_PAGES = FEW_PAGES["num_pages"]


def metric(server: RunningServer, name: str) -> float:
    lines = httpx2.get(f"{server.url}/metrics", timeout=LAST_RESORT).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def ask(server: RunningServer, prompts: list[list[int]]) -> list[Any]:
    """The tokens of each prompt, asked one after the other, so that each takes the pages of others."""
    found = []
    for prompt in prompts:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = httpx2.post(
            f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=LAST_RESORT
        )
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["token_ids"])
    return found


@pytest.mark.timeout(280)
def test_pages_outlive_a_killed_engine_and_the_server(compile_cache: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"compile_cache": compile_cache} | FEW_PAGES
    keys |= {"host_memory": "64MiB", "disk": str(tmp_path / "pages")}
    rng = random.Random(1)
    prompts = [[rng.randrange(300, 2000) for _ in range(200)] for _ in range(8)]
    with launch_server(served_name="demo", **keys) as server:
        expected = ask(server, prompts)
        wait_until(lambda: metric(server, "jaxserve:host_pages_stored") > NUM_PAGES, "pages were stored")
        engine_process().kill()
        wait_until(lambda: metric(server, "jaxserve:engine_restarts_total") == 1, "it was seen")
        wait_until(lambda: status(server) == 200, "the next engine is ready")
        assert ask(server, prompts) == expected
        wait_until(lambda: metric(server, "jaxserve:host_pages_loaded") > NUM_PAGES, "the new engine has loaded pages")
    with launch_server(served_name="demo", **keys) as server:
        assert ask(server, prompts) == expected
        wait_until(lambda: metric(server, "jaxserve:host_pages_loaded") > NUM_PAGES, "the new server has loaded pages")
