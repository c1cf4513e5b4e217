"""The committed table of the programs compiled for an H200. Compiling needs packages that the suite does without."""

from __future__ import annotations

import pytest

from benchmarks.compiled import reading, table
from benchmarks.compiled.programs import FAMILIES, STATES

THUNKS = """\
000: kCommandBuffer [source       | next=075 (1)]
    001: kCustomKernel [source        | next=002 (1)] fusion_1  shared_memory: 0 bytes
    002: kCustomKernel [prev=001 (1)  | next=003 (5)] paged_decode  shared_memory: 38144 bytes
    003: kCustomKernel [prev=002 (1)  | next=004 (5)] gemm_fusion  shared_memory: 768 bytes
    004: kCustomKernel [prev=003 (1)  | sink        ] paged_decode  shared_memory: 38144 bytes
075: kConditional   [prev=000 (1) | sink        ]
  false_branch:
    076: kCopy [source | sink] kCopy
"""


@pytest.mark.parametrize("chip", table.CHIPS)
def test_the_table_is_of_the_present_sources(chip: str) -> None:
    assert table.load(chip)["sources"] == table.digest(), "run .ci/compile, and commit the table if nothing got worse"


def test_only_code_counts_as_a_change() -> None:
    code = "def f(x):\n    return 'a # b'\n"
    told = '"""Says what."""\n\n# Why.\ndef f(x):  # what\n    """Return\n\n    it."""\n    return \'a # b\'\n'
    assert table.code_of(told) == table.code_of(code) == code.strip()
    assert table.code_of(code.replace("# b", "# c")) != table.code_of(code)
    texts = ('x = """a\n\nb"""\n', 'x = """a\nb"""\n', 'x = """a  \nb"""\n')
    assert len({table.code_of(text) for text in texts}) == len(texts)


def test_every_program_of_the_table_compiles() -> None:
    programs = table.load()["programs"]
    assert len(programs) > 20
    assert not [name for name, found in programs.items() if "error" in found], "the table of docs/models says so too"


def test_a_decode_step_is_one_graph() -> None:
    # Loops over slices of a picture's patches, and over chunks of a recurrence, are not in the graph.
    loops = {"encode_queries": (0, 8), "Qwen3.5-9B extend": (2, 1)}
    # Heads of 512 columns at once: 64, 20 and 32 of them.
    spills = {"DeepSeek-V3 extend[512]": 140, "GLM-4.7-Flash extend[512]": 12, "Kimi-Linear-48B-A3B extend[512]": 20}
    for name, found in table.load()["programs"].items():
        graphs = next((counts for loop, counts in loops.items() if loop in name), (1, 0))
        assert (found["graphs"], found["outside_graphs"], found["cache_copies"]) == (*graphs, 0), name
        assert not found["caches_not_in_place"], name
        spilled = sum(kernel["spilled_bytes"] for kernel in found["pallas"].values())
        assert spilled <= spills.get(name, 0), name


# Programs that need more than the memory of one chip, 16 GB: for the weights of a layer of DeepSeek, and for the copies
# of experts that XLA keeps last.
TOO_LARGE = {"v5e": ("gpt-oss-120b", "DeepSeek-V3", "MiMo-V2-Flash"), "v6e": ()}


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_a_tpu_holds_its_caches_in_place(chip: str) -> None:
    programs = table.load(chip)["programs"]
    assert {f"{name} decode[64]" for name in FAMILIES} <= set(programs)
    assert {f"Llama-3.1-8B {rest}" for rest in ("decode[1]", "in int8 decode[1]", "extend[512]")} <= set(programs)
    for name, found in programs.items():
        model, program = name.rsplit(" ", 1)
        if model in TOO_LARGE[chip]:
            assert "RESOURCE_EXHAUSTED" in found["error"], name
            continue
        assert "error" not in found, name
        # Towers are products of XLA, and of a model with states one of the two layers attends.
        least = 0 if program.startswith("encode") else 1 if model in STATES else 2
        assert found["pallas_calls"] >= least and not found["caches_not_in_place"], name
        # Not mended: XLA keeps scales in another order than the kernel reads, and copies those of each layer twice. It
        # copies the cache of heads of 64 numbers three times a layer, that of a single head once, that of latent rows
        # twice, that of keys wider than values three times, that of a step of 2,048 tokens once, and states and their
        # rings two to three times a layer.
        known = {"Llama-3.1-8B with int8 pages": 4, "gpt-oss-120b": 6, "gpt-oss-120b in mxfp4": 6}
        known |= {"Gemma-3-1B": 2, "DeepSeek-V3": 2, "LFM2-1.2B": 2, "Kimi-Linear-48B-A3B": 5}
        known |= {"MiMo-V2-Flash": 6, "GLM-4.7-Flash": 4, "Mistral-Small-4": 4}
        known |= {state: 3 for state in STATES if state not in known}
        copies = {f"{each} {step}": count for each, count in known.items() for step in ("decode[64]", "extend[512]")}
        copies |= {f"Llama-3.1-8B W8A8 {products} extend[2048]": 2 for products in ("exact", "rounded")}
        assert found["cache_copies"] <= copies.get(name, 0), name


def test_a_layer_is_ten_kernels_by_cublas() -> None:
    """And one that joins splits of the context, if there are few rows."""
    programs = table.load()["programs"]
    kernels = [programs[f"Llama-3.1-8B by cuBLASLt decode[{rows}]"]["kernels_per_layer"] for rows in (8, 128, 512)]
    assert all(found <= most for found, most in zip(kernels, (11, 10, 10), strict=True))


def test_quantized_layers_are_one_kernel_that_spills_nothing() -> None:
    programs = {
        name: found for name, found in table.load()["programs"].items() if "8B in int" in name and "decode" in name
    }
    assert len(programs) >= 4
    for name, found in programs.items():
        assert any(kernel.startswith("linear_few_bits") for kernel in found["pallas"]), name


def test_thunks_are_read_with_their_depth() -> None:
    thunks = reading._thunks(THUNKS)
    assert [(depth, kind) for depth, kind, _, _ in thunks if depth == 0] == [(0, "kCommandBuffer"), (0, "kConditional")]
    assert reading._distance([name for _, kind, name, _ in thunks if kind == "kCustomKernel"]) == 2
    assert ("paged_decode", "38144") in [(name, shared) for _, _, name, shared in thunks]


@pytest.mark.parametrize(("after", "lines"), [
    ({"a": {"kernels": 12, "graphs": 1}}, []),
    ({"a": {"kernels": 11, "graphs": 1}}, []),
    ({"a": {"kernels": 13, "graphs": 1}}, ["a.kernels: 12 -> 13"]),
    ({"a": {"error": "no"}}, ["a.kernels: 12 -> nothing", "a.graphs: 1 -> nothing"]),
])  # fmt: skip
def test_only_a_change_for_the_worse_is_told(after: dict, lines: list[str]) -> None:
    assert list(table.worse({"a": {"kernels": 12, "graphs": 1}}, after)) == lines
