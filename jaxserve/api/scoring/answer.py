"""Score pairs of texts, and answer questions by the probabilities of the options' letters. No text is generated.

Pairs are scored by a classification head, by the word that a reranker answers, or by the cosine of embeddings
(`PairScorer`). The model's own template is used if it has the roles `query` and `document`, else the known template of
the words. All prompts of a decision (`Decider`) begin with the input, which the prefix cache keeps, and end with a
question.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import string
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Encoding

from jaxserve.api.generate.generation import Generation, PromptTask, embeddings, half_of_rows
from jaxserve.api.generate.planner import TextCut, check_length, render, whole_text
from jaxserve.api.generate.task import ChatMessages, RequestOptions, thinking
from jaxserve.api.keys import Caller
from jaxserve.api.scoring.task import DecisionTask, PairTask, Question
from jaxserve.api.state import ServerState
from jaxserve.errors import ContextLengthError, InvalidValueError
from jaxserve.text.pairs import has_pair_roles
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.extras import MAX_LOGPROB_IDS, ExtraParams
from jaxserve.types.messages import EngineInfo
from jaxserve.types.sampling import EMBED, SamplingParams

_PLACE = "\ufdd2"  # a Unicode noncharacter that marks the place of the document in a rendered template
_CUTS = 4  # joining texts may add tokens at their ends, so a document is cut again

# The templates of Qwen3-Reranker and mxbai-rerank-v2: words for not relevant and relevant -> (prompt with
# {instruction}, {query} and the place of the document, form of an instruction, default instruction).
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: " + _PLACE + "<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_MXBAI = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{instruction}query: {query}\ndocument: " + _PLACE + "\n"
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment "
    "(0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
)
_BUILT_IN = {
    "no,yes": (_QWEN3, "{}", "Given a web search query, retrieve relevant passages that answer the query"),
    "0,1": (_MXBAI, "instruction: {}\n", ""),
}


@dataclass(frozen=True)
class PairPrompt:
    """The text around a document, for one query. Its special tokens are the template's own.

    limit: the most tokens of a prompt. cuts: whether a longer document is cut
    """

    head: str
    tail: str
    limit: int
    cuts: bool

    async def token_ids(self, document: str, state: ServerState, params: tuple[str, str]) -> list[int]:
        """Return the tokens of a prompt. Raises ContextLengthError that names the field of the document or query."""
        ids = await self._encode(document, state, params[1])
        for _ in range(_CUTS if self.cuts else 0):
            if len(ids) <= self.limit:
                break
            document = await cut_text(document, self.limit - len(ids), state)
            ids = await self._encode(document, state, params[1])
            if not document and len(ids) > self.limit:
                raise ContextLengthError.too_long(
                    len(ids), self.limit, context=state.engine.info.max_model_len, param=params[0]
                )
        if len(ids) > self.limit:
            raise ContextLengthError.too_long(
                len(ids), self.limit, context=state.engine.info.max_model_len, param=params[1]
            )
        return ids

    async def _encode(self, document: str, state: ServerState, param: str) -> list[int]:
        text = self.head + state.engine.tokenizer.escape(document) + self.tail
        limit = None if self.cuts else self.limit
        return await state.encoder.encode(text, add_special_tokens=False, limit=limit, param=param)


async def cut_text(text: str, keep: int, state: ServerState) -> str:
    """Return the first `keep` tokens of a text as text, see `PairEncoder.cut`."""
    return await state.encoder.run(lambda: state.pair_encoder.cut(text, keep), len(text))


async def pair_prompt(query: str, instruction: str | None, keep: int | None, state: ServerState) -> PairPrompt:
    """Return the text around each document. Raises InvalidValueError if the model's template does not show one.

    keep: as in PairTask; one token of the context is left for the answer
    """
    info = state.engine.info
    tokenizer = state.engine.tokenizer
    room = info.max_model_len - 1
    limit = room if keep is None or keep < 0 else min(keep, room)
    template = state.chat_template
    if template is not None and has_pair_roles(template.source):
        text = await _rendered(query, instruction, state)
    else:
        await asyncio.sleep(0)  # a request may have 2,000 queries
        text = _known(tokenizer.escape(query), tokenizer.escape(instruction or ""), state)
    head, place, tail = text.partition(_PLACE)
    if not place or _PLACE in tail:
        message = "The chat template does not show a message of the role 'document' once."
        raise InvalidValueError(message, param="documents")
    return PairPrompt(head, tail, limit, cuts=keep is not None)


async def _rendered(query: str, instruction: str | None, state: ServerState) -> str:
    pair = [{"role": "query", "content": query.replace(_PLACE, "")}, {"role": "document", "content": _PLACE}]
    system = [{"role": "system", "content": instruction}] if instruction else []
    messages = ChatMessages(make=lambda: [*system, *pair], size=len(query) + len(instruction or ""))
    return (await render(messages, state))[0]


def _known(query: str, instruction: str, state: ServerState) -> str:
    words = ",".join(state.engine.tokenizer.id_to_token(each) or "" for each in state.engine.info.label_token_ids)
    if words not in _BUILT_IN:
        message = f"There is no prompt for {words}: set model.chat_template with the roles query and document."
        raise InvalidValueError(message, param="model")
    prompt, form, default = _BUILT_IN[words]
    instruction = instruction or default
    parts = {"{instruction}": form.format(instruction) if instruction else "", "{query}": query}
    return re.sub("|".join(map(re.escape, parts)), lambda match: parts[match[0]].replace(_PLACE, ""), prompt)


Scores = tuple[list[float], int]  # a score for each document, and the number of prompt tokens
LEAST_LOGPROB = -1e4  # stands for minus infinity


def check_scores_pairs(info: EngineInfo, name: str) -> None:
    """Raise InvalidValueError if the model cannot score a pair of texts."""
    if len(info.labels) == 1 or info.label_token_ids or info.task == "embed":
        return
    has = f"a head with {len(info.labels)} labels" if info.labels else "no head for it, and is no reranker"
    raise InvalidValueError(f"The model {name!r} does not support scores of pairs: it has {has}.", param="model")


@dataclass(frozen=True)
class PairScorer:
    """Score the pairs of one HTTP request. `check_scores_pairs` has passed."""

    state: ServerState
    caller: Caller
    options: RequestOptions

    async def scores(self, task: PairTask) -> Scores:
        """Score each document. Raises ContextLengthError if a pair is too long."""
        info = self.state.engine.info
        if task.document_tokens is not None:
            documents = [await cut_text(each, task.document_tokens, self.state) for each in task.documents]
            task = replace(task, documents=documents)
        if info.labels:
            return await self._by_head(task)
        return await (self._by_words(task) if info.label_token_ids else self._by_cosine(task))

    def _generation(self, prompts: Sequence[PromptTask]) -> Generation:
        return Generation(
            self.state, self.options, list(prompts), self.caller, at_once=half_of_rows(self.state.engine.info)
        )

    async def _by_head(self, task: PairTask) -> Scores:
        """Score by the model's logit for each pair, or its sigmoid."""
        encoder = self.state.pair_encoder
        info = self.state.engine.info
        limit = info.max_model_len if task.keep is None or task.keep < 0 else min(task.keep, info.max_model_len)
        queries = [await self._encoding(each, task.params[0]) for each in task.queries]
        prompts = []
        for number, text in enumerate(task.documents):
            query = queries[task.query_of(number)]
            document = await self._encoding(text, task.params[1])
            room = limit - encoder.num_added - len(query)
            if room < (task.keep is not None):
                raise ContextLengthError.too_long(limit - room, limit, context=info.max_model_len, param=task.params[0])
            if len(document) > room and task.keep is None:
                raise ContextLengthError.too_long(
                    limit - room + len(document), limit, context=info.max_model_len, param=task.params[1]
                )
            token_ids, second = encoder.joined(query, document, room)
            prompts.append(PromptTask(token_ids, SamplingParams(embed=True, max_tokens=0, second_text=second)))
        generation = self._generation(prompts)
        numbers = [float(np.frombuffer(raw, "<f4")[0]) for raw in await embeddings(generation)]
        return self._activated(task, numbers), generation.usage.prompt_tokens

    async def _by_words(self, task: PairTask) -> Scores:
        """Score by the probability of the word for relevant of the two words, or by the difference of their logits."""
        about = [await pair_prompt(each, task.instruction, task.keep, self.state) for each in task.queries]
        ids = [
            await about[task.query_of(number)].token_ids(text, self.state, task.params)
            for number, text in enumerate(task.documents)
        ]
        params = watching(self.state.engine.info.label_token_ids)
        generation = self._generation([PromptTask(each, params) for each in ids])
        found = await first_logprobs(generation)
        numbers = [relevant - other for other, relevant in found]
        return self._activated(task, numbers), generation.usage.prompt_tokens

    def _activated(self, task: PairTask, numbers: list[float]) -> list[float]:
        """Return the sigmoid of each number, or the number itself if the request or the model's files say so."""
        activated = task.activation and not self.state.engine.info.raw_scores
        return [sigmoid(x) if activated else x for x in numbers]

    async def _by_cosine(self, task: PairTask) -> Scores:
        """Score by the cosine of the two embeddings that /v1/embeddings returns. Each text is embedded once."""
        before = self.state.engine.info.embedding_prompt
        queries, documents = task.params
        tokens = [await whole_text(before + each, TextCut(), self.state, queries) for each in task.queries]
        cut = TextCut(task.keep)
        tokens += [await whole_text(before + each, cut, self.state, documents) for each in task.documents]
        generation = self._generation([PromptTask(each, EMBED) for each in tokens])
        found = await embeddings(generation)
        scores = await self.state.encoder.run(lambda: _cosines(found, len(task.queries)), len(found) * len(found[0]))
        return scores, generation.usage.prompt_tokens

    async def _encoding(self, text: str, param: str) -> Encoding:
        self.state.encoder.check_whole(text, param)
        return await self.state.encoder.run(lambda: self.state.pair_encoder.text(text), len(text))


