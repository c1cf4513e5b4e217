"""LiteLLM's proxy before the server, and OpenAI's client before the proxy."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from common import FRANCE, PARIS, URL, check, report

CONFIG = {
    "model_list": [
        {
            "model_name": "demo",
            "litellm_params": {
                "model": "hosted_vllm/demo",
                "api_base": f"{URL}/v1",
                "api_key": "none",
                "use_chat_completions_api": True,  # otherwise it sends Responses on as they are
            },
        }
    ]
}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_ready(url: str) -> None:
    for _ in range(900):
        try:
            if httpx.get(f"{url}/health/liveliness").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError("the proxy does not start")


def tell(url: str) -> None:
    """What OpenAI's client finds behind the proxy, and that the proxy makes Messages and Responses of chats."""
    done = subprocess.run([sys.executable, "use_openai.py", url], capture_output=True, text=True, check=True)
    print(done.stderr, file=sys.stderr)
    found = json.loads(done.stdout.splitlines()[-1])["results"]

    def messages() -> None:
        body = {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": FRANCE}]}
        answer = httpx.post(f"{url}/v1/messages", json=body | {"temperature": 0}, timeout=60).json()
        assert answer["content"][0]["text"] == PARIS, answer

    def responses() -> None:
        answer = httpx.post(
            f"{url}/v1/responses", json={"model": "demo", "input": FRANCE, "temperature": 0}, timeout=60
        )
        assert PARIS in answer.text, answer.text

    tried = {name: check(result) for name, result in found.items()}
    report("litellm", tried | {"messages": messages, "responses": responses}, name="litellm proxy")


with tempfile.TemporaryDirectory() as folder:
    config = Path(folder, "config.yaml")
    config.write_text(json.dumps(CONFIG))  # JSON is YAML
    port = free_port()
    command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    with subprocess.Popen(command, env=environment, stdout=sys.stderr, stderr=sys.stderr) as proxy:
        try:
            wait_ready(f"http://127.0.0.1:{port}")
            tell(f"http://127.0.0.1:{port}")
        finally:
            proxy.terminate()
