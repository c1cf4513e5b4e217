"""The few steps that most tests of the store begin with."""

from __future__ import annotations

from jaxserve.store import BatchRecord, FileRecord, NewBatch, Store

DAY = 24 * 3600
ENDPOINT = "/v1/chat/completions"


class FakeClock:
    """Unix seconds that pass only when told."""

    def __init__(self, now: float = 1_700_000_000) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def upload(
    store: Store, data: bytes = b"{}\n", *, purpose: str = "batch", expires: int | None = None
) -> FileRecord:
    incoming = store.begin_upload()
    await incoming.write(data)
    return await incoming.finish(filename="in.jsonl", purpose=purpose, expires_seconds=expires)


async def create(
    store: Store, file_id: str, *, key: tuple[str, bytes] | None = None, expires: int | None = None
) -> tuple[bytes, BatchRecord | None]:
    new = NewBatch(ENDPOINT, file_id, "24h", DAY, {"a": "b"}, expires)
    return await store.create_batch(new, idempotency=key, reply=lambda record: record.id.encode())


async def new_batch(store: Store, data: bytes = b"{}\n", *, expires: int | None = None) -> BatchRecord:
    _, record = await create(store, (await upload(store, data)).id, expires=expires)
    assert record is not None
    return record


async def content(store: Store, file_id: str) -> bytes:
    _, file = await store.open_file(file_id)
    with file:
        return file.read()