def _cosines(found: Sequence[bytes], num_queries: int) -> list[float]:
    """Return the cosine of each document and its query, or the only query. found: float32 vectors, queries first"""
    vectors = np.frombuffer(b"".join(found), "<f4").reshape(len(found), -1).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return (vectors[:num_queries] * vectors[num_queries:]).sum(axis=1).tolist()


def watching(token_ids: Sequence[int]) -> SamplingParams:
    """Return parameters for one token, with the log-probabilities of `token_ids`."""
    extras = ExtraParams(logprob_token_ids=tuple(token_ids))
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0, extras=extras)


async def first_logprobs(generation: Generation) -> list[list[float]]:
    """Run prompts with `watching` and return the log-probabilities.

    Raises InvalidValueError if a prompt was aborted, and ConflictError if the weights were replaced meanwhile.
    """
    found: dict[int, list[float]] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for number, output in outputs:
            if not output.logprobs:
                raise InvalidValueError("The request was aborted.", code="request_aborted")
            found[number] = [max(value, LEAST_LOGPROB) for value in output.logprobs[0].watched]
    generation.check_same_weights()
    return [found[number] for number in range(len(generation.prompts))]


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


_INPUT = "Read the input. A question about it follows.\n\n# Input\n{}\n\n" + _PLACE
_KINDS = {
    "predicate": "Is this statement about the input true?",
    "choice": "Choose one option for the input.",
    "score": "Rate the input. The options are levels in order.",
}
_QUESTION = "# Question\n{kind}\n{text}\n\n# Options\n{options}\n\nAnswer with the letters before one option only."


