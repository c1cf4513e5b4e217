"""Combine the constraint on a request's text, its tools and its reasoning into one grammar, and have it checked.

The check compiles it in a helper process (grammar/worker.py). The engine compiles the checked text again.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from jaxserve.api.generate.rendering import RenderedChat, thinking_is_off
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.constraints import Constraint, special_tokens
from jaxserve.api.tasks.task import ChatPrompt
from jaxserve.api.tasks.tools import ToolUse
from jaxserve.errors import InvalidSchemaError, InvalidValueError
from jaxserve.grammar.tools import CallModel, no_call_grammar, tool_grammar
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import GrammarSpec

_HARMONY_FINAL = "<|channel|>final<|message|>"
_FORMATS = ("json_schema", "json_object")  # formats of a text answer; other constraints apply to the whole output


def with_tools(answer: Constraint | None, use: ToolUse, state: ServerState) -> Constraint | None:
    """Return the constraint on the whole output; `answer` is the constraint on its text.

    none: the answer; without one, any text that does not begin a call of the tools that the prompt shows.
    required: only calls are allowed; a JSON format for text then has no effect.
    auto: the answer or calls. A JSON answer still allows calls; any other constraint applies to the whole output.
    Raises InvalidValueError (tool_choice) if a call is required beside a constraint of another kind.
    """
    if use.mode == "none":
        return _without_calls(state) if use.forbids_calls and answer is None else answer
    if use.mode == "required":
        if answer is not None and answer[0].kind not in _FORMATS:
            message = f"{answer[1]} cannot be kept where tool_choice requires a call."
            raise InvalidValueError(message, param="tool_choice")
        spec = _calls(use, state, required=True)
        assert spec is not None
        return spec, "tools"
    if answer is None:
        spec = _calls(use, state, required=False)
        return None if spec is None else (spec, "tools")
    return _either(answer, use, state)


def _without_calls(state: ServerState) -> Constraint | None:
    spec = no_call_grammar(_model(state))
    return None if spec is None else (spec, "tool_choice")


def _model(state: ServerState) -> CallModel:
    template = state.chat_template.tools_source if state.chat_template is not None else ""
    return CallModel(state.parsers.tool, template, special_tokens(state.engine.tokenizer))


def _calls(
    use: ToolUse, state: ServerState, *, required: bool, answer: dict[str, Any] | bool | None = None
) -> GrammarSpec | None:
    return tool_grammar(
        _model(state),
        use.tools,
        required=required,
        parallel=use.parallel or (answer is None and not required),  # in auto mode the output ends after its first call
        answer=answer,
        limited=use.allows_some,
    )


def _either(answer: Constraint, use: ToolUse, state: ServerState) -> Constraint:
    spec, param = answer
    if spec.kind not in _FORMATS:
        return answer
    schema = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.source)
    try:
        either = _calls(use, state, required=False, answer=schema)
    except InvalidSchemaError as error:
        raise InvalidSchemaError(error.message, param="tools" if error.param == "tools" else param) from None
    assert either is not None
    return either, param


async def checked(found: Constraint | None, state: ServerState) -> GrammarSpec | None:
    """Return the grammar once the grammar compiler accepts it. Raises InvalidSchemaError that names the field."""
    return None if found is None else await state.grammars.check(*found, state.engine)


async def chat_grammar(prompt: ChatPrompt, rendered: RenderedChat, state: ServerState) -> GrammarSpec | None:
    """Return the checked grammar of the whole output of a conversation."""
    is_beam_search = prompt.mode.beam_length_penalty is not None  # takes no grammar
    tools = ToolUse() if is_beam_search and prompt.tools.forbids_calls else prompt.tools
    try:
        found = with_tools(prompt.constraint, tools, state)
        spec = await checked(found, state)
    except InvalidSchemaError:
        if (outlined := tools.outlined) == tools:
            raise
        found = with_tools(prompt.constraint, outlined, state)
        spec = await checked(found, state)
    if spec is None:
        return None
    if state.parsers.harmony and found is not prompt.constraint:
        return spec  # applies from the first token: the grammar covers all channels, also those of the reasoning
    return after_reasoning(spec, prompt, rendered, state, off=await thinking_is_off(prompt, rendered, state))


def after_reasoning(
    spec: GrammarSpec, prompt: ChatPrompt, rendered: RenderedChat, state: ServerState, *, off: bool
) -> GrammarSpec:
    """Return `spec` for an output that may begin with reasoning: it then applies after the reasoning.

    off: the request turned reasoning off
    """
    tokenizer = state.engine.tokenizer
    if state.parsers.harmony:
        continues = prompt.continued != ""  # within the final channel, whose header is in the prompt
        return spec if continues else msgspec.structs.replace(spec, begin_after=_ids(tokenizer, _HARMONY_FINAL))
    tags = state.parsers.think_tags
    if tags is None:
        return spec
    end = _ids(tokenizer, tags.end)
    if tags.opened_by(rendered.text, prompt.continued):
        return msgspec.structs.replace(spec, begin_after=end)
    start = _ids(tokenizer, tags.start)
    if off or prompt.continued or len(start) != 1 or rendered.text.rstrip().endswith(tags.end):
        return spec
    return msgspec.structs.replace(spec, begin_after=end, begin_unless=start)


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
