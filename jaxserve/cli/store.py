"""`jaxserve store check|backup|restore|upgrade`: what an operator does with the directory of store.path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.config import DEFAULT_STORE
from jaxserve.errors import ConfigError, StorageError, UnexpectedEndError
from jaxserve.store import Store
from jaxserve.store.maintenance import StoreReport, backup, check, restore

USAGE = """usage: jaxserve store check|backup|restore|upgrade ...

  check [STORE]          read all of a store and change nothing; exit code 1 if it is damaged or lacks contents
  backup [STORE] TARGET  copy a store, also while a server uses it, to a new directory
  restore BACKUP STORE   copy a backup to a new directory of a store
  upgrade [STORE]        make the database one of this version, as the first start would; a copy stays beside it

STORE is the directory of store.path, by default ~/.local/share/jaxserve; with several models, of one model."""


def run(words: Sequence[str]) -> int:
    """Run the command `store`. Raises ConfigError."""
    if not words or any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    action, *given = words
    if flag := next((word for word in given if word.startswith("-")), None):
        raise ConfigError(f"store takes no {flag}", fix="leave it out")
    paths = [Path(word).expanduser() for word in given]
    default = Path(DEFAULT_STORE).expanduser()
    match action, paths:
        case "check", [] | [_]:
            return _told(*paths or [default])
        case "backup", [target]:
            return _copied(backup, default, target)
        case ("backup", [source, target]) | ("restore", [source, target]):
            return _copied(backup if action == "backup" else restore, source, target)
        case "upgrade", [] | [_]:
            return _upgraded(*paths or [default])
        case (("check" | "backup" | "restore" | "upgrade"), _):
            raise ConfigError(f"{len(paths)} directories are given to store {action}", fix="see jaxserve store --help")
        case _:
            raise ConfigError(f"no action {action!r}", fix="use check, backup, restore or upgrade")


def _told(directory: Path) -> int:
    report = check(directory)
    print(f"{directory}: {_described(report)}")
    if report.holder:
        print(f"in use by process {report.holder}")
    if report.damage is not None:
        print(f"damaged: {report.damage}")
    for file_id in report.missing:
        print(f"missing: the contents of {file_id}")
    if report.unknown:
        print(f"{len(report.unknown)} contents that no file names are removed at the next start")
    return 1 if report.damage is not None or report.missing else 0


def _copied(copy: Callable[[Path, Path], StoreReport], source: Path, target: Path) -> int:
    try:
        report = copy(source, target)
    except StorageError as error:
        raise UnexpectedEndError(f"{target}: {error.message}", fix="make room, remove it and try again") from error
    print(f"{source} is copied to {target}: {_described(report)}")
    if report.missing:
        print(f"{len(report.missing)} files were deleted meanwhile")
    return 0


def _upgraded(directory: Path) -> int:
    before = check(directory).version
    asyncio.run(Store(directory).close())
    after = check(directory).version
    print(f"{directory}: version {after}" if before == after else f"{directory}: version {before} is now {after}")
    return 0


def _described(report: StoreReport) -> str:
    rows = ", ".join(f"{count:,} {table}" for table, count in report.rows.items())
    return f"version {report.version}, {rows}, {report.size / 1e6:,.1f} MB"
