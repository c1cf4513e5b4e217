"""vLLM's side: run closed batches in process. It runs in an environment of its own.

    python peer.py MODEL_DIR DTYPE ADAPTERS_DIR PROMPT_TOKENS OUTPUT_TOKENS TRIES ROWS...

The rows of a batch have the adapters of ADAPTERS_DIR by turns; if it is empty, none. Prints the output tokens a second
of the best try of each number of rows, the last lines of its output. The prefix cache is off: no two prompts are alike.
"""

import random
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main(model: str, dtype: str, directory: str, prompt: int, output: int, tries: int, *rows: int) -> None:
    paths = sorted(Path(directory).iterdir())
    adapters = [LoRARequest(each.name, number, str(each)) for number, each in enumerate(paths, 1)]
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=2 * (prompt + output),
        max_num_seqs=max(rows),
        enable_prefix_caching=False,
        disable_log_stats=True,
        **({"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 16} if adapters else {}),
    )
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    found = []
    for count in rows:
        best = 0.0
        for _ in range(tries + 1):  # the first try of a number of rows may compile
            prompts = [{"prompt_token_ids": [random.randrange(300, 8000) for _ in range(prompt)]} for _ in range(count)]
            named = [adapters[number % len(adapters)] for number in range(count)] if adapters else None
            began = time.perf_counter()
            done = llm.generate(prompts, params, use_tqdm=False, lora_request=named)
            seconds = time.perf_counter() - began
            assert all(len(each.outputs[0].token_ids) == output for each in done)
            best = max(best, count * output / seconds)
        found.append(best)
    print(*found, sep="\n", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], *(int(word) for word in sys.argv[4:]))
