"""vLLM's side: run closed batches in process. It runs in an environment of its own.

    python peer.py MODEL_DIR DTYPE PROMPT_TOKENS OUTPUT_TOKENS TRIES ROWS...

Prints the output tokens a second of the best try of each number of rows, the last lines of its output. The prefix
cache is off: no two prompts are alike.
"""

import random
import sys
import time

from vllm import LLM, SamplingParams


def main(model: str, dtype: str, prompt: int, output: int, tries: int, *rows: int) -> None:
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=2 * (prompt + output),
        max_num_seqs=max(rows),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    found = []
    for count in rows:
        best = 0.0
        for _ in range(tries + 1):  # the first try of a number of rows may compile
            prompts = [{"prompt_token_ids": [random.randrange(300, 8000) for _ in range(prompt)]} for _ in range(count)]
            began = time.perf_counter()
            done = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            assert all(len(each.outputs[0].token_ids) == output for each in done)
            best = max(best, count * output / seconds)
        found.append(best)
    print(*found, sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(word) for word in sys.argv[3:]))
