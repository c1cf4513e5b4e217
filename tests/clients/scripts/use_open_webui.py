"""Open WebUI before the server, by both of its connections: OpenAI's routes and Ollama's."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from common import FRANCE, PARIS, URL, report

MESSAGES = [{"role": "user", "content": FRANCE}]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_ready(url: str) -> None:
    for _ in range(900):
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError("Open WebUI does not start")


def signed_in(url: str) -> httpx.Client:
    """Return a client with the token of the one user that there is without accounts."""
    answer = httpx.post(f"{url}/api/v1/auths/signin", json={"email": "", "password": ""}, timeout=60)
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {answer.json()['token']}"}, timeout=60)


def ask(http: httpx.Client, path: str, model: str, *, stream: bool) -> str:
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "stream": stream}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.text


def try_all(url: str) -> None:
    with signed_in(url) as http:
        found = [model for model in http.get("/api/models").json()["data"] if model["id"].partition(":")[0] == "demo"]

        def text() -> None:
            assert found, "the model is not listed"
            for model in found:
                assert PARIS in ask(http, "/api/chat/completions", model["id"], stream=False)
            (name,) = [model["name"] for model in http.get("/ollama/api/tags").json()["models"]]
            assert PARIS in ask(http, "/ollama/api/chat", name, stream=False)

        def stream() -> None:
            chunks = ask(http, "/api/chat/completions", found[0]["id"], stream=True)
            assert chunks.startswith("data: ") and "data: [DONE]" in chunks and "Paris" in chunks, chunks

        report("open-webui", {"text": text, "stream": stream})


with tempfile.TemporaryDirectory() as folder:
    port = free_port()
    command = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {
        "DATA_DIR": folder,
        "OPENAI_API_BASE_URL": f"{URL}/v1",
        "OPENAI_API_KEY": "none",
        "OLLAMA_BASE_URL": URL,
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "only for this run",
        "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai",  # otherwise it loads a model of its own
    }
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr, stderr=sys.stderr) as page:
        try:
            wait_ready(f"http://127.0.0.1:{port}")
            try_all(f"http://127.0.0.1:{port}")
        finally:
            page.terminate()
