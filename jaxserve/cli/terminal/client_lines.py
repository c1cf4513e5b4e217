"""The line that points each client at this server. docs/clients.md shows the same lines; a test compares the two."""

from __future__ import annotations

import re

from jaxserve.types.messages import EngineInfo

AGENT_CONTEXT = 32_768  # tokens; prompts of coding agents have 15,000 to 25,000

_CODEX = '{{name="jaxserve",base_url="{url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}'
_OPENCODE = (
    '{{"provider":{{"jaxserve":{{"npm":"@ai-sdk/openai-compatible",'
    '"options":{{"baseURL":"{url}/v1","apiKey":"{key}"}},"models":{{"{model}":{{}}}}}}}}}}'
)
LINES = {
    "Claude Code": "ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={model} claude",
    "Codex": (
        f"OPENAI_API_KEY={{key}} codex -m {{model}} -c model_provider=jaxserve -c 'model_providers.jaxserve={_CODEX}'"
    ),
    "OpenCode": f"OPENCODE_CONFIG_CONTENT='{_OPENCODE}' opencode -m jaxserve/{{model}}",
    "aider": "aider --openai-api-base {url}/v1 --openai-api-key {key} --model openai/{model}",
    "Agents SDK": "OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} OPENAI_DEFAULT_MODEL={model} python agent.py",
    "LangChain": 'ChatOpenAI(base_url="{url}/v1", api_key="{key}", model="{model}")',
    "Open WebUI": "OPENAI_API_BASE_URL={url}/v1 OPENAI_API_KEY={key} open-webui serve",
    "LiteLLM": "LITELLM_MASTER_KEY=sk-{key} litellm --model hosted_vllm/{model} --api_base {url}/v1",
    "Continue": "{{name: {model}, provider: openai, model: {model}, apiBase: {url}/v1, apiKey: {key}}}",
    "Ollama's clients": "OLLAMA_HOST={url}",
}
_PLAIN = re.compile(r"[\w./:-]+", re.ASCII)
AGENTS = ("Claude Code", "Codex", "OpenCode", "aider")


def client_line(client: str, url: str, model: str, key: str) -> str:
    """Return the line of a client. url: of the server, without /v1. key: any text, if the server has none"""
    return LINES[client].format(url=url, model=model, key=key)


def agent_lines(info: EngineInfo, url: str, *, api_key: bool) -> list[str]:
    """Return the lines of the coding agents, if their prompts fit into the context and a name needs no quoting."""
    names = [name for name in info.served_names if _PLAIN.fullmatch(name)]
    if info.is_embedding or info.max_model_len < AGENT_CONTEXT or not names:
        return []
    name = min(names, key=lambda name: "/" in name)  # agents cannot select a name with a slash
    key = "$JAXSERVE_SERVER__API_KEY" if api_key else "none"
    return [f"{client:12}{client_line(client, url, name, key)}" for client in AGENTS]
