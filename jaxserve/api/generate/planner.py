"""Turn the prompts of a task into engine work: tokens, final sampling parameters, compiled grammar, generation mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from jaxserve.api.generate.generation import Generation, PromptTask, Usage
from jaxserve.api.generate.grammars import chat_grammar, checked
from jaxserve.api.generate.modes import with_beam_search, with_repetition_rule, with_session
from jaxserve.api.generate.prompts import check_length, longest_prompt, text_tokens
from jaxserve.api.generate.rendering import RenderedChat, rendered_chat
from jaxserve.api.generate.turn import RawInputParser, Turn
from jaxserve.api.shared.keys import Caller
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.constraints import Constraint
from jaxserve.api.tasks.extras import check_sizes
from jaxserve.api.tasks.task import ChatPrompt, Continuation, RequestOptions, TextPrompt
from jaxserve.errors import InvalidValueError
from jaxserve.text.events import OutputParser
from jaxserve.text.tools.registry import HARMONY
from jaxserve.types.sampling import GrammarSpec, SamplingParams, ThinkingBudget, ThinkingForm


@dataclass(frozen=True)
class ChatPlan:
    """The engine work of a conversation.

    prompt_text: the rendered conversation. make_turn: returns the reader of one choice
    """

    generation: Generation
    prompt_text: str
    make_turn: Callable[[], Turn]

    @property
    def prompt(self) -> PromptTask:
        return self.generation.prompts[0]


@dataclass(frozen=True)
class Planner:
    """Plans one HTTP request. Its methods raise a RequestError for everything that can be wrong with it."""

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
        tokenizer, has_tools = self.state.engine.tokenizer, prompt.tools.mode != "none"
        form = self._thinking_form(prompt, rendered)
        is_answer = _is_answer(prompt, params.grammar) and not self.state.parsers.harmony
        has_stops = bool(params.stop or params.stop_regex)
        params = msgspec.structs.replace(
            params,
            visible_token_ids=self.state.parsers.visible_token_ids(tokenizer, tools=has_tools),
            thinking=self._thinking_budget(prompt, form, params),
            stops_after=form if has_stops and not is_answer else None,
        )
        task = self._with_mode(prompt, PromptTask(token_ids, params))
        generation = Generation(self.state, self.options, [task], self.caller)
        return ChatPlan(generation, rendered.text, self._turns(prompt, rendered, generation.usage, is_answer))

    def _context(self, prompt: Continuation, token_ids: list[int], param: str) -> list[int]:
        info, longest = self.state.engine.info, longest_prompt(prompt, self.state.engine.info)
        if prompt.mode.session is not None:
            token_ids = self.state.sessions.context(
                prompt.mode.session, token_ids, self.state.engine.tokenizer, self.caller.owner
            )
            check_length(token_ids, longest, info, "session_params")
        check_length(token_ids, longest, info, param)
        return token_ids

    def _params(self, prompt: Continuation, token_ids: list[int], grammar: GrammarSpec | None) -> SamplingParams:
        """Limit the output to the rest of the context. If no token is asked for, one is sampled and dropped, unless the
        prompt fills the context.
        """
        info, params = self.state.engine.info, prompt.sampling
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
        """Return how the output thinks; None for a model that does not."""
        parsers, offered = self.state.parsers, prompt.tools.tool_set
        if parsers.harmony:
            return None if prompt.continued else ThinkingForm(family=HARMONY)
        if parsers.think_tags is None:
            return None
        return ThinkingForm(
            family=parsers.reasoning or "",
            inside=parsers.think_tags.opened_by(rendered.text, prompt.continued),
            calls=parsers.tool or "",
            tools=() if offered is None else offered.names,
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
            end_token_ids=self._end_of_thinking(tags.end, params.grammar),
        )

    def _end_of_thinking(self, end: str, grammar: GrammarSpec | None) -> tuple[int, ...]:
        """Return the tokens that end the reasoning of a model that exceeds its budget.

        A grammar begins directly after the token ids of the closing tag, so nothing may follow them.
        """
        encode = self.state.engine.tokenizer.encode
        if grammar is None or not grammar.begin_after:
            return tuple(encode(f"\n{end}\n\n", add_special_tokens=False))
        ids = tuple(encode(f"\n{end}", add_special_tokens=False))
        return ids if ids[-len(grammar.begin_after) :] == grammar.begin_after else grammar.begin_after

    def _turns(self, prompt: ChatPrompt, rendered: RenderedChat, usage: Usage, is_answer: bool) -> Callable[[], Turn]:
        """is_answer: the output has no reasoning"""
        tools, offered = prompt.tools, prompt.tools.tool_set
        if offered is not None:
            offered = replace(offered, on_unoffered=self.state.metrics.unoffered_calls.inc)

        token_bytes = self.state.engine.tokenizer.token_bytes

        def make() -> Turn:
            """Make the reader of one choice."""
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
            return Turn(parser, usage, parallel=tools.parallel, token_bytes=token_bytes)

        return make


def _is_answer(prompt: ChatPrompt, grammar: GrammarSpec | None) -> bool:
    """Return whether a constraint of the answer holds from the first token, so that no text is reasoning."""
    return prompt.constraint is not None and grammar is not None and not grammar.begin_after
