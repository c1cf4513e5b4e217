"""How a checkpoint stores its quantised linear layers: method, bits, group size, zero points.

models/loading/config/stored_config.py reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Method = Literal["int-quantized", "pack-quantized", "gptq", "awq", "gguf", "fp8", "mxfp4"]


@dataclass(frozen=True)
class StoredForm:
    """A number is (code - zero) * scale, as in `ops.quantized`. int- and pack-quantized are compressed-tensors'.

    group: numbers of a row that share a scale; None: the row.
    zeros: whether the checkpoint has them; None: the middle of the codes. zero_offset: added to those that it has.
    wide: modules that are not quantised, as regular expressions.
    permuted: whether inputs that share a scale may be anywhere in a row (act-order), as the files say.
    rounds_activations: whether it was made for activations of 8 bits, which are not rounded here.
    found: the quantised modules, known once the files are open; then `wide` has no effect.
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

    @property
    def is_integer(self) -> bool:
        return self.method not in ("fp8", "mxfp4")

    def is_wide(self, module: str) -> bool:
        """Return whether the checkpoint does not quantise the module of this name."""
        if self.found is not None:
            return module not in self.found
        return bool(self.wide) and self._wide.search(module) is not None

    @cached_property
    def _wide(self) -> re.Pattern[str]:
        return re.compile("|".join(self.wide))

    def num_groups(self, depth: int) -> int:
        """Return the number of groups of a row of `depth` numbers."""
        return 1 if self.group is None else -(-depth // self.group)
