"""The seed from which the seeds of requests without one are derived."""

from __future__ import annotations

import logging
import secrets

logger = logging.getLogger(__name__)


def request_seed(configured: int | None) -> int:
    """Return `runtime.random_seed`; if it is not set, draw a seed from the operating system and log it.

    A fixed seed gives the requests of every server start the same sequence of seeds. Set the logged seed to repeat a
    run.
    """
    if configured is not None:
        return configured
    seed = secrets.randbits(63)
    logger.info("seed drawn: %d", seed)  # short enough for 80 columns with the log prefix
    return seed
