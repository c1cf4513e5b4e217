"""Recognizes rerankers: models whose files, template or configuration say how they tell a document's relevance.

Owns what these files say about the use of a head's numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

from jaxserve.config import ModelSection
from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.model_files import read_object
from jaxserve.models.pooling import LOGIT_SCORE, sentence_modules
from jaxserve.text.chat_template import template_sources
from jaxserve.text.pairs import has_pair_roles
from jaxserve.text.tokenizer import Tokenizer

WORDS = ("no", "yes")  # of a template that names no others
_ACTIVATIONS = ("activation_fn", "sbert_ce_default_activation_function")


def label_token_ids(section: ModelSection, directory: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens by which the model says not relevant and relevant; () if it is no such reranker.

    The configuration decides, else the module LogitScore of sentence-transformers, else a chat template with the roles
    `query` and `document` and the words yes and no. Raises ConfigError for words that are not two tokens, and
    ModelLoadError for a LogitScore that names no two.
    """
    if section.classifier_from_token:
        return _tokens(section.classifier_from_token, tokenizer)
    path = sentence_modules(directory).get(LOGIT_SCORE)
    if path is not None:
        return _published(directory / path / "config.json", tokenizer.vocab_size)
    sources = template_sources(tokenizer, section.chat_template)
    template = sources[0] if sources is not None else ""
    if has_pair_roles(template) and all(re.search(rf"""["']{word}["']""", template) for word in WORDS):
        return _tokens(WORDS, tokenizer)
    return ()


def has_raw_scores(directory: Path) -> bool:
    """Return whether a cross-encoder's files say that its scores are used without a sigmoid."""
    names = []
    for file in (directory / "config.json", directory / "config_sentence_transformers.json"):
        found = read_object(file) if file.is_file() else {}
        inner = found.get("sentence_transformers")
        names += [each.get(key) for each in (found, inner if isinstance(inner, dict) else {}) for key in _ACTIVATIONS]
    return any(isinstance(name, str) and name.endswith("Identity") for name in names)


def is_regression(directory: Path) -> bool:
    """Return whether the numbers of a classification head are values, which transformers gives without a softmax."""
    file = directory / "config.json"
    return file.is_file() and read_object(file).get("problem_type") == "regression"


def _tokens(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = [tokenizer.token_to_id(word) for word in words]
    if len(set(ids)) != 2 or len(ids) != 2 or None in ids:
        raise ConfigError(
            f"model.classifier_from_token: {', '.join(words)} must be two words that are one token each",
            fix="name the words for not relevant and relevant, for example no,yes",
        )
    return tuple(each for each in ids if each is not None)


def _published(file: Path, vocab_size: int) -> tuple[int, ...]:
    """Read the file of a LogitScore module. Raises ModelLoadError unless it names two tokens."""
    settings = read_object(file)
    given = [settings.get(f"{name}_token_id") for name in ("false", "true")]
    ids = [each for each in given if isinstance(each, int) and 0 <= each < vocab_size]
    if len(ids) != 2:
        raise ModelLoadError(f"{file}: expected false_token_id and true_token_id")
    return tuple(ids)
