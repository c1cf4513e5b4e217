"""How a checkpoint stores its quantised linear layers: method, bits, group size, zero points.

models/loading/config/stored_config.py reads it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import re2

Method = Literal["int-quantized", "pack-quantized", "gptq", "awq", "gguf", "fp8", "mxfp4"]


class HeldBlocks(NamedTuple):
    """How a type of GGUF is held: bits of a value, numbers that share a scale, and whether there are zeros.

    stored: the bits that a number takes in the file.
    """

    bits: int
    group: int
    zeros: bool
    stored: float


# The types whose numbers are kept in few bits. Values of 5 and 6 bits are held in 8.
HELD_BLOCKS: MappingProxyType[str, HeldBlocks] = MappingProxyType(
    {
        "Q4_0": HeldBlocks(4, 32, False, 4.5),
        "Q4_1": HeldBlocks(4, 32, True, 5),
        "Q5_0": HeldBlocks(8, 32, False, 5.5),
        "Q5_1": HeldBlocks(8, 32, True, 6),
        "Q8_0": HeldBlocks(8, 32, False, 8.5),
        "Q4_K": HeldBlocks(4, 32, True, 4.5),
        "Q5_K": HeldBlocks(8, 32, True, 5.5),
        "Q6_K": HeldBlocks(8, 16, False, 6.5625),
    }
)


@dataclass(frozen=True)
class StoredForm:
    """A number is (code - zero) * scale, as in `ops.quantized`. int- and pack-quantized are compressed-tensors'.

    group: numbers of a row that share a scale; None: the row.
    zeros: whether the checkpoint has them; None: the middle of the codes. zero_offset: added to those that it has.
    wide: modules that are not quantised, as regular expressions.
    permuted: whether inputs that share a scale may be anywhere in a row (act-order), as the files say.
    rounds_activations: whether it was made for activations of 8 bits, see `runtime.products`.
    found: the quantised modules, known once the files are open; then `wide` has no effect.
    types: of GGUF, the quantised modules with their types; then `wide` has no effect, and bits, group and zeros are
      those of all modules together.
    """

    method: Method
    bits: int
    group: int | None
    zeros: bool
    wide: tuple[str, ...]
    zero_offset: int = 0
    permuted: bool = False
    rounds_activations: bool = False
    found: frozenset[str] | None = None
    types: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_gguf(cls, types: Mapping[str, str]) -> StoredForm:
        """Make the form of a GGUF file from its quantised modules with their types."""
        return cls("gguf", *_widest(types.values()), wide=(), types=tuple(sorted(types.items())))

    @property
    def is_integer(self) -> bool:
        return self.method not in ("fp8", "mxfp4")

    def is_wide(self, module: str) -> bool:
        """Return whether the checkpoint does not quantise the module of this name."""
        if self.method == "gguf":
            return module not in self.type_of
        if self.found is not None:
            return module not in self.found
        return any(pattern.search(module) is not None for pattern in self._wide)

    def not_held(self) -> list[str]:
        """Return the types of GGUF's modules that are not kept in few bits."""
        return sorted({kind for _, kind in self.types} - HELD_BLOCKS.keys())

    def holding(self, modules: list[str]) -> StoredForm:
        """Return the form that holds quantised modules which are computed as one: the widest of theirs."""
        if self.method != "gguf":
            return self
        bits, group, zeros = _widest(self.type_of[module] for module in modules)
        return dataclasses.replace(self, bits=bits, group=group, zeros=zeros)

    @property
    def description(self) -> str:
        """The published format in words, with its bits or types."""
        if self.method == "gguf":
            return f"{' and '.join(sorted({kind for _, kind in self.types}))} of GGUF"
        return f"{self.bits}-bit integers ({self.method})" if self.is_integer else self.method.upper()

    @cached_property
    def type_of(self) -> dict[str, str]:
        """`types` by module."""
        return dict(self.types)

    @cached_property
    def _wide(self) -> list[Any]:
        """The expressions of `wide`: one of RE2, or several if RE2 does not read all of them together."""
        if not self.wide:
            return []
        whole = linear_pattern("|".join(self.wide))
        return [whole] if whole is not None else [linear_pattern(each) or re.compile(each) for each in self.wide]

    def num_groups(self, depth: int) -> int:
        """Return the number of groups of a row of `depth` numbers."""
        return 1 if self.group is None else -(-depth // self.group)


def linear_pattern(source: str) -> Any:
    """Return a compiled expression of RE2, which is searched in linear time; None: RE2 does not read it."""
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(source, options)
    except re2.error:
        return None


def _widest(types: Iterable[str]) -> tuple[int, int, bool]:
    """Return bits, group and zeros of a weight that can hold all of these types of GGUF without loss."""
    held = [HELD_BLOCKS[kind] for kind in types if kind in HELD_BLOCKS]
    bits, group = max((each.bits for each in held), default=8), min((each.group for each in held), default=32)
    return bits, group, any(each.zeros for each in held)
