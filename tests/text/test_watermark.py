"""The detector alone; that it agrees with the sampler is tested beside the sampler."""

import numpy as np

from jaxserve.text.watermark import token_numbers, watermark_score


def test_chance_scores_around_zero_and_chosen_tokens_far_above() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 500, 300).tolist()
    plain = watermark_score(text, 7)
    assert plain.positions == 296 and abs(plain.z) < 4
    marked = text[:4]
    for _ in range(100):  # the best of eight candidates each time
        options = rng.integers(0, 500, 8)
        windows = np.array([[*marked[-4:], option] for option in options], np.uint32)
        marked.append(int(options[token_numbers(windows, 7).argmax()]))
    assert watermark_score(marked, 7).z > 10 and abs(watermark_score(marked, 8).z) < 4


def test_little_or_repeated_text_says_nothing() -> None:
    assert watermark_score([1, 2, 3, 4], 7) == (0, 0.0)
    assert watermark_score([5] * 400, 7).positions == 1
