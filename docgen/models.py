"""Write the tables of families in docs/models.md and README.md: what each takes, and what proves it.

    python -m docgen.models

What can be read from the code is: architectures, pictures, formats, GGUF, and the tests and tables that a family is in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compiled import table
from jaxserve.models.checkpoint.gguf_models import ARCHITECTURES as GGUF
from jaxserve.models.families.registry import ARCHITECTURES, NESTED
from jaxserve.models.unserved import BY_ARCHITECTURE
from tests.models.families import CASES, CLASSIFIERS, ENCODERS, STATE_CASES
from tests.models.published import PUBLISHED
from tests.models.test_sharding import LONG, MODELS, SHORT

ROOT = Path(__file__).parents[1]
_TEXT, _HEAD, _ENCODER, _NESTED = "ForCausalLM", "ForSequenceClassification", "Model", "ForConditionalGeneration"


@dataclass(frozen=True)
class Row:
    """A family.

    sizes: published ones of this form. names: its architectures in config.json without what their head is. formats:
    of tool calls and of reasoning, as its published template has them; () if templates differ. like: a family of which
    this one is a configuration, and with which it is proven. larger: architectures that take pictures and have this one
    inside, without their end
    """

    family: str
    sizes: str
    names: tuple[str, ...]
    formats: tuple[str, str] | tuple[()] = ()
    like: str = ""
    larger: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """Its architectures that write text."""
        return [f"{name}{_TEXT}" for name in self.names if f"{name}{_TEXT}" in ARCHITECTURES]

    @property
    def served(self) -> bool:
        nested = any(f"{name}{_NESTED}" in NESTED for name in self.larger)
        return not any(name in BY_ARCHITECTURE for name in self.texts) and (nested or not self.larger)


_QWEN, _GLM, _DEEPSEEK = ("hermes", "qwen3"), ("glm45", "glm45"), ("deepseek_v3", "deepseek_v3")
ROWS = (
    Row("Llama 2, 3.x, SmolLM2", "1B to 405B", ("Llama",), ("llama3_json", "-")),
    Row("Mistral 7B, Small 3, Devstral", "7B, 24B", ("Mistral",), ("mistral", "mistral"), larger=("Mistral3",)),
    Row("Qwen2, Qwen2.5", "0.5B to 72B", ("Qwen2",), ("hermes", "-")),
    Row("Qwen3, Qwen3-Embedding, Qwen3-Reranker", "0.6B to 32B", ("Qwen3",), _QWEN),
    Row("Qwen3-MoE, Qwen3-Coder", "30B-A3B, 235B-A22B, 480B-A35B", ("Qwen3Moe",), _QWEN),
    Row("Qwen3-Next", "80B-A3B", ("Qwen3Next",), _QWEN),
    Row("Qwen3.5, Qwen3.6", "0.8B to 397B-A17B", ("Qwen3_5", "Qwen3_5Moe"), ("qwen3_coder", "qwen3"),
        larger=("Qwen3_5", "Qwen3_5Moe")),
    Row("Qwen3-VL", "2B to 32B; 30B-A3B, 235B-A22B", ("Qwen3", "Qwen3Moe"), _QWEN, "Qwen3 and Qwen3-MoE",
        ("Qwen3VL", "Qwen3VLMoe")),
    Row("Qwen2.5-VL", "3B to 72B", ("Qwen2",), ("hermes", "-"), "Qwen2", ("Qwen2_5_VL",)),
    Row("Mixtral", "8x7B, 8x22B", ("Mixtral",)),
    Row("Gemma 2", "2B, 9B, 27B", ("Gemma2",)),
    Row("Gemma 3", "1B to 27B", ("Gemma3", "Gemma3Text"), larger=("Gemma3",)),
    Row("Gemma 4", "E2B, E4B, 26B-A4B, 31B", ("Gemma4",), ("gemma4", "gemma4"), larger=("Gemma4",)),
    Row("Llama 4", "Scout, Maverick", ("Llama4",), ("pythonic", "-"), larger=("Llama4",)),
    Row("Muse Glimmer", "30B", ("MuseGlimmer",), ("muse_glimmer", "muse_glimmer"), larger=("MuseGlimmer",)),
    Row("Phi-3, Phi-4-mini", "4B", ("Phi3",)),
    Row("OLMo 2, OLMo 3", "1B to 32B", ("Olmo2", "Olmo3"), ("olmo3", "deepseek_v3")),
    Row("SmolLM3", "3B", ("SmolLM3",)),
    Row("Seed-OSS", "36B", ("SeedOss",), ("seed_oss", "seed_oss")),
    Row("Granite 3", "2B, 8B", ("Granite",), ("granite", "granite")),
    Row("Granite 3 with experts", "1B-A400M, 3B-A800M", ("GraniteMoe",)),
    Row("Granite 4", "4.0-micro, h-micro, h-tiny, h-small", ("GraniteMoeHybrid",), _QWEN),
    Row("Bamba", "9B", ("Bamba",)),
    Row("Nemotron-H, Nemotron 3", "4B to 56B; 30B-A3B, 120B-A12B", ("NemotronH",)),
    Row("Falcon-H1", "0.5B to 34B", ("FalconH1",)),
    Row("Kimi-Linear", "48B-A3B", ("KimiLinear",)),
    Row("ERNIE 4.5", "0.3B", ("Ernie4_5",), _QWEN),
    Row("ERNIE 4.5 MoE", "21B-A3B, 300B-A47B", ("Ernie4_5_Moe",), ("hermes", "ernie45")),
    Row("EXAONE 4, K-EXAONE", "32B; 236B-A23B", ("Exaone4", "ExaoneMoe"), _QWEN),
    Row("Qwen2-MoE", "A2.7B, 57B-A14B", ("Qwen2Moe",)),
    Row("OLMoE", "1B-7B", ("Olmoe",)),
    Row("dots.llm1", "142B-A14B", ("Dots1",)),
    Row("InternLM3", "8B", ("InternLM3",)),
    Row("Command R (without QK norm), R7B, A", "35B, 7B, 111B", ("Cohere", "Cohere2")),
    Row("GLM-4 (2024: 9B-hf; 0414)", "9B, 32B", ("Glm", "Glm4")),
    Row("Apertus", "8B, 70B", ("Apertus",), ("apertus", "apertus")),
    Row("Nemotron 4, Minitron", "4B to 340B", ("Nemotron",)),
    Row("StarCoder2", "3B, 7B, 15B", ("Starcoder2",)),
    Row("Arcee AFM", "4.5B", ("Arcee",)),
    Row("Helium", "2B", ("Helium",)),
    Row("Hunyuan, dense", "0.5B to 7B", ("HunYuanDenseV1",)),
    Row("gpt-oss", "20b, 120b", ("GptOss",), ("harmony", "harmony")),
    Row("DeepSeek-V3, R1, V3.1", "671B-A37B", ("DeepseekV3",), _DEEPSEEK),
    Row("Kimi K2, and K2.5 to 2.7", "1T-A32B", ("DeepseekV3",), ("kimi_k2", "kimi_k2"), "DeepSeek-V3",
        ("KimiK25", "Kimi_K25")),
    Row("GLM-4.5, 4.6, 4.7", "106B-A12B, 355B-A32B", ("Glm4Moe",), _GLM),
    Row("GLM-4.7-Flash", "30B-A3B", ("Glm4MoeLite",), _GLM),
    Row("MiniMax-M2, M2.5, M2.7", "229B-A10B", ("MiniMaxM2",), ("minimax_m2", "deepseek_v3")),
    Row("Ministral 3", "3B, 8B, 14B", ("Ministral3",), ("mistral", "mistral"), larger=("Mistral3",)),
    Row("Mistral Small 4", "119B-A6B", ("Mistral4",), ("mistral", "mistral"), larger=("Mistral3",)),
    Row("Hy3", "295B-A21B", ("HYV3",), ("hy_v3", "hy_v3")),
    Row("Laguna", "33B-A3B, 118B-A8B", ("Laguna",), _GLM),
    Row("Step 3.5 Flash, 3.7 Flash", "196B-A11B", ("Step3p7", "Step3p7Flash", "Step3p5"), ("qwen3_coder", "qwen3"),
        larger=("Step3p7",)),
    Row("MiMo V2 Flash", "309B-A15B", ("MiMoV2Flash",), ("mimo", "qwen3")),
    Row("MiMo 7B", "7B", ("MiMo",), _QWEN, like="Qwen2"),
    Row("LFM2", "350M to 2.6B", ("Lfm2",), ("lfm2", "deepseek_v3")),
    Row("LFM2-MoE", "8B-A1B", ("Lfm2Moe",), ("lfm2", "deepseek_v3")),
    Row("BERT: MiniLM, ms-marco-MiniLM", "22M to 335M", ("Bert",)),
    Row("RoBERTa, XLM-RoBERTa: bge-m3, bge-reranker", "125M to 568M", ("Roberta", "XLMRoberta")),
)  # fmt: skip


def _proven(row: Row) -> Iterator[str]:
    """Yield what a family was computed or compiled on."""
    if row.like:
        yield f"as {row.like}"
        return
    mine = {f"{name}{head}" for name in row.names for head in (_TEXT, _HEAD, _ENCODER)}

    def has(hf: dict[str, Any]) -> bool:
        nested = NESTED.get(hf["architectures"][0])
        if nested is None:
            return not mine.isdisjoint(hf["architectures"])
        # The sizes of models with towers in PUBLISHED have no nested part: only their towers are compiled.
        return "text_config" in hf and nested.text_architecture(hf["text_config"]) in mine

    if any(has(hf) for hf in (CASES | STATE_CASES | ENCODERS | CLASSIFIERS).values()):
        yield "CPU"
    runs = {run for runs in (SHORT, LONG) for kind in runs.values() for run in kind if has(MODELS[run[0]])}
    if counts := sorted({tensor * expert for _, tensor, expert in runs} - {1}):
        yield f"{', '.join(map(str, counts))} simulated devices"
    compiled = {chip: table.load(chip)["programs"] for chip in table.CHIPS}
    programs = {
        chip: {name.partition(" ")[0] for name, found in all_found.items() if "error" not in found}
        for chip, all_found in compiled.items()
    }
    if chips := [chip for chip, names in programs.items() if any(has(PUBLISHED[name].hf) for name in names)]:
        yield f"compiled for {', '.join(chips)}"


def _computes(row: Row) -> str:
    """Return what a family is for: text, embeddings, scores."""
    if row.like and row.larger:
        return "text"
    heads = {"embeddings": _ENCODER, "scores": _HEAD}
    found = [kind for kind, head in heads.items() if any(f"{name}{head}" in ARCHITECTURES for name in row.names)]
    return ", ".join((["text"] if row.texts else []) + found)


def _images(row: Row) -> str:
    """Return `-`, or what becomes of the pictures that a family's larger architecture takes."""
    larger = [NESTED[f"{name}{_NESTED}"] for name in row.larger if f"{name}{_NESTED}" in NESTED]
    if any(each.pictures is not None for each in larger):
        return "read"
    return "not read" if row.larger else "-"


