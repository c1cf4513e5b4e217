"""Leave out the oldest turns of a conversation that is too long for the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxserve.api.generate.planner import ChatPlan, Planner
from jaxserve.api.generate.rendering import rendered_chat
from jaxserve.api.tasks.task import ChatMessages, ChatPrompt
from jaxserve.errors import ContextLengthError, InvalidValueError

ROOM_PART = 4  # a conversation is shortened until at least a quarter of the context is left, if so much is asked for
# the second: a conversation of many megabytes passes the limits of a rendering before its tokens are counted
TOO_LONG = (ContextLengthError, InvalidValueError)


async def planned(
    planner: Planner, prompt: ChatPrompt, shortened: Callable[[int], ChatMessages], num_droppable: int
) -> ChatPlan:
    """Plan a conversation; if it is too long, without as few of its oldest turns as possible.

    shortened: returns the conversation without this number of turns
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
