"""The ready card says what works: a chat, or embeddings of a model that generates no text."""

import json
import re
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from jaxserve.cli.progress import FIRST_PHASE, LAST_PHASE, StartProgress, ready_card
from jaxserve.client.supervisor import EngineStatus
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineInfo
from tests.api.fakes import DEMO, demo_info


@pytest.fixture(scope="module")
def info() -> EngineInfo:
    return demo_info(Tokenizer.from_directory(DEMO))


PHASES = {"imports": 3.14, "devices": 0.01, "weights": 0.1, "programs": 6.0}


def card_of(info: EngineInfo, *, api_key: bool = False) -> str:
    return ready_card(info, "http://127.0.0.1:8000", api_key=api_key, seconds=PHASES)


def data_of(card: str) -> Any:
    """What a shell gives to curl as the body."""
    script = "curl() { printf '%s\\0' \"$@\"; }\n" + card[card.index("curl ") :]
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")
    assert done.stderr == "" and words[0].startswith("http://127.0.0.1:8000/v1/")
    return json.loads(words[words.index("-d") + 1])


def test_a_model_that_generates(info: EngineInfo) -> None:
    card = card_of(info, api_key=True)
    assert card.splitlines()[0] == "URL         http://127.0.0.1:8000/v1"
    assert "4096 tokens" in card and "9.2 s: imports 3.1, weights 0.1, programs 6.0\n" in card
    assert "curl http://127.0.0.1:8000/v1/chat/completions \\\n" in card
    assert '"Authorization: Bearer $JAXSERVE_SERVER__API_KEY"' in card
    assert data_of(card)["messages"][0]["role"] == "user"
    assert max(map(len, card.splitlines())) <= 80


def test_the_phases_add_up(info: EngineInfo) -> None:
    """Though each is shown in tenths of a second, and those of less are not shown."""
    many = {f"p{i}": 0.04 for i in range(10)} | {"programs": 1.04}
    line = re.search(r"^start +(.*)$", ready_card(info, "", api_key=False, seconds=many), re.MULTILINE)
    assert line is not None and line[1] == "1.4 s: p1 0.1, p3 0.1, p6 0.1, p8 0.1, programs 1.0"


def test_a_slow_start_has_two_lines(info: EngineInfo) -> None:
    phases = {"imports": 109.2, "model files": 12.2, "weights": 1120.1, "programs": 1157.7}
    card = ready_card(info, "http://127.0.0.1:8000", api_key=False, seconds=phases)
    assert max(map(len, card.splitlines())) <= 80
    first, second = card[card.index("start ") :].splitlines()[:2]
    assert second.startswith(" " * 12) and " ".join([first, second.strip()]).endswith("programs 1157.7")


@pytest.mark.parametrize("name", ["it's", 'a "b"', "org/a-model-of-a-long-name-30B-A3B-Instruct-2507", "日本"])
def test_the_curl_line_can_be_copied(info: EngineInfo, name: str) -> None:
    card = card_of(msgspec.structs.replace(info, served_names=[name]))
    assert data_of(card)["model"] == name
    assert max(map(len, card[card.index("curl") :].splitlines())) <= 80


def test_a_model_with_windows(info: EngineInfo) -> None:
    plan = info.memory_plan | {"groups": [{"kind": "window", "tokens": 512, "num_pages": 70}]}
    assert "; 70 pages for windows of 512" in card_of(msgspec.structs.replace(info, memory_plan=plan))


def test_where_drafts_come_from(info: EngineInfo) -> None:
    assert "drafts" not in card_of(info)
    assert "\ndrafts      small, at most 4" in card_of(msgspec.structs.replace(info, drafter="small, at most 4"))


def test_several_devices(info: EngineInfo) -> None:
    many = msgspec.structs.replace(info, devices=[f"gpu:{i} NVIDIA H200" for i in range(8)])
    assert "8 x NVIDIA H200, attention" in card_of(many)


def test_an_encoder(info: EngineInfo) -> None:
    card = card_of(msgspec.structs.replace(info, is_embedding=True, num_pages=0))
    assert "curl http://127.0.0.1:8000/v1/embeddings" in card and "input" in data_of(card)
    assert "KV cache" not in card and "8 texts at once" in card and "Bearer" not in card


@pytest.mark.parametrize("terminal", [False, True])
def test_a_phase_has_its_own_time(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of what follows before the next phase reports."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with StartProgress(terminal=terminal, began=-0.5) as progress:
        for passed, status in (
            (3.0, EngineStatus("loading", "devices")),
            (0.1, EngineStatus("loading", "weights", unit="bytes")),
            (0.2, EngineStatus("loading", "weights", 2**29, 2**29, "bytes")),
            (0.0, EngineStatus("loading", "programs", unit="programs")),
            (5.0, EngineStatus("loading", "programs", 12, 12, "programs")),
            (1.0, EngineStatus("ready")),
        ):
            now[0] += passed
            progress.show(status)
    assert progress.seconds == pytest.approx({FIRST_PHASE: 3.5, "devices": 0.1, "weights": 0.2, "programs": 6.0})
    now[0] += 0.2
    progress.add(LAST_PHASE)
    assert progress.seconds[LAST_PHASE] == pytest.approx(0.2)
    assert sum(progress.seconds.values()) == pytest.approx(10.0)
    lines = [line.split() for line in capsys.readouterr().err.splitlines() if line.endswith(" s")]
    assert [line[0] for line in lines] == ["imports", "weights", "programs"]
    assert lines[1] == ["weights", "0.50", "GiB,", "2.68", "GB/s", "0.2", "s"] and lines[2][1:] == ["12/12", "6.0", "s"]


def test_when_a_process_began() -> None:
    script = "import time; from jaxserve.cli.progress import command_began as f; print(f(), time.monotonic())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    began, asked = map(float, done.stdout.split())
    assert before - 0.02 <= began <= asked <= time.monotonic()
