"""Chooses the fixed shapes (buckets) of programs: few, for a fast start, and close, for little padding.

Every size up to the maximum fits into a bucket, so no request is refused because of its shape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A program takes 1 to 2 s of a CPU core to compile, whatever the model's size. Padding costs arithmetic, which grows
# with the model. Small models therefore get few row buckets. Prefill gets as many buckets in small models as in large
# ones, because a prefill step is long in both and all running requests wait for it. On a CPU 6 and 12 rows are slower
# than 8 and 16. On a GPU finer buckets pay up to 256 rows; above, a step is bound by arithmetic. There is none of one
# row there: XLA splits its norms into two kernels, so that a layer has two kernels more than with two rows. On a CPU
# the prefill of a larger model is bound by arithmetic from 64 tokens on, so 192 and 384 are worth a program there.
SMALL_MODEL = 50_000_000  # parameters
_DECODE_SMALL = (1, 4, 16, 32, 64)
_DECODE_CPU = (1, 2, 4, 8, 16, 32, 64)
_DECODE = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Decode steps that sample in a second program are rarer and get half as many sizes. An accelerator takes as long for
# 32 rows as for one, and above 128 rows the time grows with the rows. A CPU is bound by arithmetic, in the head too.
_HIDDEN = (8, 32)  # then from 128 on by factors of two; on a CPU from 1 on by factors of four
_EXTEND = (8,)  # then from 32 on by factors of two
_HEAD = (1, 8, 64)  # then by factors of four; on a CPU from 1 on
# The smallest and the largest size of a step with drafts, by factors of two. In larger ones drafts cost time, because
# arithmetic is the bound.
_VERIFY = 2, 256
_VERIFY_CPU = 2, 64


@dataclass(frozen=True)
class Buckets:
    """The sizes of each kind of program, ascending.

    decode: rows. decode_hidden: rows of a decode step without sampler. extend: tokens. head: rows of head and sampler.
    verify: tokens of a step with drafts; each is a size of decode_hidden too. Empty without speculation.
    draft: rows that a draft model proposes drafts for, as many as the largest `verify` has. Empty without such a model.
    """

    decode: tuple[int, ...]
    decode_hidden: tuple[int, ...]
    extend: tuple[int, ...]
    head: tuple[int, ...]
    verify: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()

    def by_program(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes (rows or tokens, as the fields say) by program name."""
        return {
            "decode": self.decode,
            "decode_hidden": self.decode_hidden,
            "extend": self.extend,
            "head_sample": self.head,
            **({"verify": self.verify} if self.verify else {}),
            **({"draft": self.draft} if self.draft else {}),
        }

    @property
    def max_tokens(self) -> int:
        return self.extend[-1]


