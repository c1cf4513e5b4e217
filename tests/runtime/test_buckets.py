import pytest

from jaxserve.runtime.buckets import fit, make_buckets


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (3, 40), (64, 512), (2048, 512), (512, 8192), (100, 777)])
def test_every_count_has_a_bucket(platform: str, seqs: int, tokens: int) -> None:
    buckets = make_buckets(seqs, tokens, platform=platform)
    assert (buckets.decode[-1], buckets.head[-1], buckets.max_tokens) == (seqs, seqs, max(seqs, tokens))
    for family in buckets.families().values():
        assert list(family) == sorted(set(family))
        for count in range(1, family[-1] + 1):
            assert fit(family, count) >= count


@pytest.mark.parametrize(("platform", "seqs", "tokens"), [("cpu", 64, 512), ("gpu", 512, 8192), ("tpu", 512, 8192)])
def test_the_defaults_keep_the_number_of_programs_small(platform: str, seqs: int, tokens: int) -> None:
    families = make_buckets(seqs, tokens, platform=platform).families()
    assert sum(map(len, families.values())) <= (18 if platform == "cpu" else 30)


def test_deterministic_mode_has_no_decode_programs() -> None:
    assert make_buckets(8, 64, platform="cpu", deterministic=True).decode == ()


def test_above_the_largest_is_an_error() -> None:
    with pytest.raises(ValueError, match="9 is above the largest bucket, 8"):
        fit((1, 8), 9)
