"""The ready card says what works: a chat, or embeddings of a model that generates no text."""

import msgspec
import pytest

from jaxserve.cli.progress import ready_card
from jaxserve.engine.messages import EngineInfo
from jaxserve.text.tokenizer import Tokenizer
from tests.api.fakes import DEMO, demo_info


@pytest.fixture(scope="module")
def info() -> EngineInfo:
    return demo_info(Tokenizer.from_directory(DEMO))


def test_a_model_that_generates(info: EngineInfo) -> None:
    card = ready_card(info, "http://h:1", api_key=True)
    assert "curl http://h:1/v1/chat/completions" in card and "Bearer $KEY" in card
    assert "4096 tokens in 256 pages of 16" in card


def test_a_model_with_windows(info: EngineInfo) -> None:
    plan = info.memory_plan | {"window": 512, "num_window_pages": 70}
    card = ready_card(msgspec.structs.replace(info, memory_plan=plan), "http://h:1", api_key=False)
    assert "pages of 16; 70 of the layers with a window of 512" in card


def test_an_encoder(info: EngineInfo) -> None:
    encoder = msgspec.structs.replace(info, is_embedding=True, num_pages=0)
    card = ready_card(encoder, "http://h:1", api_key=False)
    assert "curl http://h:1/v1/embeddings" in card and '"input"' in card
    assert "KV cache" not in card and "8 texts at once" in card and "Bearer" not in card
