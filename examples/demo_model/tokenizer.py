"""The demo model's tokenizer: a byte-level BPE trained on generated samples, and the chat template's files.

Owns the special tokens and their ids. All 256 bytes are in the alphabet and nothing is normalised, so every
text is the same after encoding and decoding.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo_model import facts, skills, stories, tool_calls
from examples.demo_model.questions import Split

VOCAB_SIZE = 2048
TRAINING_SAMPLES = 20_000
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
)
# Markers are not control tokens: parsers of reasoning and of tool calls must see them in the decoded text.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")

# Words with the space before them, single digits, runs of punctuation, line ends: the usual GPT split.
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def sample_texts(seed: int) -> Iterator[str]:
    """Texts to learn merges from: generated conversations, and every fact's words once more."""
    rng = random.Random(f"tokenizer-{seed}")
    for _ in range(TRAINING_SAMPLES):
        sample = skills.MAIN_MIXTURE.draw(rng, Split.TRAIN)
        for message in (*sample.messages, sample.reply):
            yield "\n".join(str(message[k]) for k in ("content", "reasoning_content") if message.get(k))
        yield from (json.dumps(schema) for schema in sample.tools)
        yield "".join(sample.raw or ())
    for country in facts.COUNTRIES:
        yield f"{country.name}: {country.capital} {country.phrase} {country.capital}."
    yield " ".join((*facts.OPPOSITES, *facts.CITIES, *stories.CHARACTERS, *tool_calls.CONDITIONS))


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of exactly VOCAB_SIZE tokens; control tokens and markers have the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(MARKERS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the training text yields {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja in Hugging Face form."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": context_length,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE_PATH.read_text())
