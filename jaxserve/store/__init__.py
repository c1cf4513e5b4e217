"""The durable store: files, batches, responses, conversations and threads. No jax, no HTTP."""

from jaxserve.store.directory import Disk
from jaxserve.store.records import (
    MAX_EXPIRY_SECONDS,
    MIN_EXPIRY_SECONDS,
    BatchError,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineResult,
    NewBatch,
    Page,
    TokenCounts,
)
from jaxserve.store.store import Store, Upload
from jaxserve.store.threads import ThreadLimits
from jaxserve.store.validation import BATCH_LINE, BatchLine, Validation, Validator, normalize_url

__all__ = [
    "BATCH_LINE",
    "MAX_EXPIRY_SECONDS",
    "MIN_EXPIRY_SECONDS",
    "BatchError",
    "BatchLine",
    "BatchRecord",
    "BatchStatus",
    "Disk",
    "FileRecord",
    "LineResult",
    "NewBatch",
    "Page",
    "Store",
    "ThreadLimits",
    "TokenCounts",
    "Upload",
    "Validation",
    "Validator",
    "normalize_url",
]
