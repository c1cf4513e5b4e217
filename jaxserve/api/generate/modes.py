"""Generation modes other than one plain engine request: beam search, repetition detection, sessions.

A mode makes the stream of outputs of one prompt in place of the engine.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import msgspec

from jaxserve.api.generate.beam_search import MAX_WIDTH, Beam, beam_search
from jaxserve.api.generate.generation import Generate, PromptTask, Stream
from jaxserve.api.generate.repetition import end_repetitions
from jaxserve.api.shared.keys import Caller
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.extras import check_no_extras
from jaxserve.api.tasks.sampling import logit_changes
from jaxserve.api.tasks.task import Mode, RepetitionRule
from jaxserve.errors import InvalidValueError
from jaxserve.text.detokenizer import RequestOutput, SequenceText
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.step import FinishReason, TokenOutput


def with_beam_search(prompt: PromptTask, mode: Mode, state: ServerState) -> PromptTask:
    """Return `prompt` as a beam search of width n. Raises InvalidValueError for fields that conflict with one."""
    penalty, params = mode.beam_length_penalty, prompt.params
    if penalty is None:
        return prompt
    if params.n > MAX_WIDTH:
        raise InvalidValueError(f"n is the width of the beam search, at most {MAX_WIDTH}.", param="n")
    others = {
        "stop": params.stop,
        "stop_regex": params.stop_regex,
        "grammar": params.grammar,
        "thinking_token_budget": params.thinking,
        "repetition_detection": mode.repetition,
        # beams are made of the model's own probabilities
        **logit_changes(params, state.engine.info),
    }
    for name, value in others.items():
        if value:
            raise InvalidValueError(f"use_beam_search does not go with {name}.", param="use_beam_search")
    check_no_extras(params, "use_beam_search")
    tokenizer, eos_token_ids = state.engine.tokenizer, frozenset(state.engine.info.eos_token_ids)

    async def run(generate: Generate) -> Stream:
        ids = prompt.prompt_token_ids
        found = await beam_search(generate, ids, params, eos_token_ids, width=params.n, length_penalty=penalty)
        for index, beam in enumerate(found):
            yield _beam_output(index, beam, prompt, tokenizer)

    return replace(prompt, run=run)


def _beam_output(index: int, beam: Beam, prompt: PromptTask, tokenizer: Tokenizer) -> RequestOutput:
    params, top = prompt.params, prompt.params.logprobs
    entries = [
        msgspec.structs.replace(entry, top_ids=entry.top_ids[:top], top_logprobs=entry.top_logprobs[:top])
        for entry in beam.logprobs
    ]
    output = TokenOutput(
        request_id="",
        token_ids=list(beam.token_ids),
        logprobs=None if top is None else entries,
        prompt_logprobs=beam.prompt_logprobs,
        num_cached_tokens=beam.num_cached_tokens,
        weight_versions=beam.weight_versions,
        finish_reason=beam.finish_reason or FinishReason.LENGTH,
        stop_token_id=beam.token_ids[-1] if beam.finish_reason is FinishReason.STOP else None,
    )
    return SequenceText("", index, prompt.prompt_token_ids, params, tokenizer).push(output)


def with_repetition_rule(prompt: PromptTask, rule: RepetitionRule | None) -> PromptTask:
    """Return `prompt` so that an output that repeats itself ends.

    It gets no drafts and no groups: an output of several tokens could not be cut where the repetition begins.
    """
    if rule is None:
        return prompt
    prompt = replace(prompt, params=msgspec.structs.replace(prompt.params, speculate=False, grouped=False))

    def run(generate: Generate) -> Stream:
        return end_repetitions(_stream(prompt, generate), rule, prompt.params.n, prompt.signal.abort_choice)

    return replace(prompt, run=run)


def with_session(prompt: PromptTask, mode: Mode, request_id: str, state: ServerState, caller: Caller) -> PromptTask:
    """Return `prompt` so that its tokens are kept in its session. Raises InvalidValueError for several choices."""
    session, sessions = mode.session, state.sessions
    if session is None:
        return prompt
    if prompt.params.n > 1:
        raise InvalidValueError("A request of a session has one choice.", param="n")

    async def run(generate: Generate) -> Stream:
        """Run the prompt as a turn of its session and append its output to the turn."""
        turn = sessions.begin(session, request_id, prompt.prompt_token_ids, prompt.signal, caller.owner)
        reason: FinishReason | None = None
        try:
            async with aclosing(_stream(prompt, generate)) as stream:
                async for output in stream:
                    sessions.extend(turn, output.token_ids if mode.keeps_output else [])
                    reason = output.finish_reason
                    yield output
        finally:
            sessions.end(turn, reason)

    return replace(prompt, run=run)


def _stream(prompt: PromptTask, generate: Generate) -> Stream:
    return generate(prompt.prompt_token_ids, prompt.params) if prompt.run is None else prompt.run(generate)
