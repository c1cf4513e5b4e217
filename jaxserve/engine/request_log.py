"""The life of each request in the engine process, as debug lines: received, started, first token, finished.

Why a request waits is logged by scheduler/admission.py, and its preemption by the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from jaxserve.types.sampling import EngineRequest
from jaxserve.types.step import TokenOutput

logger = logging.getLogger(__name__)


def log_received(requests: Iterable[EngineRequest], num_prompt_tokens: int) -> None:
    """Log that the requests have come in. num_prompt_tokens: of the prompt that they share."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for request in requests:
        logger.debug(
            "request %s (%s) received: %d prompt tokens, at most %s new ones, priority %d%s",
            *(request.request_id, request.client_id, num_prompt_tokens, request.params.max_tokens, request.priority),
            ", its grammar is compiled first" if request.params.grammar is not None else "",
        )


def log_iteration(started: Iterable[str], outputs: Iterable[TokenOutput]) -> None:
    """Log what one iteration of the engine loop did. started: ids of the requests that were given a slot."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for request_id in started:
        logger.debug("request %s starts", request_id)
    for output in outputs:
        if output.first_token_seconds:
            logger.debug("request %s has its first token after %.3f s", output.request_id, output.first_token_seconds)
        if output.finish_reason is not None:
            logger.debug(
                "request %s finished: %s, %d preemptions%s",
                *(output.request_id, output.finish_reason, output.num_preemptions),
                f", {output.error}" if output.error else "",
            )
