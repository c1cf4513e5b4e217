"""Turn the prompts of a task into engine work: tokens, final sampling parameters, compiled grammar, generation mode.

Texts and token ids become prompts that fit the model: they are tokenized, checked, truncated, continued from a session,
or filled in the middle. The chat template renders a conversation. Its oldest turns are left out if it is too long and
may be shortened. The constraint on the text, the tools and the reasoning become one grammar, which a helper process
compiles first (grammar/worker.py). The engine compiles the checked text again. `Planner` puts the parts together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jaxserve.api.generate.choice_parser import ChoiceParser, RawInputParser
from jaxserve.api.generate.generation import Generation, PromptTask, Usage
from jaxserve.api.generate.modes import with_beam_search, with_repetition_rule, with_session
from jaxserve.api.generate.pictures import PicturePart, Placed, check_placeholders, counted, expanded, read, taken_out
from jaxserve.api.generate.task import (
    ChatMessages,
    ChatPrompt,
    Constraint,
    Continuation,
    RequestOptions,
    Side,
    TextPrompt,
    Truncation,
    check_sizes,
    special_tokens,
    thinking,
)
from jaxserve.api.generate.tools import ToolUse
from jaxserve.api.keys import Caller
from jaxserve.api.state import ServerState
from jaxserve.api.work_pool import TextEncoder
from jaxserve.errors import ContextLengthError, InvalidSchemaError, InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.tools import CallModel, no_call_grammar, tool_grammar
from jaxserve.grammar.translate import schema_spec
from jaxserve.text.events import OutputParser
from jaxserve.text.template_worker import TemplateInput
from jaxserve.text.tokenizer import ESCAPE_MARK, Tokenizer
from jaxserve.text.tools.registry import TOOL_FORMATS
from jaxserve.types.messages import EngineInfo
from jaxserve.types.sampling import GrammarSpec, SamplingParams, ThinkingBudget, ThinkingForm

# the tokens before the prefix, the suffix and the middle, by model family
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


async def infill_prompt(
    encoder: TextEncoder, tokenizer: Tokenizer, prefix: str | list[int], suffix: str, limit: int | None
) -> list[int]:
    """Return the token ids of a prompt whose output fills the gap between `prefix` and `suffix`.

    limit: the greatest useful number of tokens
    Raises UnsupportedParameterError if the tokenizer has no infill tokens, ContextLengthError for a text over `limit`.
    """
    for family in _FAMILIES:
        marks = [tokenizer.token_to_id(token) for token in family]
        if None not in marks:
            before, between, after = (mark for mark in marks if mark is not None)
            head = prefix if isinstance(prefix, list) else await _plain(encoder, prefix, limit, "prompt")
            tail = await _plain(encoder, suffix, limit, "suffix")
            start = tokenizer.encode("", add_special_tokens=True)
            return [*start, before, *head, between, *tail, after]
    raise UnsupportedParameterError("suffix: this model has no fill-in-the-middle tokens.", param="suffix")


async def _plain(encoder: TextEncoder, text: str, limit: int | None, param: str) -> list[int]:
    return await encoder.encode(text, add_special_tokens=False, plain=True, limit=limit, param=param)


def check_ids(token_ids: list[int], info: EngineInfo, param: str) -> None:
    """Raise InvalidValueError if a token id is outside the vocabulary."""
    if token_ids and max(token_ids) >= info.vocab_size:
        worst = max(token_ids)
        raise InvalidValueError(f"{param}: {worst} is no token id; the vocabulary has {info.vocab_size}.", param=param)


def truncate(token_ids: list[int], how: Truncation, max_tokens: int | None, limit: int) -> list[int]:
    """Cut a prompt. `limit` is the context length. Raises InvalidValueError if no token would remain."""
    if how.keep is None:
        return token_ids
    if how.keep == 0:
        message = "truncate_prompt_tokens is 0: no token of the prompt would be left."
        raise InvalidValueError(message, param="truncate_prompt_tokens")
    count = how.keep if how.keep >= 0 else max(1, limit - (1 if max_tokens is None else max_tokens))
    if len(token_ids) <= count:
        return token_ids
    return token_ids[:count] if how.side == "right" else token_ids[len(token_ids) - count :]


def cut(token_ids: list[int], frame: list[int], keep: int, side: Side) -> list[int]:
    """Keep at most `keep` tokens, cutting at `side` of the text.

    frame: special tokens that the tokenizer adds around a text. They are kept if there is room
    """
    if len(token_ids) <= keep:
        return token_ids
    before = 0
    while before < len(frame) and token_ids[before] == frame[before]:
        before += 1
    after = len(frame) - before
    if keep < len(frame):
        return token_ids[:keep]
    text, room = token_ids[before : len(token_ids) - after], keep - len(frame)
    kept = text[:room] if side == "right" else text[len(text) - room :]
    return token_ids[:before] + kept + token_ids[len(token_ids) - after :]


@dataclass(frozen=True)
class TextCut:
    """How to tokenize a text that gets one result.

    keep: tokens that remain; -1: as many as fit; None: all, and a text that is too long is an error
    """

    keep: int | None = None
    side: Side = "right"
    special: bool = True


async def whole_text(prompt: str | list[int], how: TextCut, state: ServerState, param: str = "input") -> list[int]:
    """Tokenize a text that gets one result, or check its token ids. Raises a RequestError."""
    info = state.engine.info
    tokenizer = state.engine.tokenizer
    keep = how.keep
    if isinstance(prompt, list):
        check_ids(prompt, info, param)
        frame, token_ids = [], prompt
    else:
        frame = tokenizer.encode("") if how.special else []
        limit = info.max_model_len if keep is None else None
        token_ids = await state.encoder.encode(prompt, add_special_tokens=how.special, limit=limit, param=param)
    if keep is not None:
        token_ids = cut(token_ids, frame, min(keep, info.max_model_len) if keep >= 0 else info.max_model_len, how.side)
    if not token_ids:
        raise InvalidValueError(f"{param} has no tokens.", param=param)
    if len(token_ids) > info.max_model_len:
        raise ContextLengthError.too_long(len(token_ids), info.max_model_len, context=info.max_model_len, param=param)
    return token_ids


async def text_tokens(prompt: TextPrompt, state: ServerState) -> list[int]:
    """Tokenize a prompt. Raises a RequestError for token ids outside the vocabulary or a text beyond the context."""
    info = state.engine.info
    content = prompt.content
    if isinstance(content, list):
        check_ids(content, info, prompt.param)
    limit = longest_prompt(prompt, info) if prompt.truncation.keep is None else None
    if prompt.suffix:
        token_ids = await infill_prompt(state.encoder, state.engine.tokenizer, content, prompt.suffix, limit)
    elif isinstance(content, str):
        special = prompt.add_special_tokens
        token_ids = await state.encoder.encode(content, add_special_tokens=special, limit=limit, param=prompt.param)
    else:
        token_ids = content
    return truncate(token_ids, prompt.truncation, prompt.sampling.max_tokens, info.max_model_len)


def longest_prompt(prompt: Continuation, info: EngineInfo) -> int:
    """Return how many tokens a prompt may have: the context, less one generated token unless max_tokens is 0."""
    return info.max_model_len - (prompt.sampling.max_tokens != 0)


def check_length(token_ids: list[int], maximum: int, info: EngineInfo, param: str) -> None:
    """Raise InvalidValueError for an empty prompt, ContextLengthError for one with more than `maximum` tokens."""
    if not token_ids:
        raise InvalidValueError(f"{param} has no tokens.", param=param)
    if len(token_ids) > maximum:
        raise ContextLengthError.too_long(len(token_ids), maximum, context=info.max_model_len, param=param)


_TAIL_TOKENS = 64  # enough characters to see whether a prompt ends inside the reasoning


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as the model sees it.

    text: the rendered text; for a request with its own token ids, the text of the last ones
    pictures: the pictures at their places, not decoded yet
    """

    token_ids: list[int]
    text: str
    pictures: Sequence[Placed] = ()


