"""The table of the device suite's results beside published marks.

    python -m benchmarks.device_suite.table RESULTS.json [--into BENCHMARKS.md]

--into replaces what is between the two comments that hold the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BEGIN, END = "<!-- device table: begin -->", "<!-- device table: end -->"
_SGLANG, _TENSORRT = "H100, SGLang", "TensorRT-LLM"


class Line(NamedTuple):
    """A line of the table: a figure of a cell beside a mark of others. better: whether more is better"""

    what: str
    section: str
    cell: str
    key: str
    unit: str
    mark: float | None = None
    whose: str = ""
    more: bool = True


_STEPS, _SERVE, _OSS = "steps-llama-8b", "serve-llama-8b", "steps-gpt-oss-20b"
LINES = (
    Line("copy, read and written", "ceilings", "copy", "GBps", "GB/s"),
    Line("read", "ceilings", "read", "GBps", "GB/s"),
    Line("bfloat16 product of 8,192", "ceilings", "matmul", "TFLOPs", "TFLOP/s"),
    Line("8B bfloat16, a step of 1 row", _STEPS, "decode 1 x 305", "tok_s", "tokens/s", 193, "H100, of a 7B"),
    Line("8B bfloat16, a step of 128 rows", _STEPS, "decode 128 x 305", "tok_s", "tokens/s"),
    Line("8B bfloat16, a step of 512 rows", _STEPS, "decode 512 x 305", "tok_s", "tokens/s"),
    Line("8B bfloat16, a prompt of 2,048", _STEPS, "prefill 2048", "ms", "ms", more=False),
    Line("8B bfloat16 over HTTP, 1 client", _SERVE, "1 x 30 + 500", "tok_s", "tokens/s", 142, _SGLANG),
    Line("8B bfloat16 over HTTP, 100 clients", _SERVE, "100 x 30 + 500", "tok_s", "tokens/s", 9_800, _SGLANG),
    Line("8B bfloat16 over HTTP, 500 clients", _SERVE, "500 x 30 + 500", "tok_s", "tokens/s", 20_000, _SGLANG),
    Line("8B, first token of 32 clients", _SERVE, "32 x 1000 + 100", "ttft_ms", "ms", 235, f"H100, {_TENSORRT}", False),
    Line("8B, start of the server", _SERVE, "start", "seconds", "s", 101, "H100 NVL, vLLM", False),
    Line("8B, second start", "serve_again-llama-8b", "warm start", "seconds", "s", more=False),
    Line("gpt-oss-20b, a step of 1 row", _OSS, "decode 1 x 1536", "tok_s", "tokens/s"),
    Line(
        "gpt-oss-20b, a step of 512 rows",
        *(_OSS, "decode 512 x 1536", "tok_s", "tokens/s", 13_890, f"H200, {_TENSORRT}, 1k in and out, saturated"),
    ),
)


def markdown(saved: dict[str, Any]) -> str:
    """Return the table of saved results, {"tiny": ..., "rows": [...]}. What is not measured says so."""
    rows = {(row["section"], row["name"]): row for row in saved["rows"]}
    machine = rows.get(("versions", "machine"), {})
    told = machine.get("device", "no device yet")
    jax = machine.get("packages", {}).get("jax")
    lines = [
        f"Device: {told}{f', jax {jax}' if jax else ''}." + (" Tiny sizes: no measurement." if saved["tiny"] else "")
    ]
    lines += ["", "| | here | of the roofline | published | here / published |", "|---|---|---|---|---|"]
    lines += [_line(line, rows.get((line.section, line.cell), {}), tiny=saved["tiny"]) for line in LINES]
    lines += ["", _numerics(saved["rows"])]
    lines += [f"- {text}" for text in _failures(saved["rows"])]
    return "\n".join(lines)


def _line(line: Line, row: dict[str, Any], *, tiny: bool) -> str:
    value = row.get(line.key)
    here = "not measured" if not row else "failed" if value is None else f"{_number(value)} {line.unit}"
    share = f"{100 * row['of_roofline']:.0f} %" if row.get("of_roofline") else "-"
    mark = f"{_number(line.mark)} {line.unit} ({line.whose})" if line.mark else "-"
    ratio = (
        f"{value / line.mark:.2f}{'' if line.more else ' (less is better)'}"
        if value and line.mark and not tiny
        else "-"
    )
    return f"| {line.what} | {here} | {share} | {mark} | {ratio} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _numerics(rows: list[dict[str, Any]]) -> str:
    checked = [row for row in rows if row["section"].startswith("numerics")]
    right = [row for row in checked if row.get("ok")]
    return f"Numbers: {len(right)} of {len(checked)} checks of kernels are right."


def _failures(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row.get("ok") is False:
            yield f"wrong: {row['section']} {row['name']}"
        elif "error" in row:
            yield f"failed: {row['section']} {row['name']}: {row['error'].partition(chr(10))[0][:200]}"


def write(path: Path, text: str) -> None:
    """Replace the table of a file. Raises ValueError if it has no place for one."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_suite.table", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--into", type=Path)
    given = parser.parse_args()
    text = markdown(json.loads(given.results.read_text()))
    print(text)
    if given.into:
        write(given.into, text)


if __name__ == "__main__":
    main()
