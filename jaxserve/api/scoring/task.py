"""Read a task from the bodies of /v1/rerank and /score: pairs of texts to score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from jaxserve.api.scoring.protocol import PairFields, RerankRequest, ScoreRequest, ScoringFields
from jaxserve.api.tasks.fields import new_id, prefix_namespace
from jaxserve.api.tasks.task import RequestOptions
from jaxserve.errors import InvalidValueError

_NAMES = (("queries", "text_1", "data_1"), ("documents", "text_2", "data_2"))


@dataclass(frozen=True, kw_only=True)
class PairTask:
    """Pairs of texts to score: one query for all documents, or one for each.

    keep: tokens that a prompt may have, its document is cut to fit; -1: as many as fit, None: no cut
    document_tokens: cut each document to this many
    activation: probabilities instead of the model's own numbers
    params: names of the fields of the queries and of the documents, for errors
    """

    queries: Sequence[str]
    documents: Sequence[str]
    keep: int | None = None
    document_tokens: int | None = None
    instruction: str | None = None
    activation: bool = True
    params: tuple[str, str] = ("query", "documents")

    def query_of(self, number: int) -> int:
        """Return the index of a document's query."""
        return number if len(self.queries) > 1 else 0


def rerank_task(body: RerankRequest) -> PairTask:
    """Read and check a body. Raises InvalidValueError that names the field."""
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    return _task(body, [body.query], documents, ("query", "documents"))


def score_task(body: ScoreRequest) -> PairTask:
    """Read and check a body. Raises InvalidValueError that names the field."""
    (first, queries), (second, documents) = (_given(body, names) for names in _NAMES)
    if not (queries and documents):
        param = second if queries else first
        raise InvalidValueError(f"{param}: At least one text element must be given", param=param)
    if len(queries) not in (1, len(documents)):
        raise InvalidValueError(f"{first}: Input lengths must be either 1:1, 1:N or N:N", param=first)
    return _task(body, queries, documents, (first, second))


def scoring_options(body: ScoringFields, prefix: str) -> RequestOptions:
    return RequestOptions(
        request_id=new_id(prefix, body.request_id or body.rid),
        priority=body.priority or 0,
        cache_salt=prefix_namespace(body.cache_salt, None),
    )


def check_keep(keep: int | None) -> None:
    """Raises InvalidValueError if no token of a prompt would be left."""
    if keep == 0:
        message = "truncate_prompt_tokens is 0: no token of the prompt would be left."
        raise InvalidValueError(message, param="truncate_prompt_tokens")


def _task(body: PairFields, queries: list[str], documents: list[str], params: tuple[str, str]) -> PairTask:
    check_keep(body.truncate_prompt_tokens)
    for texts, param in ((queries, params[0]), (documents, params[1])):
        if not all(texts):
            raise InvalidValueError(f"{param} has an empty text.", param=param)
    return PairTask(
        queries=queries,
        documents=documents,
        keep=body.truncate_prompt_tokens,
        document_tokens=body.max_tokens_per_doc,
        instruction=body.instruction,
        activation=body.use_activation is not False,
        params=params,
    )


def _given(body: ScoreRequest, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return (name of the field, its texts). Raises InvalidValueError unless at most one of the names is given."""
    found = [name for name in names if getattr(body, name) is not None]
    if len(found) > 1:
        message = f"{found[1]} is another name of {found[0]}; give one of them."
        raise InvalidValueError(message, param=found[1])
    value = cast("str | list[str] | None", getattr(body, found[0])) if found else None
    return (found or names)[0], [value] if isinstance(value, str) else value or []
