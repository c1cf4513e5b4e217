"""Conversations in the shape of Claude Code's: a reminder from the system follows every result of a tool."""

from collections.abc import Callable
from typing import Any

SYSTEM = "You are an agent that reads and edits the files of a project. " * 4
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
# the template that refuses late system messages, as Qwen3.5's, and what the other one writes for them
REFUSES = "{{ raise_exception('System message must be at the beginning.') }}"
TAKES = "{{ '<|im_start|>system\n' + text + '<|im_end|>\n' }}"
TEMPLATE = """
{%- for message in messages %}
    {%- if message.content is string %}{% set text = message.content %}
    {%- else %}{% set text = message.content | map(attribute='text') | join('\\n') %}{% endif %}
    {%- if message.role in ('system', 'developer') and not loop.first %}LATE
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + text + '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + text }}
        {%- for call in message.tool_calls or () %}
            {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
    {%- if loop.first and tools %}{{ '<tools>' + tools | tojson + '</tools>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def template(late: str) -> str:
    return TEMPLATE.replace("LATE", late)


def _results(number: int) -> tuple[str, str, str]:
    """The path that the call of a turn reads, what it finds, and the reminder."""
    return f"file_{number}.py", f"def f_{number}(): return {number}", f"The list has {number} things to do."


def messages(num_turns: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = [{"role": "user", "content": "Mend the test."}]
    for number in range(num_turns):
        path, text, reminder = _results(number)
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "read", "input": {"path": path}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": text}
        found += [{"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]}]
        found += [{"role": "user", "content": [result]}, {"role": "system", "content": reminder}]
    header = f"x-anthropic-billing-header: cc_version={num_turns}"
    system = [{"type": "text", "text": header}, {"type": "text", "text": SYSTEM}]
    tools = [{"name": "read", "description": "Reads a file.", "input_schema": TOOL}]
    return {"model": "demo", "max_tokens": 1, "system": system, "messages": found, "tools": tools}


def chat(num_turns: int) -> dict[str, Any]:
    """As LiteLLM sends on what it gets from Claude Code."""
    header = f"x-anthropic-billing-header: cc_version={num_turns}"
    found: list[dict[str, Any]] = [{"role": "system", "content": f"{header}\n{SYSTEM}"}]
    found.append({"role": "user", "content": "Mend the test."})
    for number in range(num_turns):
        path, text, reminder = _results(number)
        function = {"name": "read", "arguments": f'{{"path": "{path}"}}'}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        parts = [{"type": "text", "text": reminder}]
        found.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})
        found.append({"role": "tool", "tool_call_id": f"call_{number}", "content": text})
        found.append({"role": "system" if number % 2 else "developer", "content": parts if number % 3 else reminder})
    function = {"name": "read", "description": "Reads a file.", "parameters": TOOL}
    tools = [{"type": "function", "function": function}]
    return {"model": "demo", "max_tokens": 1, "messages": found, "tools": tools}


def ollama(num_turns: int) -> dict[str, Any]:
    found = chat(num_turns)
    for number, message in enumerate(found["messages"]):
        message["role"] = message["role"].replace("developer", "system")
        if isinstance(message["content"], list):
            message["content"] = message["content"][0]["text"]
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = {"path": _results(number // 3)[0]}
    return {"model": "demo", "stream": False, "options": {"num_predict": 1}} | {
        name: found[name] for name in ("messages", "tools")
    }


def responses(num_turns: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = [{"role": "user", "content": "Mend the test."}]
    for number in range(num_turns):
        path, text, reminder = _results(number)
        call = {"type": "function_call", "call_id": f"call_{number}", "name": "read"}
        found.append(call | {"arguments": f'{{"path": "{path}"}}'})
        found.append({"type": "function_call_output", "call_id": f"call_{number}", "output": text})
        found.append({"role": "developer", "content": reminder})
    tool = {"type": "function", "name": "read", "description": "Reads a file.", "parameters": TOOL}
    body = {"model": "demo", "instructions": SYSTEM, "input": found, "tools": [tool], "max_output_tokens": 1}
    return body | {"store": False}


FORMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "/v1/messages": messages,
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/api/chat": ollama,
}