def _weights(row: Row) -> str:
    if not row.texts:
        return "safetensors"
    if "Step3p7ForCausalLM" in row.texts:
        return "16 bits, FP8, and quantized at load"  # one tensor of all experts was tried in no other form
    with_states = {hf["architectures"][0] for hf in STATE_CASES.values()}
    forms = "all forms" if with_states.isdisjoint(row.texts) else "16 bits, quantized as published"
    in_gguf = {architecture.published for architecture in GGUF.values()} | {"BambaForCausalLM"}  # in granitehybrid
    if in_gguf.isdisjoint(row.texts) or (row.larger and row.like):
        return forms
    return f"{forms}, GGUF of texts" if row.larger else f"{forms}, GGUF"


def cells(row: Row) -> list[str]:
    """Return a row of the wide table."""
    formats = list(row.formats) or (["by its template"] * 2 if row.texts else ["-"] * 2)
    return [row.family, row.sizes, _computes(row), _images(row), *formats, _weights(row), "; ".join(_proven(row))]


def _lines(head: str, rows: list[list[str]]) -> str:
    shown = [f"| {' | '.join(each)} |" for each in (head.split(", "), *rows)]
    return "\n".join([shown[0], "|---" * (head.count(",") + 1) + "|", *shown[1:]])


def wide() -> str:
    """Return the table of docs/models.md."""
    head = "family, sizes, computes, images, tools, reasoning, weights, proven on"
    return _lines(head, [cells(row) for row in ROWS if row.served])


def short() -> str:
    """Return the table of README.md: the families that have the same uses and proofs in one row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS:
        if row.served:
            proven = cells(row)[-1]
            chips = " and ".join(kind for kind, chip in (("GPU", "h200"), ("TPU", "v5e")) if chip in proven)
            proofs = f"tests; compiled for {chips}" if chips else "tests"
            use = "text" if row.texts else _computes(row)
            groups.setdefault((use, _images(row), "yes" if row.formats else "-", proofs), []).append(row.family)
    return _lines("families, computes, images, tools, proven by", [["; ".join(n), *key] for key, n in groups.items()])


_MADE = re.compile(r"(?<=<!-- made by python -m docgen\.models -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Return {path: its text with the present table}."""
    made = {ROOT / "docs/models.md": wide(), ROOT / "README.md": short()}
    return {path: _MADE.sub(lambda _, text=text: text, path.read_text("utf-8")) for path, text in made.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, "utf-8")