@dataclass(frozen=True)
class Decider:
    """Answer the questions of one HTTP request."""

    state: ServerState
    caller: Caller
    options: RequestOptions

    async def probabilities(self, task: DecisionTask) -> tuple[list[list[float]], Generation]:
        """Return the probabilities of each question's options, and the finished generation.

        Raises a RequestError if the input exceeds the context, or if the vocabulary has fewer letters than options.
        """
        letters = option_letters(self.state.engine.tokenizer, max(len(each.options) for each in task.questions))
        head, tail = await self._around(task.text)
        encoder = self.state.encoder
        info = self.state.engine.info
        limit = info.max_model_len - 1  # a token is sampled
        prefix = await encoder.encode(head, add_special_tokens=False, limit=limit, param="input")
        check_length(prefix, limit, info, "input")
        prompts = []
        owners = []
        for number, question in enumerate(task.questions):
            param = f"questions.{number}"
            text = self.state.engine.tokenizer.escape(_asked(question, list(letters))) + tail
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
        """Return the rendered conversation before and after a question."""
        content = _INPUT.replace("{}", text.replace(_PLACE, ""))
        messages = ChatMessages(
            make=lambda: [{"role": "user", "content": content}], size=len(content), variables=thinking(False)
        )
        head, place, tail = (await render(messages, self.state))[0].partition(_PLACE)
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
