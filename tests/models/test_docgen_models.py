"""The tables of families in docs/models.md and README.md are what the code says."""

import re
from collections import Counter

from docgen.models import ROOT, ROWS, pages
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.families.registry import ARCHITECTURES, NESTED
from jaxserve.models.unserved import FAMILIES as UNSERVED
from tests.models.families import CASES, STATE_CASES
from tests.models.heads import FORMS
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


def lines(begin: str) -> list[str]:
    """The rows of the table of docs/models.md whose head begins so."""
    _, _, behind = (ROOT / "docs/models.md").read_text("utf-8").partition(f"\n{begin}")
    return behind.partition("\n\n")[0].splitlines()[2:]


def test_larger_architectures_are_those_that_are_read() -> None:
    found = {name: "with pictures" in row for row in lines("| architecture | language model |")
             for name in re.findall(r"\w+ForConditionalGeneration", row)}  # fmt: skip
    assert found == {nested.architectures[0]: nested.pictures is not None for nested in NESTED.values()}


def test_heads_for_multi_token_prediction_are_those_that_are_read() -> None:
    named = {name for row in lines("| architecture | head |") for name in re.findall(r"\w+ForCausalLM", row)}
    cases = [*(CASES | STATE_CASES).values(), CASES["qwen2"] | {"architectures": ["MiMoForCausalLM"]}]
    step = [name for name in ARCHITECTURES if re.fullmatch(r"Step3p.*ForCausalLM", name)]
    cases += [FORMS["step3p7"].hf | {"architectures": [name]} for name in step]  # its head is described by lists
    configs = [from_hf(hf | {"num_nextn_predict_layers": 1}) for hf in cases if "text_config" not in hf]
    assert named == {config.architecture for config in configs if config.predictor is not None}


def test_what_is_not_served_is_named() -> None:
    text = " ".join((ROOT / "docs/models.md").read_text("utf-8").split())
    assert [each.models for each in UNSERVED if each.models not in text] == []
