"""Build the prompts of rerankers that answer with a word: the text around a query and a document.

The model's own template is used if it has the roles `query` and `document`, else the known template of the words.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from jaxserve.api.generate.rendering import render
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.task import ChatMessages
from jaxserve.errors import ContextLengthError, InvalidValueError
from jaxserve.text.pairs import has_pair_roles

_PLACE = "\ufdd2"  # a Unicode noncharacter: the place of the document in a rendered template
_CUTS = 4  # joining texts may add tokens at their ends, so a document is cut again

# words for not relevant and relevant -> (prompt with {instruction}, {query} and the place of the document, form of an
# instruction, default instruction). Of Qwen3-Reranker and mxbai-rerank-v2.
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
    """The text around a document, for one query. Special tokens in it are the template's own.

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
        text = self.head + state.engine.tokenizer.shield(document) + self.tail
        limit = None if self.cuts else self.limit
        return await state.encoder.encode(text, add_special_tokens=False, limit=limit, param=param)


async def cut_text(text: str, keep: int, state: ServerState) -> str:
    """Return the start of a text, see `PairEncoder.cut`."""
    return await state.encoder.run(lambda: state.pair_encoder.cut(text, keep), len(text))


async def pair_prompt(query: str, instruction: str | None, keep: int | None, state: ServerState) -> PairPrompt:
    """Return the text around each document. Raises InvalidValueError if the model's template does not show one.

    keep: as in PairTask; one token of the context is left for the answer
    """
    info, tokenizer = state.engine.info, state.engine.tokenizer
    room = info.max_model_len - 1
    limit = room if keep is None or keep < 0 else min(keep, room)
    template = state.chat_template
    if template is not None and has_pair_roles(template.source):
        text = await _rendered(query, instruction, state)
    else:
        await asyncio.sleep(0)  # a request may have 2,000 queries
        text = _known(tokenizer.shield(query), tokenizer.shield(instruction or ""), state)
    head, place, tail = text.partition(_PLACE)
    if not place or _PLACE in tail:
        message = "The chat template does not show a message of the role 'document' once."
        raise InvalidValueError(message, param="documents")
    return PairPrompt(head, tail, limit, cuts=keep is not None)


async def _rendered(query: str, instruction: str | None, state: ServerState) -> str:
    pair = [{"role": "query", "content": query.replace(_PLACE, "")}, {"role": "document", "content": _PLACE}]
    system = [{"role": "system", "content": instruction}] if instruction else []
    return await render(ChatMessages(make=lambda: [*system, *pair], size=len(query) + len(instruction or "")), state)


def _known(query: str, instruction: str, state: ServerState) -> str:
    words = ",".join(state.engine.tokenizer.id_to_token(each) or "" for each in state.engine.info.label_token_ids)
    if words not in _BUILT_IN:
        message = f"There is no prompt for {words}: set model.chat_template with the roles query and document."
        raise InvalidValueError(message, param="model")
    prompt, form, default = _BUILT_IN[words]
    instruction = instruction or default
    parts = {"{instruction}": form.format(instruction) if instruction else "", "{query}": query}
    return re.sub("|".join(map(re.escape, parts)), lambda match: parts[match[0]].replace(_PLACE, ""), prompt)
