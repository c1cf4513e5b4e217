"""From samples to arrays: chat template, tokens, loss weights and packing. The same seed gives the same batches."""

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
# Prompts teach copying and the words' neighbourhoods; answers are what the model is asked for.
PROMPT_WEIGHT = 0.1
# A batch is full when this many samples in all found no row with room.
MAX_MISFITS = 6


@dataclass(frozen=True)
class Encoded:
    """A sample as token ids; `answer` ends with the token that ends the turn."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class SampleEncoder:
    """Renders samples with the chat template exactly as a server would, and encodes them."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def texts(self, sample: Sample) -> tuple[str, str]:
        """Prompt and answer, the end token included."""
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
    """Padding alone, `[rows, ROW_TOKENS]`."""

    def zeros() -> np.ndarray:
        return np.zeros((rows, ROW_TOKENS), np.int32)

    return PackedBatch(zeros(), zeros(), zeros(), zeros(), np.zeros((rows, ROW_TOKENS), np.float32))


def place(batch: PackedBatch, row: int, start: int, segment: int, sample: Encoded) -> int:
    """Writes a sample into a row; returns where the next one starts."""
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
    """The batch of a step, from that step's own random stream, so that training can resume anywhere."""
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
    """One sample a row, for evaluation; samples must fit a row."""
    listed = list(samples)
    batch = empty_batch(len(listed))
    for row, sample in enumerate(listed):
        place(batch, row, 0, 1, sample)
    return batch


def held_out_samples(seed: int, per_skill: int) -> list[Sample]:
    """Half of each skill in wordings never trained on, half in pairs of wording and fact never trained on."""
    rng = random.Random(f"held-out-{seed}")
    splits = (Split.NEW_WORDING, Split.NEW_PAIR)
    return [draw(rng, splits[i % 2]) for draw in SKILLS.values() for i in range(per_skill)]
