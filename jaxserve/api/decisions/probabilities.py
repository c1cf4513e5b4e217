"""Answer questions about one input by the probabilities of the options' letters. No text is generated.

All prompts begin with the input, which the prefix cache keeps, and end with a question.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.api.decisions.task import DecisionTask, Question
from jaxserve.api.generate.generation import Generation, PromptTask, half_of_rows
from jaxserve.api.generate.prompts import check_length
from jaxserve.api.generate.rendering import render
from jaxserve.api.scoring.pair_scores import first_logprobs, watching
from jaxserve.api.shared.keys import Caller
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.chat import thinking
from jaxserve.api.tasks.task import ChatMessages, RequestOptions
from jaxserve.errors import InvalidValueError
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.extras import MAX_LOGPROB_IDS

_PLACE = "\ufdd2"  # a Unicode noncharacter: the place of the question in the rendered conversation
_INPUT = "Read the input. A question about it follows.\n\n# Input\n{}\n\n" + _PLACE
_KINDS = {
    "predicate": "Is this statement about the input true?",
    "choice": "Choose one option for the input.",
    "score": "Rate the input. The options are levels in order.",
}
_QUESTION = "# Question\n{kind}\n{text}\n\n# Options\n{options}\n\nAnswer with the letters before one option only."


@dataclass(frozen=True)
class Decider:
    """Answers the questions of one HTTP request."""

    state: ServerState
    caller: Caller
    options: RequestOptions

    async def probabilities(self, task: DecisionTask) -> tuple[list[list[float]], Generation]:
        """Return the probabilities of each question's options, and the finished generation.

        Raises a RequestError for an input beyond the context, or more options than the vocabulary has letters for.
        """
        letters = option_letters(self.state.engine.tokenizer, max(len(each.options) for each in task.questions))
        head, tail = await self._around(task.text)
        encoder = self.state.encoder
        info = self.state.engine.info
        limit = info.max_model_len - 1  # a token is sampled
        prefix = await encoder.encode(head, add_special_tokens=False, limit=limit, param="input")
        check_length(prefix, limit, info, "input")
        prompts, owners = [], []
        for number, question in enumerate(task.questions):
            param = f"questions.{number}"
            text = self.state.engine.tokenizer.shield(_asked(question, list(letters))) + tail
            ids = [*prefix, *await encoder.encode(text, add_special_tokens=False, limit=limit, param=param)]
            check_length(ids, limit, info, param)
            watched = list(letters.values())[: len(question.options)]
            for first in range(0, len(watched), MAX_LOGPROB_IDS):
                prompts.append(PromptTask(ids, watching(watched[first : first + MAX_LOGPROB_IDS])))
                owners.append(number)
        generation = Generation(self.state, self.options, prompts, self.caller, at_once=half_of_rows(info))
        found: list[list[float]] = [[] for _ in task.questions]
        for number, values in zip(owners, await first_logprobs(generation), strict=True):
            found[number] += values
        return [_softmax(each) for each in found], generation

    async def _around(self, text: str) -> tuple[str, str]:
        """Return the rendered conversation before and behind a question."""
        content = _INPUT.replace("{}", text.replace(_PLACE, ""))
        messages = ChatMessages(
            make=lambda: [{"role": "user", "content": content}], size=len(content), variables=thinking(False)
        )
        head, place, tail = (await render(messages, self.state)).partition(_PLACE)
        if not place or _PLACE in tail:
            raise InvalidValueError("The chat template does not show a user's message once.", param="input")
        return head, tail


def option_letters(tokenizer: Tokenizer, count: int) -> dict[str, int]:
    """Return `count` short texts that are one token each, with their token ids.

    Raises InvalidValueError if the vocabulary has fewer.
    """
    single = string.ascii_uppercase + string.ascii_lowercase + string.digits
    pairs = map("".join, itertools.product(string.ascii_uppercase, repeat=2))
    found: dict[str, int] = {}
    for text in itertools.chain(single, pairs):
        if len(found) == count:
            break
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1 and ids[0] not in found.values():
            found[text] = ids[0]
    if len(found) < count:
        message = f"A question has {count} options; this model's vocabulary has letters for {len(found)}."
        raise InvalidValueError(message, param="questions")
    return found


def _asked(question: Question, letters: Sequence[str]) -> str:
    options = "\n".join(f"{letter}: {text}" for letter, text in zip(letters, question.options, strict=False))
    parts = {"kind": _KINDS[question.asked.type], "text": question.text, "options": options}
    return _QUESTION.format_map(parts)


def _softmax(logprobs: Sequence[float]) -> list[float]:
    highest = max(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
