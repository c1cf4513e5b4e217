"""Turn samples into arrays: chat template, tokens, loss weights and packing. The same seed gives the same batches."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from examples.demo_model.model import PackedBatch
from examples.demo_model.questions import Split
from examples.demo_model.skills import SKILLS, Mixture, Sample

ROW_TOKENS = 320
# the loss of a prompt token, relative to a token of an answer
PROMPT_WEIGHT = 0.1
# a batch is full after this many samples that fit into no row
MAX_MISFITS = 6


@dataclass(frozen=True)
class Encoded:
    """A sample as token ids; `answer` ends with the token that ends the turn."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class SampleEncoder:
    """Renders samples with the chat template as a server does, and encodes them."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def texts(self, sample: Sample) -> tuple[str, str]:
        """Return prompt and answer as token ids, with the end token."""
        if sample.raw is not None:
            return sample.raw[0], sample.raw[1] + "<|endoftext|>"
        settings = {"tools": list(sample.tools) or None, "tokenize": False, "enable_thinking": sample.thinking}
        prompt = self.tokenizer.apply_chat_template(list(sample.messages), add_generation_prompt=True, **settings)
        whole = self.tokenizer.apply_chat_template([*sample.messages, sample.reply], **settings)
        if not isinstance(prompt, str) or not isinstance(whole, str) or not whole.startswith(prompt):
            raise ValueError("the chat template does not render a conversation as its prompt plus the answer")
        return prompt, whole[len(prompt) :].rstrip("\n")

    def encode(self, sample: Sample) -> Encoded:
        prompt, answer = self.texts(sample)
        return Encoded(self.ids(prompt), self.ids(answer))


def empty_batch(rows: int) -> PackedBatch:
    """Return a batch of padding, arrays [rows, ROW_TOKENS]."""

    def zeros() -> np.ndarray:
        return np.zeros((rows, ROW_TOKENS), np.int32)

    return PackedBatch(zeros(), zeros(), zeros(), zeros(), np.zeros((rows, ROW_TOKENS), np.float32))


def place(batch: PackedBatch, row: int, start: int, segment: int, sample: Encoded) -> int:
    """Write a sample into a row. Returns the position of the next one."""
    ids = sample.prompt + sample.answer
    end = start + len(ids) - 1
    batch.tokens[row, start:end] = ids[:-1]
    batch.targets[row, start:end] = ids[1:]
    batch.segments[row, start:end] = segment
    batch.positions[row, start:end] = range(len(ids) - 1)
    batch.weights[row, start:end] = PROMPT_WEIGHT
    batch.weights[row, start + len(sample.prompt) - 1 : end] = 1.0
    return end


def training_batch(encoder: SampleEncoder, mixture: Mixture, seed: int, step: int, rows: int) -> PackedBatch:
    """Return the batch of a step. Each step has a random stream, so that training can resume at any step."""
    rng = random.Random(f"{seed}-{step}")
    batch = empty_batch(rows)
    filled, segments, misfits = [0] * rows, [0] * rows, 0
    while misfits < MAX_MISFITS:
        sample = encoder.encode(mixture.draw(rng, Split.TRAIN))
        row = next((r for r in range(rows) if filled[r] + len(sample) - 1 <= ROW_TOKENS), None)
        if row is None:
            misfits += 1
            continue
        segments[row] += 1
        filled[row] = place(batch, row, filled[row], segments[row], sample)
    return batch


def rows_of_one(samples: Iterable[Encoded]) -> PackedBatch:
    """Return a batch with one sample per row, for evaluation. Samples must fit into a row."""
    listed = list(samples)
    batch = empty_batch(len(listed))
    for row, sample in enumerate(listed):
        place(batch, row, 0, 1, sample)
    return batch


def held_out_samples(seed: int, per_skill: int) -> list[Sample]:
    """Return held-out samples: half of each skill with held-out wordings, half with held-out pairs."""
    rng = random.Random(f"held-out-{seed}")
    splits = (Split.NEW_WORDING, Split.NEW_PAIR)
    return [draw(rng, splits[i % 2]) for draw in SKILLS.values() for i in range(per_skill)]
