"""Generate in process, with no server: python examples/generate.py [MODEL_DIR]"""

import sys

from jaxserve import Engine, SamplingParams


def main() -> None:
    prompts = ["Once upon a time", "The capital of France is", "One, two, three,"]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32, n=2)
    with Engine(sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=8) as engine:
        answers = engine.generate(prompts, params)
    for prompt, completions in zip(prompts, answers, strict=True):
        print(f"{prompt!r}")
        for completion in completions:
            print(f"  [{completion.finish_reason}] {completion.text!r}")


if __name__ == "__main__":
    main()
