import pytest

from jaxserve.runtime.compilation.buckets import fit, make_buckets


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("parameters", [3_000_000, 8_000_000_000])
@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (3, 40), (64, 512), (2048, 512), (512, 8192), (100, 777)])
def test_every_count_has_a_bucket(platform: str, parameters: int, seqs: int, tokens: int) -> None:
    buckets = make_buckets(seqs, tokens, platform=platform, num_parameters=parameters)
    assert (buckets.decode[-1], buckets.head[-1], buckets.max_tokens) == (seqs, seqs, max(seqs, tokens))
    assert buckets.decode_hidden[-1] == seqs
    for family in buckets.by_program().values():
        assert list(family) == sorted(set(family))
        for count in range(1, family[-1] + 1):
            assert fit(family, count) >= count


@pytest.mark.parametrize(
    ("platform", "parameters", "seqs", "tokens", "most"),
    [("cpu", 3_000_000, 64, 512, 19), ("cpu", 10**9, 64, 512, 24), ("gpu", 10**10, 512, 8192, 34)],
)
def test_the_defaults_keep_the_number_of_programs_small(
    platform: str, parameters: int, seqs: int, tokens: int, most: int
) -> None:
    families = make_buckets(seqs, tokens, platform=platform, num_parameters=parameters).by_program()
    assert sum(map(len, families.values())) <= most


def test_deterministic_mode_has_no_decode_programs() -> None:
    buckets = make_buckets(8, 64, platform="cpu", num_parameters=1, deterministic=True)
    assert buckets.decode == buckets.decode_hidden == () and buckets.extend[0] == 1


def test_deterministic_mode_has_one_shape_on_an_accelerator() -> None:
    buckets = make_buckets(100, 128, platform="gpu", num_parameters=10**10, deterministic=True)
    assert (buckets.decode, buckets.extend, buckets.head) == ((), (128,), (100,))


def test_above_the_largest_is_an_error() -> None:
    with pytest.raises(ValueError, match="9 is above the largest bucket, 8"):
        fit((1, 8), 9)


@pytest.mark.parametrize("parameters", [3_000_000, 8_000_000_000])
def test_a_prompt_is_never_padded_to_more_than_twice_its_length(parameters: int) -> None:
    extend = make_buckets(64, 512, platform="cpu", num_parameters=parameters).extend
    assert all(fit(extend, count) < 2 * count for count in range(17, 513))


@pytest.mark.parametrize(("platform", "deterministic"), [("cpu", False), ("cpu", True), ("gpu", False)])
@pytest.mark.parametrize(("seqs", "tokens"), [(1, 512), (3, 40), (64, 512), (512, 8192)])
def test_steps_with_drafts(seqs: int, tokens: int, deterministic: bool, platform: str) -> None:
    """Few sizes, each a size of the forward pass too, and one for a single row with all of its drafts."""
    buckets = make_buckets(
        seqs, tokens, platform=platform, num_parameters=10**9, deterministic=deterministic, max_drafts=7
    )
    assert set(buckets.verify) <= set(buckets.decode_hidden) and 8 in buckets.verify
    assert len(buckets.verify) <= 8 and max(buckets.verify) <= tokens
