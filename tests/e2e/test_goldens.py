"""A real trained checkpoint behind the real server: every greedy token and its log-probability as in the goldens."""

import json
from typing import Any

import httpx2
import pytest

from jaxserve import launch_server
from tests.conftest import ONE_ROW, SharedData
from tests.quick import quick_processes
from tests.waiting import LAST_RESORT

# as small as serves the goldens: these programs are compiled for this test alone
TINY: dict[str, Any] = ONE_ROW | {"max_model_len": 512}


# tests/models/test_llama.py holds the other form to the same goldens, without a server
@pytest.mark.parametrize("name", ["stories260K-hf", pytest.param("stories260K-as-qwen2-hf", marks=pytest.mark.slow)])
def test_greedy_tokens_and_logprobs(shared_data: SharedData, compile_cache: str, name: str) -> None:
    cases = json.loads((shared_data / "golden/generation/stories260K.greedy.json").read_text())["cases"]
    model = shared_data / f"models/{name}"
    with (
        quick_processes(),
        launch_server(str(model), dtype="float32", compile_cache=compile_cache, **TINY) as server,
    ):
        for case in cases:
            reply = httpx2.post(
                f"{server.url}/v1/completions",
                timeout=LAST_RESORT,
                json={
                    "model": name,
                    "prompt": case["prompt_ids"],
                    "max_tokens": len(case["completion_ids"]),
                    "temperature": 0,
                    "logprobs": 1,
                    "return_token_ids": True,
                },
            ).json()
            choice = reply["choices"][0]
            assert choice["token_ids"] == case["completion_ids"]
            logprobs = choice["logprobs"]["token_logprobs"]
            assert logprobs == pytest.approx([step["logprob"] for step in case["steps"]], abs=1e-4)