async def render(
    messages: ChatMessages, state: ServerState, changed: Mapping[str, Any] | None = None
) -> tuple[str, list[PicturePart]]:
    """Return the prompt's text and its pictures. Raises InvalidValueError if the template refuses the messages.

    changed: template variables that replace variables of the messages
    """
    template = state.chat_template
    if template is None:
        message = (
            "This model has no chat template in Jinja (code that a model brings for its chat format is never run); "
            "use /v1/completions, or set model.chat_template on the server."
        )
        raise InvalidValueError(message, param="messages")
    generation, continues = messages.add_generation_prompt, messages.continue_final_message
    generation = not continues if generation is None else generation

    def work() -> tuple[str, list[PicturePart]]:
        tools = list(messages.tools) or None
        documents = list(messages.documents) if messages.documents is not None else None
        variables = {**messages.variables, **(changed or {})}
        made, pictures = taken_out(messages.make(), lambda: state.tools_show_pictures)
        conversation = TemplateInput(made, tools, documents, generation, continues, variables)
        return template.render(conversation, messages.size), pictures

    return await state.template_work.run(work, messages.size)


async def prompt_tokens(
    messages: ChatMessages, state: ServerState, *, special: bool, limit: int | None, param: str = "messages"
) -> RenderedChat:
    """Render and tokenize a conversation. A picture is a run of placeholders, and none is decoded.

    special: whether to add the tokenizer's special tokens. limit: as `TextEncoder.encode`
    """
    escaped, parts = await render(messages, state)
    placed = await counted(parts, state)
    if placed:
        check_placeholders(escaped, placed, state)
    ids = await state.encoder.encode(escaped, add_special_tokens=special, limit=limit, param=param)
    info = state.engine.info.pictures
    if placed and info is not None:
        ids, placed = expanded(ids, placed, info.token_id)
    return RenderedChat(ids, escaped.replace(ESCAPE_MARK, ""), placed)


