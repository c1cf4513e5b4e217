"""docs/routes.md is what the models say."""

from pathlib import Path

from jaxserve.api.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "routes.md"


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == reference(), "run: python -m jaxserve.api.reference > docs/routes.md"