def make_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    platform: str,
    num_parameters: int,
    deterministic: bool = False,
    max_drafts: int = 0,
    draft_model: bool = False,
) -> Buckets:
    """Choose the buckets of a configuration. draft_model: the device proposes drafts itself

    Deterministic mode decodes through `extend` and has no decode programs. On a CPU it keeps the other buckets, because
    a row's bits are the same in all of them (tests check this). Elsewhere the matrix kernel changes with the number of
    rows, so there is one shape only.
    """
    max_tokens = max(max_num_seqs, max_num_batched_tokens)
    if deterministic and platform != "cpu":
        return Buckets(decode=(), decode_hidden=(), extend=(max_tokens,), head=(max_num_seqs,))
    fine = _DECODE_CPU if platform == "cpu" else _DECODE
    rows, factor = (_DECODE_SMALL, 4) if num_parameters < SMALL_MODEL else (fine, 2)
    extend = _powers(32, 2, max_tokens)
    if platform == "cpu" and factor == 2:
        extend = sorted({*extend, *(3 * size // 2 for size in extend if size >= 128)})
    decode = _up_to((*rows, *_powers(factor * rows[-1], factor, max_num_seqs)), max_num_seqs)
    head = hidden = _powers(1, 4, max_num_seqs)
    if platform != "cpu":
        hidden, head = (*_HIDDEN, *_powers(128, 2, max_num_seqs)), (*_HEAD, *_powers(256, 4, max_num_seqs))
    verify = _verify_sizes(max_num_seqs, max_tokens, max_drafts, platform)
    return Buckets(
        decode=() if deterministic else decode,
        decode_hidden=tuple(sorted({*verify, *(() if deterministic else _up_to(hidden, max_num_seqs))})),
        extend=_up_to((*((1,) if deterministic else ()), *_EXTEND, *extend), max_tokens),
        head=_up_to(head, max_num_seqs),
        verify=verify,
        draft=_draft_sizes(min(max_num_seqs, verify_rows(verify[-1]))) if draft_model else (),
    )


def verify_rows(num_tokens: int) -> int:
    """Return the rows of a step with drafts of `num_tokens` tokens: half as many.

    If drafts are worth their cost, rows without drafts are rare.
    """
    return max(1, num_tokens // 2)


def _verify_sizes(max_num_seqs: int, max_tokens: int, max_drafts: int, platform: str) -> tuple[int, ...]:
    if not max_drafts:
        return ()
    first, last = _VERIFY_CPU if platform == "cpu" else _VERIFY
    most = min(last, max_tokens, max_num_seqs * (1 + max_drafts))
    return tuple(size for size in _powers(first, 2, last) if size < 2 * most and size <= max_tokens)


def _draft_sizes(most: int) -> tuple[int, ...]:
    # few, because such a program has the draft model once for each draft
    return _up_to(_powers(1, 4, most), most)


_SHORTEST_TEXT = 32


@dataclass(frozen=True)
class EncodeBuckets:
    """The shapes of an encoder's programs: rows by length, both ascending. rows x length is at most a step's tokens."""

    rows: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(
        cls, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, *, deterministic: bool = False
    ) -> EncodeBuckets:
        """Make buckets with lengths in powers of two and rows in powers of four. max_model_len must fit into a step.

        deterministic: one number of rows per length, because the matrix kernel changes with the rows.
        """
        lengths = _up_to(_powers(_SHORTEST_TEXT, 2, max_model_len), max_model_len)
        most = {length: min(max_num_seqs, max_num_batched_tokens // length) for length in lengths}
        first = {length: count if deterministic else 1 for length, count in most.items()}
        return cls({length: _up_to(_powers(first[length], 4, most[length]), most[length]) for length in lengths})

    def shapes(self) -> list[tuple[int, int]]:
        """Return (rows, length) of every program."""
        return [(rows, length) for length, counts in self.rows.items() for rows in counts]

    def pack(self, lengths: Sequence[int]) -> list[tuple[tuple[int, int], list[int]]]:
        """Group texts of these lengths into dispatches: ((rows, length) of the program, indices of the texts)."""
        groups: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            groups.setdefault(fit(tuple(self.rows), length), []).append(index)
        packed = []
        for length, members in sorted(groups.items()):
            most = self.rows[length][-1]
            for first in range(0, len(members), most):
                part = members[first : first + most]
                packed.append(((fit(self.rows[length], len(part)), length), part))
        return packed


def _powers(first: int, factor: int, limit: int) -> tuple[int, ...]:
    values = [first]
    while values[-1] < limit:
        values.append(values[-1] * factor)
    return tuple(values)


def _up_to(values: Sequence[int], limit: int) -> tuple[int, ...]:
    return (*(value for value in values if value < limit), limit)


def fit(buckets: Sequence[int], count: int) -> int:
    """Return the smallest bucket that holds `count`. Raises ValueError if `count` is above the largest bucket."""
    index = bisect_left(buckets, count)
    if index == len(buckets):
        raise ValueError(f"{count} is above the largest bucket, {buckets[-1]}")
    return buckets[index]
