"""Score pairs of texts: by a classification head, by the word that a reranker answers, or by cosine of embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Encoding

from jaxserve.api.generate.generation import Generation, PromptTask, embeddings, half_of_rows
from jaxserve.api.generate.prompts import TextCut, whole_text
from jaxserve.api.scoring.pair_prompts import cut_text, pair_prompt
from jaxserve.api.scoring.task import PairTask
from jaxserve.api.shared.keys import Caller
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.task import RequestOptions
from jaxserve.errors import ContextLengthError, InvalidValueError
from jaxserve.types.extras import ExtraParams
from jaxserve.types.messages import EngineInfo
from jaxserve.types.sampling import EMBED, SamplingParams

Scores = tuple[list[float], int]  # a score per document, the prompt tokens
LEAST_LOGPROB = -1e4  # in place of minus infinity


def check_scores_pairs(info: EngineInfo, name: str) -> None:
    """Raises InvalidValueError if the model cannot score a pair of texts."""
    if len(info.labels) == 1 or info.label_token_ids or info.task == "embed":
        return
    has = f"a head with {len(info.labels)} labels" if info.labels else "no head for it, and is no reranker"
    raise InvalidValueError(f"The model {name!r} does not support scores of pairs: it has {has}.", param="model")


@dataclass(frozen=True)
class PairScorer:
    """Scores the pairs of one HTTP request. The model can, see `check_scores_pairs`."""

    state: ServerState
    caller: Caller
    options: RequestOptions

    async def scores(self, task: PairTask) -> Scores:
        """Score each document. Raises ContextLengthError for a pair that is too long."""
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
        """Score by the model's number for each pair, or its sigmoid."""
        encoder, info = self.state.pair_encoder, self.state.engine.info
        limit = info.max_model_len if task.keep is None or task.keep < 0 else min(task.keep, info.max_model_len)
        queries = [await self._encoding(each, task.params[0]) for each in task.queries]
        prompts = []
        for number, text in enumerate(task.documents):
            query, document = queries[task.query_of(number)], await self._encoding(text, task.params[1])
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
        """Score by the probability of the word for relevant against the other, or by the difference of their logits."""
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
        """Return the sigmoid of each number, or the number if the request or the model's files want that."""
        activated = task.activation and not self.state.engine.info.raw_scores
        return [sigmoid(x) if activated else x for x in numbers]

    async def _by_cosine(self, task: PairTask) -> Scores:
        """Score by the cosine of the two embeddings, as /v1/embeddings gives them. Each text is embedded once."""
        before, (queries, documents) = self.state.engine.info.embedding_prompt, task.params
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
    """Return the cosine of each document with the only query or its own. found: float32 vectors, queries first"""
    vectors = np.frombuffer(b"".join(found), "<f4").reshape(len(found), -1).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return (vectors[:num_queries] * vectors[num_queries:]).sum(axis=1).tolist()


def watching(token_ids: Sequence[int]) -> SamplingParams:
    """Return parameters for one token, with the log-probabilities of `token_ids`."""
    extras = ExtraParams(logprob_token_ids=tuple(token_ids))
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0, extras=extras)


async def first_logprobs(generation: Generation) -> list[list[float]]:
    """Run prompts with `watching` and return the log-probabilities.

    Raises InvalidValueError if one was aborted, and ConflictError if the weights were replaced meanwhile.
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
