"""The seed from which requests that bring none are given theirs."""

from __future__ import annotations

import logging
import secrets

logger = logging.getLogger(__name__)


def request_seed(configured: int | None) -> int:
    """`runtime.random_seed`, or if it is not set a seed drawn from the operating system, which the log names.

    With a fixed one, each start of a server would give its requests the same sequence of seeds. A configuration with
    the drawn one repeats a run.
    """
    if configured is not None:
        return configured
    seed = secrets.randbits(63)
    logger.info("seed drawn: %d", seed)  # short: with what stands before it, it is to fit 80 columns
    return seed
