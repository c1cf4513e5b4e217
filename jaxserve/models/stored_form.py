"""The form in which a checkpoint stores its quantized linear layers: method, bits, group size, zero points.

models/checkpoint/quantization.py reads it from the files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import re2

from jaxserve.models.tensor_names import Rules, published_names, renamed

# Bytes that RE2 may take for the states of an automaton. A list of 700 expressions that begin with .* needs more than
# its default of 8 MiB, and is searched 200 times more slowly without its states.
_PATTERN_MEMORY = 2**26

Kind = Literal["int8", "int4", "fp8", "mxfp8", "mxfp4", "nvfp4"]  # of weights in memory
Method = Literal[
    "int-quantized", "pack-quantized", "gptq", "awq", "gguf", "fp8", "mxfp8", "mxfp4", "nvfp4", "gpt-oss", "mixed"
]
# The floating-point methods, with their kind in memory. gpt-oss has packed experts in MXFP4, with names of its own.
_FLOATS: MappingProxyType[str, Kind] = MappingProxyType(
    {"fp8": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "gpt-oss": "mxfp4"}
)


class HeldBlocks(NamedTuple):
    """The form of a GGUF type in memory: bits of a value, weights that share a scale, and whether there are zeros.

    stored: bits of a weight in the file, scales included
    """

    bits: int
    group: int
    zeros: bool
    stored: float


# The types that stay quantized. Values of 5 and 6 bits take 8 bits in memory.
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
class ModuleNames:
    """The modules that the lists of a quantization configuration name.

    A list may have an entry per layer, and a mixture of experts has tens of thousands of modules. So plain names are
    looked up, and only the other entries are searched for as expressions.

    names: whole names.
    parts: successive parts of names. "mlp.gate" names "layers.0.mlp.gate" and not "layers.0.mlp.gate_proj".
    prefixes: beginnings of names.
    substrings: texts anywhere in a name.
    expressions: regular expressions that match anywhere in a name.
    """

    names: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    substrings: tuple[str, ...] = ()
    expressions: tuple[str, ...] = ()

    def __contains__(self, module: str) -> bool:
        return (
            module in self._names
            or module.startswith(self.prefixes)
            or any(run in self._parts for run in self._runs(module))
            or any(text in module for text in self.substrings)
            or any(expression.search(module) for expression in self._compiled)
        )

    def _runs(self, module: str) -> Iterator[str]:
        """Yield each run of successive parts of a name that is as long as some entry of `parts`."""
        words = module.split(".")
        for count in self._counts:
            for start in range(len(words) - count + 1):
                yield ".".join(words[start : start + count])

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.names)

    @cached_property
    def _parts(self) -> frozenset[str]:
        return frozenset(self.parts)

    @cached_property
    def _counts(self) -> frozenset[int]:
        return frozenset(part.count(".") + 1 for part in self.parts)

    @cached_property
    def _compiled(self) -> list[Any]:
        """Return the expressions: one of RE2, and the ones that RE2 cannot read."""
        linear = [each for each in self.expressions if linear_pattern(each) is not None]
        others = [re.compile(each) for each in self.expressions if each not in linear]
        whole = linear_pattern("|".join(linear))
        together = [whole] if linear and whole is not None else [linear_pattern(each) for each in linear]
        return together + others


@dataclass(frozen=True)
class StoredForm:
    """A weight is (value - zero) * scale, as in `ops.quantized`. int- and pack-quantized are compressed-tensors'.

    group: weights of a row that share a scale; None: the whole row.
    zeros: whether the checkpoint has zeros; None: the middle of the values. zero_offset: added to the stored zeros.
    unquantized: modules that are not quantized.
    indexed: whether a GPTQ checkpoint has g_idx; AutoRound's leave it out.
    symmetric: whether a GPTQ or AWQ checkpoint may leave out its zeros, because all are the middle of the values.
    permuted: whether the inputs that share a scale may be anywhere in a row (act-order), as the files say.
    rounds_activations: whether it was made for 8-bit activations, see `runtime.activations`.
    found: the quantized modules, known when the files are open; then `unquantized` and `targets` have no effect.
    targets: the only modules that are quantized; None: all.
    forms: of a mixture, the forms of its modules; a module has the first of which it is a target.
    tensor_names: as of ModelConfig. `unquantized` has names of the checkpoint, or names here.
    types: GGUF's quantized modules with their types, all experts of a projection as one module, see `of_all_experts`;
      then `unquantized` has no effect, and bits, group and zeros suit all modules together.
    """

    method: Method
    bits: int
    group: int | None
    zeros: bool
    unquantized: ModuleNames = ModuleNames()
    zero_offset: int = 0
    permuted: bool = False
    rounds_activations: bool = False
    indexed: bool = True
    symmetric: bool = False
    found: frozenset[str] | None = None
    targets: ModuleNames | None = None
    forms: tuple[StoredForm, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    tensor_names: Rules = ()

    @classmethod
    def of_gguf(cls, types: Mapping[str, str]) -> StoredForm:
        """Make the form of a GGUF file from its quantized modules with their types."""
        return cls("gguf", *_widest(types.values()), types=tuple(sorted(types.items())))

    @property
    def is_integer(self) -> bool:
        return self.method not in _FLOATS and self.method != "mixed"

    @property
    def is_float(self) -> bool:
        return self.method in _FLOATS

    @property
    def kind(self) -> Kind:
        """Return the kind of the weights in memory. A mixture has none."""
        return _FLOATS.get(self.method, "int4" if self.bits == 4 else "int8")

    def of(self, module: str) -> StoredForm | None:
        """Return the form of a module, which for a mixture is one of `forms`; None: it is unquantized."""
        if self.method == "mixed":
            return next((form for form in self.forms if form.of(module) is not None), None)
        return None if self.is_wide(module) else self

    def with_names(self, rules: Rules) -> StoredForm:
        """Return the form, with its mixture's forms, for other `tensor_names`."""
        forms = tuple(form.with_names(rules) for form in self.forms)
        types = tuple((renamed(f"{module}.", rules).removesuffix("."), kind) for module, kind in self.types)
        return dataclasses.replace(self, tensor_names=rules, forms=forms, types=types)

    def is_wide(self, module: str) -> bool:
        """Return whether the checkpoint leaves the module of this name unquantized."""
        if self.method == "gguf":
            return self.type_of(module) is None
        if self.method == "mixed":
            return self.of(module) is None
        if self.found is not None:
            return module not in self.found
        names = published_names(module, self.tensor_names)
        outside = self.targets is not None and not any(name in self.targets for name in names)
        return outside or any(name in self.unquantized for name in names)

    def not_held(self) -> list[str]:
        """Return the types of the GGUF modules that do not stay quantized."""
        return sorted({kind for _, kind in self.types} - HELD_BLOCKS.keys())

    def holding(self, modules: list[str]) -> StoredForm:
        """Return the form for quantized modules that are fused: the widest of GGUF's, a mixture's form of the first."""
        if self.method != "gguf":
            return self.of(modules[0]) or self
        bits, group, zeros = _widest(self._types[of_all_experts(module)] for module in modules)
        return dataclasses.replace(self, bits=bits, group=group, zeros=zeros)

    @property
    def description(self) -> str:
        """Return the published format in words, with its bits or types."""
        if self.method == "gguf":
            return f"{' and '.join(sorted({kind for _, kind in self.types}))} of GGUF"
        if self.method == "mixed":
            return " and ".join(sorted({form.description for form in self.forms}))
        return f"{self.bits}-bit integers ({self.method})" if self.is_integer else self.kind.upper()

    def type_of(self, module: str) -> str | None:
        """Return GGUF's type of a module; None: it is unquantized."""
        return self._types.get(of_all_experts(module))

    @cached_property
    def _types(self) -> dict[str, str]:
        return dict(self.types)

    def num_groups(self, depth: int) -> int:
        """Return the number of groups of a row of `depth` weights."""
        return 1 if self.group is None else -(-depth // self.group)


_OF_EXPERT = re.compile(r"\.experts\.\d+\.")


def of_all_experts(module: str) -> str:
    """Return the name that a projection of an expert has together with those of the others."""
    return _OF_EXPERT.sub(".experts.", module)


def linear_pattern(source: str) -> Any:
    """Return a compiled expression of RE2, which is searched in linear time; None: RE2 cannot read it."""
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = _PATTERN_MEMORY
    try:
        return re2.compile(source, options)
    except re2.error:
        return None


def _widest(types: Iterable[str]) -> tuple[int, int, bool]:
    """Return bits, group and zeros of a weight that can hold all of these types of GGUF without loss."""
    held = [HELD_BLOCKS[kind] for kind in types if kind in HELD_BLOCKS]
    bits, group = max((each.bits for each in held), default=8), min((each.group for each in held), default=32)
    return bits, group, any(each.zeros for each in held)
