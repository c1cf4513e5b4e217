"""The durable store: files, batches, responses and conversations. No jax, no HTTP."""

from jaxserve.store.records import (
    MAX_EXPIRY_SECONDS,
    MIN_EXPIRY_SECONDS,
    BatchError,
    BatchRecord,
    BatchStatus,
    BatchUsage,
    FileRecord,
    LineResult,
    NewBatch,
    Page,
)
from jaxserve.store.sqlite.disk import Disk
from jaxserve.store.store import Store, Upload
from jaxserve.store.validation import BatchLine, Validation, Validator, normalize_url

__all__ = [
    "MAX_EXPIRY_SECONDS",
    "MIN_EXPIRY_SECONDS",
    "BatchError",
    "BatchLine",
    "BatchRecord",
    "BatchStatus",
    "BatchUsage",
    "Disk",
    "FileRecord",
    "LineResult",
    "NewBatch",
    "Page",
    "Store",
    "Upload",
    "Validation",
    "Validator",
    "normalize_url",
]
