"""The tables of families in docs/models.md and README.md are what the code says."""

from collections import Counter

from docgen.models import ROOT, ROWS, pages
from jaxserve.models.families.registry import ARCHITECTURES, NESTED
from jaxserve.models.unserved import FAMILIES as UNSERVED
from tests.text.test_reasoning import SIGNS


def test_the_pages_are_up_to_date() -> None:
    for page, text in pages().items():
        assert page.read_text("utf-8") == text, "run: python -m docgen.models"


def test_each_architecture_has_a_row() -> None:
    names = Counter(name for row in ROWS if not row.like for name in row.names)
    assert set(names.values()) == {1}, "of one family each, and of those that are configurations of it"
    of_rows = {name for row in ROWS for name in row.names}
    found = {name + head for name in of_rows for head in ("ForCausalLM", "ForSequenceClassification", "Model")}
    assert not ARCHITECTURES.keys() - found
    assert all(any(each.startswith(name) for each in ARCHITECTURES) for name in of_rows)
    assert NESTED.keys() <= {f"{name}ForConditionalGeneration" for row in ROWS for name in row.larger}


def test_formats_are_those_of_the_published_templates() -> None:
    known = {(tool, reasoning or "-") for _, tool, reasoning in SIGNS.values()}
    known.add(("hermes", "-"))  # Qwen2.5: as Qwen3, without thinking
    assert {row.formats for row in ROWS if row.formats} <= known


def test_what_is_not_served_is_named() -> None:
    text = " ".join((ROOT / "docs/models.md").read_text("utf-8").split())
    assert [each.models for each in UNSERVED if each.models not in text] == []
