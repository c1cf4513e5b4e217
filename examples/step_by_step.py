"""Drive the engine a step at a time and print each token's likeliest five: step_by_step.py [MODEL_DIR]"""

import math
import sys

from jaxserve import Engine, SamplingParams


def main() -> None:
    with Engine(sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=8) as engine:
        engine.add_request("Once upon a time", SamplingParams(temperature=0.0, max_tokens=12, logprobs=5))
        while engine.has_unfinished:
            for output in engine.step():
                for position in output.logprobs or []:
                    top = zip(position.top_ids, position.top_logprobs, strict=True)
                    likeliest = ", ".join(f"{engine.tokenizer.decode([t])!r} {math.exp(p):.3f}" for t, p in top)
                    print(f"{engine.tokenizer.decode([position.token_id])!r:12} <- {likeliest}")


if __name__ == "__main__":
    main()
