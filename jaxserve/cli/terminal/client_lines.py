"""The line that points each client at this server. docs/clients.md shows the same lines; a test compares the two."""

from __future__ import annotations

import re

from jaxserve.types.messages import EngineInfo

AGENT_CONTEXT = 32_768  # tokens; prompts of coding agents have 15,000 to 25,000
# Claude Code takes 200,000 tokens for granted and compacts shortly before. It can be told another window, of at least
# 100,000. In a smaller context it has to compact at a part of that: 80 % leave room for what comes in one turn.
CLAUDE_CODE_WINDOW = 100_000
COMPACTED_AT = 0.8
MAX_OUTPUT = 32_768  # tokens; OpenCode keeps them free for an answer
KEY_VARIABLE = "JAXSERVE_SERVER__API_KEY"

_CLAUDE_CODE = "ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={model} " + "".join(
    f"ANTHROPIC_DEFAULT_{kind}_MODEL={{model}} " for kind in ("HAIKU", "SONNET", "OPUS")
)
_CODEX = '{{name="jaxserve",base_url="{url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}'
_OPENCODE = (
    '{{"provider":{{"jaxserve":{{"npm":"@ai-sdk/openai-compatible",'
    '"options":{{"baseURL":"{url}/v1","apiKey":"{config_key}"}},'
    '"models":{{"{model}":{{"limit":{{"context":{context},"output":{output}}}}}}}}}}}}}'
)
LINES = {
    "Claude Code": f"{_CLAUDE_CODE}{{compact}} claude",
    "Codex": (
        "OPENAI_API_KEY={key} codex -m {model} -c model_context_window={context} -c model_provider=jaxserve "
        f"-c 'model_providers.jaxserve={_CODEX}'"
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


def client_line(client: str, url: str, model: str, key: str, context: int) -> str:
    """Return the line of a client.

    url: of the server, without /v1. key: any text if the server has none; $NAME is a variable of the environment.
    context: tokens of the model's context.
    """
    config_key = f"{{env:{key[1:]}}}" if key.startswith("$") else key  # no shell reads the variable in a quoted text
    compact = f"CLAUDE_CODE_AUTO_COMPACT_WINDOW={max(context, CLAUDE_CODE_WINDOW)}"
    if context < CLAUDE_CODE_WINDOW:
        compact += f" CLAUDE_AUTOCOMPACT_PCT_OVERRIDE={int(100 * COMPACTED_AT * context) // CLAUDE_CODE_WINDOW}"
    output = min(MAX_OUTPUT, context // 4)
    values = {"config_key": config_key, "context": context, "output": output, "compact": compact}
    return LINES[client].format(url=url, model=model, key=key, **values)


def agent_lines(info: EngineInfo, url: str, *, api_key: bool) -> list[str]:
    """Return the lines of the coding agents, if their prompts fit into the context and a name needs no quoting.

    With a key of the server, a line before them names the variable that must have it.
    """
    names = [name for name in info.served_names if _PLAIN.fullmatch(name)]
    if info.is_embedding or info.max_model_len < AGENT_CONTEXT or not names:
        return []
    name = min(names, key=lambda name: "/" in name)  # agents cannot select a name with a slash
    key = f"${KEY_VARIABLE}" if api_key else "none"
    lines = [f"{client:12}{client_line(client, url, name, key, info.max_model_len)}" for client in AGENTS]
    return [f"in a shell with {KEY_VARIABLE} set to the server's key:", *lines] if api_key else lines
