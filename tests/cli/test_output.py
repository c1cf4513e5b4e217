"""Output that cannot be written: a full disk, a reader that left, descriptors that the shell closed."""

import json
import subprocess
import sys

import pytest

from tests.waiting import LAST_RESORT

JAXSERVE = f"{sys.executable} -m jaxserve"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=LAST_RESORT, check=False
    )


@pytest.mark.parametrize("words", ["--help", "config schema", "config show", "launch --help-all"])
def test_a_full_disk_is_one_line(words: str) -> None:
    done = shell(f"{JAXSERVE} {words} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "jaxserve: cannot write: No space left on device -> make room on the disk\n"


def test_a_reader_that_left_is_no_error() -> None:
    done = shell(f"{JAXSERVE} config schema | true")
    assert done.returncode in (0, 141) and done.stderr == ""


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    done = shell(f"{JAXSERVE} config schema {closed}")
    assert done.returncode == 0 and json.loads(done.stdout)["title"] == "Config"


def test_a_closed_output_is_no_error() -> None:
    done = shell(f"{JAXSERVE} config schema >&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
