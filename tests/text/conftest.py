"""Fixtures of the tests of texts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from jaxserve.text.renderer import Renderer
from jaxserve.text.tokenizer import Tokenizer
from tests.waiting import with_quick_collections


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    with with_quick_collections():
        yield


@pytest.fixture
def load_renderer() -> Iterator[Callable[..., Renderer]]:
    """`Renderer.load` of a tokenizer that has a template. Its worker ends with the test."""
    with ExitStack() as stack:

        def load(tokenizer: Tokenizer, override: str | None = None) -> Renderer:
            renderer = Renderer.load(tokenizer, override)
            assert renderer is not None
            stack.callback(renderer.stop)
            return renderer

        yield load
