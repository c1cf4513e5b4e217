import asyncio
from pathlib import Path

import pytest

from jaxserve.errors import InvalidValueError, NotFoundError, StorageError
from jaxserve.store import Store
from tests.store.helpers import DAY, FakeClock, content, create, new_batch, upload


def bytes_on_disk(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "store" / "files").iterdir()}


def test_a_file_is_what_was_sent(store: Store, clock: FakeClock) -> None:
    async def main() -> None:
        incoming = store.begin_upload()
        for _ in range(40):
            await incoming.write(b"x" * 100_000)
        file = await incoming.finish(filename="a.jsonl", purpose="user_data", expires_seconds=3600)
        assert (file.bytes, file.created_at, file.expires_at) == (4_000_000, clock.now, clock.now + 3600)
        assert await store.get_file(file.id) == file
        assert await content(store, file.id) == b"x" * 4_000_000

    asyncio.run(main())


def test_nothing_is_listed_before_the_end_of_an_upload(store: Store, tmp_path: Path) -> None:
    async def main() -> None:
        incoming = store.begin_upload()
        await incoming.write(b"x" * 2**21)
        assert (await store.list_files(limit=10)).items == []
        await incoming.discard()
        await incoming.discard()
        assert list((tmp_path / "store" / "tmp").iterdir()) == [] == list((tmp_path / "store" / "files").iterdir())

    asyncio.run(main())


def test_a_deleted_file_is_gone(store: Store, tmp_path: Path) -> None:
    async def main() -> None:
        file = await upload(store, b"abc")
        _, opened = await store.open_file(file.id)
        await store.delete_file(file.id)
        assert bytes_on_disk(tmp_path) == set()
        with opened:
            assert opened.read() == b"abc"  # a download that has begun ends well
        for action in (store.get_file, store.open_file, store.delete_file):
            with pytest.raises(NotFoundError):
                await action(file.id)

    asyncio.run(main())


@pytest.mark.parametrize("file_id", ["../store.db", "..", "", "file-x/../../lock", "\0", "%2e%2e"])
def test_an_id_is_never_a_path(store: Store, file_id: str) -> None:
    with pytest.raises(NotFoundError):
        asyncio.run(store.open_file(file_id))


def test_an_expired_file_is_hidden_at_once_and_swept_later(store: Store, clock: FakeClock, tmp_path: Path) -> None:
    async def main() -> None:
        file = await upload(store, expires=3600)
        kept = await upload(store)
        clock.now += 3599
        await store.get_file(file.id)
        clock.now += 1
        with pytest.raises(NotFoundError):
            await store.get_file(file.id)
        assert (await store.list_files(limit=10)).items == [kept]
        assert bytes_on_disk(tmp_path) == {file.id, kept.id}
        await store.sweep()
        assert bytes_on_disk(tmp_path) == {kept.id}

    asyncio.run(main())


def test_a_file_that_cannot_be_removed_holds_up_no_other(store: Store, clock: FakeClock, tmp_path: Path) -> None:
    async def main() -> None:
        files = [await upload(store, expires=3600) for _ in range(3)]
        stuck = tmp_path / "store" / "files" / files[0].id
        stuck.unlink()
        stuck.mkdir()  # which no unlink removes
        with pytest.raises(StorageError):
            await store.delete_file(files[0].id)
        await store.delete_file(files[1].id)
        clock.now += 3600
        with pytest.raises(StorageError):
            await store.sweep()
        assert bytes_on_disk(tmp_path) == {files[0].id}
        stuck.rmdir()
        stuck.touch()
        await store.sweep()
        assert bytes_on_disk(tmp_path) == set()

    asyncio.run(main())


@pytest.mark.parametrize("expires", [None, 3600])
def test_the_input_of_a_live_batch_stays_readable(
    store: Store, clock: FakeClock, tmp_path: Path, expires: int | None
) -> None:
    async def main() -> None:
        file = await upload(store, b"abc", expires=expires)
        _, batch = await create(store, file.id)
        assert batch is not None
        if expires is None:
            await store.delete_file(file.id)
        clock.now += 3600
        await store.sweep()
        with pytest.raises(NotFoundError):
            await store.get_file(file.id)
        assert store.input_path(batch).read_bytes() == b"abc"
        await store.fail_batch(batch.id, batch.status, [])
        await store.sweep()
        assert bytes_on_disk(tmp_path) == set()

    asyncio.run(main())


def test_pages(store: Store) -> None:
    async def main() -> None:
        ids = [(await upload(store, purpose="batch" if i % 2 else "user_data")).id for i in range(7)]
        page = await store.list_files(limit=3)
        assert ([file.id for file in page.items], page.has_more) == (ids[:3:-1], True)
        page = await store.list_files(limit=4, after=ids[4])
        assert ([file.id for file in page.items], page.has_more) == (ids[3::-1], False)
        page = await store.list_files(limit=2, after=ids[1], ascending=True, purpose="batch")
        assert ([file.id for file in page.items], page.has_more) == ([ids[3], ids[5]], False)
        with pytest.raises(InvalidValueError) as error:
            await store.list_files(limit=1, after="file-none")
        assert error.value.param == "after"

    asyncio.run(main())


def test_paging_goes_on_from_a_file_that_was_deleted(store: Store) -> None:
    async def main() -> None:
        ids = [(await upload(store)).id for _ in range(5)]
        await store.delete_file(ids[2])
        await upload(store)
        page = await store.list_files(limit=10, after=ids[2])
        assert [file.id for file in page.items] == [ids[1], ids[0]]

    asyncio.run(main())


def test_rows_of_deleted_files_are_forgotten_in_the_end(store: Store, clock: FakeClock) -> None:
    async def main() -> None:
        file = await upload(store)
        await store.delete_file(file.id)
        clock.now += 31 * DAY
        await store.sweep()
        with pytest.raises(InvalidValueError):
            await store.list_files(limit=1, after=file.id)

    asyncio.run(main())


def test_a_batch_takes_only_a_batch_file_that_is_there(store: Store) -> None:
    async def main() -> None:
        other = await upload(store, purpose="user_data")
        gone = await upload(store)
        await store.delete_file(gone.id)
        for file_id in (other.id, gone.id, "file-none"):
            with pytest.raises(InvalidValueError) as error:
                await create(store, file_id)
            assert error.value.param == "input_file_id"
        assert (await store.list_batches(limit=1)).items == []
        assert (await new_batch(store)).total == 0

    asyncio.run(main())