async def rendered_chat(prompt: ChatPrompt, state: ServerState) -> RenderedChat:
    """Render and tokenize a conversation. Raises a RequestError, also for a prompt that leaves no room for output."""
    info, tokenizer = state.engine.info, state.engine.tokenizer
    longest = longest_prompt(prompt, info)
    if prompt.token_ids is not None:
        check_ids(prompt.token_ids, info, "input_ids")
        text = tokenizer.decode(prompt.token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        found = RenderedChat(prompt.token_ids, text)
    else:
        limit = longest if prompt.truncation.keep is None else None
        found = await prompt_tokens(prompt.messages, state, special=prompt.add_special_tokens, limit=limit)
    if found.pictures:
        _check_pictures(prompt)
    ids = truncate(found.token_ids, prompt.truncation, prompt.sampling.max_tokens, info.max_model_len)
    check_length(ids, longest, info, "messages" if prompt.token_ids is None else "input_ids")
    return replace(found, token_ids=ids)


def _check_pictures(prompt: ChatPrompt) -> None:
    """Raise UnsupportedParameterError for a parameter that does not work with pictures."""
    others = {
        "truncate_prompt_tokens": prompt.truncation.keep is not None,
        "use_beam_search": prompt.mode.beam_length_penalty is not None,
        "session_params": prompt.mode.session is not None,
    }
    for name, given in others.items():
        if given:
            raise UnsupportedParameterError(f"{name} does not go with images.", param=name)


async def thinking_is_off(prompt: ChatPrompt, rendered: RenderedChat, state: ServerState) -> bool:
    """Return whether reasoning is turned off, by the request or by the template's own default.

    The template's default is off if rendering with reasoning turned off gives the same prompt.
    """
    variables = prompt.messages.variables
    wish = variables.get("enable_thinking", variables.get("thinking"))
    if wish is not None or prompt.token_ids is not None:
        return wish is False
    without, _ = await render(prompt.messages, state, thinking(False))
    return rendered.text == without.replace(ESCAPE_MARK, "")


_FORMATS = ("json_schema", "json_object")  # they constrain a text answer; other constraints the whole output


def with_tools(answer: Constraint | None, use: ToolUse, state: ServerState) -> Constraint | None:
    """Return the constraint on the whole output; `answer` is the constraint on its text.

    The mode of `use` decides:
    none: the answer; without a constraint, any text that does not begin a call of the tools that the prompt shows.
    required: only calls are allowed; a JSON format for the text has no effect.
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


BLAME_SECONDS = 1.0  # of checks that look for the tool at fault; the last may take as long as a check may


async def checked(found: Constraint | None, state: ServerState) -> GrammarSpec | None:
    """Return the grammar once the grammar compiler accepts it. Raises InvalidSchemaError that names the field."""
    return None if found is None else await state.grammars.check(*found, state.engine)


async def chat_grammar(prompt: ChatPrompt, rendered: RenderedChat, state: ServerState) -> GrammarSpec | None:
    """Return the checked grammar of the whole output of a conversation."""
    is_beam_search = prompt.mode.beam_length_penalty is not None  # takes no grammar
    tools = ToolUse() if is_beam_search and prompt.tools.forbids_calls else prompt.tools
    try:
        found, spec = await _checked_with(prompt.constraint, tools, state)
    except InvalidSchemaError as error:
        if (outlined := tools.outlined) == tools:
            raise await _naming_the_tool(error, tools, state) from None
        try:
            found, spec = await _checked_with(prompt.constraint, outlined, state)
        except InvalidSchemaError as second:
            raise await _naming_the_tool(second, tools, state) from None
    if spec is None:
        return None
    if state.parsers.channels is not None and found is not prompt.constraint:
        return spec  # applies from the first token, because the grammar covers all channels, the reasoning's too
    return after_reasoning(spec, prompt, rendered, state, off=await thinking_is_off(prompt, rendered, state))


async def _checked_with(
    answer: Constraint | None, tools: ToolUse, state: ServerState
) -> tuple[Constraint | None, GrammarSpec | None]:
    found = with_tools(answer, tools, state)
    return found, await checked(found, state)


async def _naming_the_tool(error: InvalidSchemaError, tools: ToolUse, state: ServerState) -> InvalidSchemaError:
    """Return the error about the first tool whose schema alone cannot be enforced; `error` if there is none."""
    end = time.monotonic() + BLAME_SECONDS
    for tool in tools.tools:
        if not tool.is_exact or tool.lark is not None or time.monotonic() > end:
            continue
        try:
            await checked((schema_spec(tool.arguments_schema), "tools"), state)
        except InvalidSchemaError as own:
            return InvalidSchemaError(f"tool {tool.name!r}: {own.message}", param="tools")
    return error


def after_reasoning(
    spec: GrammarSpec, prompt: ChatPrompt, rendered: RenderedChat, state: ServerState, *, off: bool
) -> GrammarSpec:
    """Return `spec` for an output that may begin with reasoning. It then applies after the reasoning.

    off: whether the request turned reasoning off
    """
    tokenizer = state.engine.tokenizer
    if state.parsers.channels is not None:
        channels = TOOL_FORMATS[state.parsers.channels].calls.channels
        continues = prompt.continued != ""  # within the answer, whose header is in the prompt
        header = "" if channels is None else channels.answer
        return spec if continues else msgspec.structs.replace(spec, begin_after=_ids(tokenizer, header))
    tags = state.parsers.think_tags
    if tags is None:
        return spec
    end = _ids(tokenizer, tags.end)
    if tags.opened_by(rendered.text, prompt.continued):
        return msgspec.structs.replace(spec, begin_after=end)
    start = _ids(tokenizer, tags.start)
    opens = len(start) == 1 or start[0] in tokenizer.special_ids  # its first token begins nothing but the tag
    if off or prompt.continued or not opens or rendered.text.rstrip().endswith(tags.end):
        return spec
    return msgspec.structs.replace(spec, begin_after=end, begin_unless=start[:1])


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class ChatPlan:
    """The engine work of a conversation.

    prompt_text: the rendered conversation. make_parser: returns the parser of one choice
    """

    generation: Generation
    prompt_text: str
    make_parser: Callable[[], ChoiceParser]

    @property
    def prompt(self) -> PromptTask:
        return self.generation.prompts[0]


@dataclass(frozen=True)
class Planner:
    """Plan one HTTP request. Its methods raise a RequestError for everything that can be wrong with the request."""

    state: ServerState
    caller: Caller
    options: RequestOptions

    async def texts(self, prompts: Sequence[TextPrompt]) -> Generation:
        """Plan texts to continue. Prompts with the same constraint share its grammar."""
        grammars: dict[Constraint | None, GrammarSpec | None] = {}
        tasks = []
        for prompt in prompts:
            if prompt.constraint not in grammars:
                grammars[prompt.constraint] = await checked(prompt.constraint, self.state)
            token_ids = self._context(prompt, await text_tokens(prompt, self.state), prompt.param)
            params = self._params(prompt, token_ids, grammars[prompt.constraint])
            tasks.append(self._with_mode(prompt, PromptTask(token_ids, params, request_id=prompt.request_id)))
        return Generation(self.state, self.options, tasks, self.caller)

    async def chat(self, prompt: ChatPrompt) -> ChatPlan:
        """Plan a conversation to answer."""
        rendered = await rendered_chat(prompt, self.state)
        token_ids = self._context(prompt, rendered.token_ids, "messages")
        params = self._params(prompt, token_ids, await chat_grammar(prompt, rendered, self.state))
        tokenizer = self.state.engine.tokenizer
        has_tools = prompt.tools.mode != "none"
        form = self._thinking_form(prompt, rendered)
        is_answer = _is_answer(prompt, params.grammar) and self.state.parsers.channels is None
        has_stops = bool(params.stop or params.stop_regex)
        params = msgspec.structs.replace(
            params,
            visible_token_ids=self.state.parsers.visible_token_ids(tokenizer, tools=has_tools),
            thinking=self._thinking_budget(prompt, form, params),
            stops_after=form if has_stops and not is_answer else None,
        )
        namespace = json.dumps([self.caller.owner, self.options.cache_salt])
        pictures, held = await read(rendered.pictures, self.state, namespace)
        task = self._with_mode(prompt, PromptTask(token_ids, params, pictures=pictures, held=held))
        generation = Generation(self.state, self.options, [task], self.caller)
        return ChatPlan(generation, rendered.text, self._parser_maker(prompt, rendered, generation.usage, is_answer))

    def _context(self, prompt: Continuation, token_ids: list[int], param: str) -> list[int]:
        info = self.state.engine.info
        longest = longest_prompt(prompt, info)
        if prompt.mode.session is not None:
            token_ids = self.state.sessions.context(
                prompt.mode.session, token_ids, self.state.engine.tokenizer, self.caller.owner
            )
            check_length(token_ids, longest, info, "session_params")
        check_length(token_ids, longest, info, param)
        return token_ids

    def _params(self, prompt: Continuation, token_ids: list[int], grammar: GrammarSpec | None) -> SamplingParams:
        """Limit the output to the rest of the context.

        If max_tokens is 0, one token is sampled and dropped, unless the prompt fills the context.
        """
        info = self.state.engine.info
        params = prompt.sampling
        room = info.max_model_len - len(token_ids)
        limit = room if params.max_tokens is None else min(max(1, params.max_tokens), room)
        min_tokens = min(params.min_tokens, limit)
        params = msgspec.structs.replace(params, max_tokens=limit, min_tokens=min_tokens, grammar=grammar)
        check_sizes(params, prompt.experts_from, len(token_ids), info)
        return params

    def _with_mode(self, prompt: Continuation, task: PromptTask) -> PromptTask:
        task = with_repetition_rule(with_beam_search(task, prompt.mode, self.state), prompt.mode.repetition)
        return with_session(task, prompt.mode, self.options.request_id, self.state, self.caller)

    def _thinking_form(self, prompt: ChatPrompt, rendered: RenderedChat) -> ThinkingForm | None:
        """Return the form of the model's reasoning; None for a model without reasoning."""
        parsers, offered = self.state.parsers, prompt.tools.tool_set
        if parsers.channels is not None:
            return None if prompt.continued else ThinkingForm(family=parsers.channels)
        if parsers.think_tags is None:
            return None
        return ThinkingForm(
            family=parsers.reasoning or "",
            inside=parsers.think_tags.opened_by(rendered.text, prompt.continued),
            calls=parsers.tool or "",
            tools=() if offered is None else offered.names,
            only_first=prompt.constraint is not None,
        )

    def _thinking_budget(
        self, prompt: ChatPrompt, form: ThinkingForm | None, params: SamplingParams
    ) -> ThinkingBudget | None:
        tags = self.state.parsers.think_tags
        if prompt.thinking_budget is None:
            return None
        if tags is None or form is None:
            message = "thinking_token_budget: this model does not think between tags."
            raise InvalidValueError(message, param="thinking_token_budget")
        if params.extras.routed_experts:
            message = "thinking_token_budget does not go with return_routed_experts."
            raise InvalidValueError(message, param="return_routed_experts")
        return ThinkingBudget(
            tokens=prompt.thinking_budget,
            family=form.family,
            inside=form.inside,
            calls=form.calls,
            tools=form.tools,
            only_first=form.only_first,
            end_token_ids=self._end_of_thinking(tags.end, params.grammar),
        )

    def _end_of_thinking(self, end: str, grammar: GrammarSpec | None) -> tuple[int, ...]:
        """Return the tokens that end the reasoning once it exceeds its budget.

        A grammar begins directly after the token ids of the closing tag, so no token may follow them.
        """
        encode = self.state.engine.tokenizer.encode
        if grammar is None or not grammar.begin_after:
            return tuple(encode(f"\n{end}\n\n", add_special_tokens=False))
        ids = tuple(encode(f"\n{end}", add_special_tokens=False))
        return ids if ids[-len(grammar.begin_after) :] == grammar.begin_after else grammar.begin_after

    def _parser_maker(
        self, prompt: ChatPrompt, rendered: RenderedChat, usage: Usage, is_answer: bool
    ) -> Callable[[], ChoiceParser]:
        """Return a function that makes the parser of one choice. is_answer: the output has no reasoning"""
        tools, offered = prompt.tools, prompt.tools.tool_set
        if offered is not None:
            offered = replace(offered, on_unoffered=self.state.metrics.unoffered_calls.inc)

        token_bytes = self.state.engine.tokenizer.token_bytes

        def make() -> ChoiceParser:
            parser: OutputParser = self.state.parsers.make(
                tools=None if tools.raw_input is not None else offered,
                prompt=rendered.text,
                continued=prompt.continued,
                separate_reasoning=prompt.separate_reasoning,
                fallback_tool="json" if tools.mode == "required" else None,
                answer_is_literal=prompt.constraint is not None,
                thinks=not is_answer,
            )
            if tools.raw_input is not None:
                parser = RawInputParser(tools.raw_input, parser)
            return ChoiceParser(parser, usage, parallel=tools.parallel, token_bytes=token_bytes)

        return make


def _is_answer(prompt: ChatPrompt, grammar: GrammarSpec | None) -> bool:
    """Return whether a constraint of the answer holds from the first token, so that no text is reasoning."""
    return prompt.constraint is not None and grammar is not None and not grammar.begin_after


ROOM_PART = 4  # a conversation is shortened until 1 / ROOM_PART of the context is left, or less if max_tokens is less
# InvalidValueError: a conversation of many megabytes passes the limits of a rendering before its tokens are counted
TOO_LONG = (ContextLengthError, InvalidValueError)


async def planned(
    planner: Planner, prompt: ChatPrompt, shortened: Callable[[int], ChatMessages], num_droppable: int
) -> ChatPlan:
    """Plan a conversation. If it is too long, leave out as few of its oldest turns as possible.

    shortened: returns the conversation without its oldest turns, given their number
    num_droppable: the most turns to leave out. The number of renderings grows with its logarithm.
    """
    try:
        return await planner.chat(prompt)
    except TOO_LONG:
        if not num_droppable:
            raise
    low, high = 1, num_droppable
    while low < high:
        middle = (low + high) // 2
        if await _fits(planner, replace(prompt, messages=shortened(middle))):
            high = middle
        else:
            low = middle + 1
    return await planner.chat(replace(prompt, messages=shortened(low)))


async def _fits(planner: Planner, prompt: ChatPrompt) -> bool:
    limit = planner.state.engine.info.max_model_len
    room = min(prompt.sampling.max_tokens or limit, limit // ROOM_PART)
    try:
        rendered = await rendered_chat(prompt, planner.state)
    except TOO_LONG:
        return False
    return len(rendered.token_ids) + room <= limit
