"""Matchers: what they allow, when they begin and end, rollback, errors, and many rows at once."""

import json
import random
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE, Unigram

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.matcher import BitmaskFiller, CachedGrammar, GrammarCache, GrammarMatcher, MatcherFactory
from jaxserve.grammar.translate import choice_spec, schema_spec
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import GrammarSpec, grammar_spec

from .hostile import many_hostile

OBJECT = schema_spec({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, strict=True)
WORDS = 10  # 320 tokens


def mask(matcher: GrammarMatcher, num_words: int = WORDS) -> set[int]:
    row = np.full(num_words, -1, np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def feed(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> bool:
    """Every token must be allowed by the mask and accepted."""
    for token in tokenizer.encode(text, add_special_tokens=False):
        allowed = token in mask(matcher)
        assert allowed == matcher.accept(token)
        if not allowed:
            return False
    return True


@pytest.mark.parametrize("spec, good, bad", [
    (OBJECT, '{"a": 12}', '{"b"'),
    (GrammarSpec(kind="json_object", source=""), '{"x": [1, {}], "y": null}', "[1]"),
    (GrammarSpec(kind="regex", source="^a+b?$"), "aaab", "ba"),
    (choice_spec(["yes", 'n"o']), 'n"o', "maybe"),
    (choice_spec(["a", "ab", "abc", ""]), "ab", "ac"),
    (choice_spec(["same"] * 4096), "same", "some"),
    (choice_spec(["a\x7f\x00"]), "a\x7f\x00", "ab"),
    (choice_spec([f"choice {i:04}" for i in range(4096)]), "choice 4095", "choice 4096"),
    (grammar_spec('root ::= "x" digit+\ndigit ::= [0-9]'), "x12", "xy"),
    (grammar_spec('start: "x" DIGIT+\nDIGIT: /[0-9]/'), "x12", "xy"),
    (schema_spec(True), '[true, "é"]', "x"),
])  # fmt: skip
def test_kinds(factory: MatcherFactory, tokenizer: Tokenizer, spec: GrammarSpec, good: str, bad: str) -> None:
    matcher = factory(spec)
    assert feed(matcher, tokenizer, good)
    assert matcher.is_accepting and tokenizer.eos_token_ids[0] in mask(matcher)
    refused = factory(spec)
    assert not feed(refused, tokenizer, bad)
    assert refused.error and not refused.is_terminated


def test_the_end(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.eos_token_ids
    matcher = factory(GrammarSpec(kind="regex", source="ab?"))
    assert eos not in mask(matcher) and not matcher.is_accepting
    assert feed(matcher, tokenizer, "a")
    assert eos in mask(matcher) and not matcher.is_terminated
    ended = factory(GrammarSpec(kind="regex", source="ab?"))
    assert feed(ended, tokenizer, "a") and ended.accept(eos) and ended.is_terminated
    full = factory(GrammarSpec(kind="regex", source="xy"))
    assert feed(full, tokenizer, "xy") and full.is_terminated and mask(full) == {eos}


def test_an_empty_choice_ends_at_once(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.eos_token_ids
    assert mask(factory(choice_spec([""]))) == {eos}
    assert {eos} < mask(factory(choice_spec(["", "a"])))


def test_padding_of_the_vocabulary_is_never_allowed(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    allowed = mask(factory(GrammarSpec(kind="regex", source="(.|\n)*")))
    assert allowed and max(allowed) < tokenizer.vocab_size
    assert not allowed & (tokenizer.special_ids - set(tokenizer.eos_token_ids))


def test_added_tokens_that_the_model_lacks_are_no_hindrance(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    backend = Backend.from_str(tokenizer.to_json())
    backend.add_special_tokens(["[PAD]"])  # without a row of the model's table
    larger = Tokenizer(backend, tokenizer.config)
    assert larger.vocab_size == size + 1
    own = MatcherFactory(larger.to_json(size), vocab_size=size, eos_token_ids=tokenizer.eos_token_ids)
    allowed = mask(own(choice_spec(["yes"])), -(-size // 32))
    assert [tokenizer.decode([i]) for i in allowed] == ["y"]


def test_a_vocabulary_with_gaps(tokenizer: Tokenizer) -> None:
    """Its largest ids, above the number of its tokens, are tokens of masks, ends and log-probabilities too."""
    data, largest = json.loads(tokenizer.to_json()), tokenizer.vocab_size + 40
    data["model"]["merges"] = []
    moved, data["model"]["vocab"]["a"] = data["model"]["vocab"]["a"], largest
    gapped = Tokenizer(Backend.from_str(json.dumps(data)), tokenizer.config, extra_eos_ids=[largest])
    assert gapped.token_bytes(largest) == b"a" and gapped.token_bytes(moved) == b""
    assert gapped.eos_token_ids == (*tokenizer.eos_token_ids, largest)
    for size in (largest + 1, largest + 60):
        own = MatcherFactory(gapped.to_json(size), vocab_size=size, eos_token_ids=tokenizer.eos_token_ids)
        assert mask(own(choice_spec(["ax"])), -(-size // 32)) == {largest}


def test_begins_after_the_reasoning(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    (close,) = tokenizer.encode("</think>")
    (eos,) = tokenizer.eos_token_ids
    spec = GrammarSpec(kind=OBJECT.kind, source=OBJECT.source, begin_after=(close,))
    matcher = factory(spec)
    assert len(mask(matcher)) == 32 * WORDS - 1 and eos not in mask(matcher)
    assert feed(matcher, tokenizer, "anything } at all</think>")
    assert matcher.in_grammar and mask(matcher) < set(range(tokenizer.vocab_size))
    assert feed(matcher, tokenizer, '{"a": 1}') and matcher.is_terminated
    apart = factory(spec)  # the same text in other tokens
    assert all(apart.accept(tokenizer.encode(char)[0]) for char in "x</think>")
    assert apart.in_grammar


@pytest.mark.parametrize("marker", ["x{", "{"])
def test_no_token_carries_text_over_the_marker(factory: MatcherFactory, tokenizer: Tokenizer, marker: str) -> None:
    """A token `{"`: its quote would be in front of all that the grammar sees."""
    begin, (over,) = tuple(tokenizer.encode(marker)), tokenizer.encode('{"')
    matcher = factory(GrammarSpec(kind="regex", source="[a-z]+", begin_after=begin))
    assert (over in mask(matcher)) == (marker == "x{"), "harmless where it does not complete the marker"
    assert feed(matcher, tokenizer, marker[:-1])
    assert over not in mask(matcher) and tokenizer.encode("{")[0] in mask(matcher)
    assert feed(matcher, tokenizer, "{") and matcher.in_grammar and feed(matcher, tokenizer, "abc")
    for source, fits in (("[a-z]+", False), ('"[a-z]+', True)):
        given = factory(GrammarSpec(kind="regex", source=source, begin_after=begin))
        assert feed(given, tokenizer, marker[:-1])
        assert given.accept(over) == fits and (given.error is None) == fits, "fed to the grammar all the same"
        assert not fits or (feed(given, tokenizer, "abc") and given.is_accepting)


def test_a_marker_of_text_and_a_special_token_is_not_missed(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    """gpt-oss would write `<|channel|>final <|constrain|>json<|message|>`, and then could never end."""
    begin = tuple(tokenizer.encode("[TOOL_CALLS]final<tool_call>"))
    matcher = factory(GrammarSpec(kind=OBJECT.kind, source=OBJECT.source, begin_after=begin))
    assert feed(matcher, tokenizer, "[TOOL_CALLS]analysis<tool_call>hm, final, [TOOL_CALLS]fina")
    assert len(mask(matcher)) > 300
    assert feed(matcher, tokenizer, "l") and mask(matcher) == {begin[-1]}
    assert feed(matcher, tokenizer, '<tool_call>{"a": 1}') and matcher.is_terminated


def test_the_first_token_may_open_the_reasoning(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    begin, close = tokenizer.encode("<think>")[0], tokenizer.encode("</think>")[0]
    spec = GrammarSpec(kind=OBJECT.kind, source=OBJECT.source, begin_after=(close,), begin_unless=(begin,))
    thinking, direct = factory(spec), factory(spec)
    assert begin in mask(thinking) and tokenizer.encode("x")[0] not in mask(thinking)
    assert feed(thinking, tokenizer, '<think>hm</think>{"a": 1}') and thinking.is_terminated
    assert feed(direct, tokenizer, '{"a": 1}') and direct.is_terminated
    assert not factory(spec).accept(close)


@pytest.mark.parametrize("reasoning", [False, True])
def test_rollback_equals_never_having_gone(factory: MatcherFactory, tokenizer: Tokenizer, reasoning: bool) -> None:
    close = tuple(tokenizer.encode("</think>"))
    spec = GrammarSpec(kind=OBJECT.kind, source=OBJECT.source, begin_after=close if reasoning else ())
    tokens = tokenizer.encode(("hm</think>" if reasoning else "") + '{"a": 123}', add_special_tokens=False)
    masks = []
    straight = factory(spec)
    for token in tokens:
        masks.append(mask(straight))
        straight.accept(token)
    for back in range(1, len(tokens) + 1):
        matcher = factory(spec)
        assert all(matcher.accept(token) for token in tokens)
        assert matcher.rollback(back)
        for token, expected in zip(tokens[-back:], masks[-back:], strict=True):
            assert mask(matcher) == expected and matcher.accept(token)
        assert not matcher.rollback(len(tokens) + 1)


def test_an_error_stays_with_its_request(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    broken, healthy = factory(OBJECT), factory(OBJECT)
    assert not broken.accept(tokenizer.encode("x")[0]) and broken.error
    assert not broken.accept(tokenizer.encode("{")[0]) and not broken.rollback(1)
    mask(broken)  # does not raise
    assert feed(healthy, tokenizer, '{"a": 1}')
    assert factory(OBJECT).error is None


def test_a_limit_is_told_from_a_wrong_token(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    (spec,) = [spec for spec in many_hostile(200)[::8] if spec.source.startswith("start: r0\nr0: r33 r65")]
    explosive = factory(spec)
    mask(explosive)
    assert not explosive.accept(tokenizer.encode("x")[0])
    assert "Too many items" in (explosive.limit_error or "")
    wrong = factory(OBJECT)
    assert not wrong.accept(tokenizer.encode("x")[0]) and wrong.error and wrong.limit_error is None


def test_rows_in_parallel_equal_rows_alone(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    after = GrammarSpec(kind=OBJECT.kind, source=OBJECT.source, begin_after=tuple(tokenizer.encode("</think>")))
    specs = [OBJECT, GrammarSpec(kind="regex", source="[ab]{3}"), choice_spec(["true", "12"]), after]
    matchers = [factory(specs[i % 4]) for i in range(12)]
    rng, filler = random.Random(0), BitmaskFiller(2)
    for _ in range(6):
        rows = list(range(12))
        rng.shuffle(rows)
        bitmask = np.full((14, WORDS), -1, np.int32)
        filler.fill(list(zip(matchers, rows, strict=True)), bitmask)
        for matcher, row in zip(matchers, rows, strict=True):
            alone = np.full(WORDS, -1, np.int32)
            matcher.fill(alone)
            assert (bitmask[row] == alone).all()
            if not matcher.is_terminated:
                bits = np.unpackbits(alone.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
                matcher.accept(int(rng.choice(np.flatnonzero(bits).tolist())))
        assert (bitmask[12:] == -1).all()


def test_cached_grammars_are_independent_and_bounded(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    one, two = factory(OBJECT), factory(OBJECT)
    feed(one, tokenizer, '{"a": 1}')
    assert not two.is_accepting and feed(two, tokenizer, '{"a": 2}')
    for n in range(200):
        factory(choice_spec([str(n)]))
    assert len(factory._cache) <= 64


def test_a_grammar_with_slow_masks_is_known_to_its_next_outputs(factory: MatcherFactory) -> None:
    spec = choice_spec(["slow", "grammar"])
    first = factory(spec)
    assert not first.was_slow
    first._grammar.charge(2 * CachedGrammar.SLOW)
    assert factory(spec).was_slow and not factory(choice_spec(["another"])).was_slow
    for _ in range(CachedGrammar.NUM_QUICK):
        first._grammar.charge(CachedGrammar.SLOW / 2)
    assert not factory(spec).was_slow


def test_a_grammar_whose_lexer_is_full_is_compiled_anew() -> None:
    """The copies of a grammar share a lexer that only grows: a few outputs fill it, for whoever asks next."""
    tokenizer = Tokenizer.from_directory(Path(str(files("jaxserve") / "assets" / "demo")))
    own = MatcherFactory(tokenizer.to_json(), vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    spec, rng = GrammarSpec(kind="regex", source=r"(.|\n)*[a-m](.|\n){301}[0-9]"), random.Random(0)
    innocent = own(spec)
    row = np.full(-(-tokenizer.vocab_size // 32), -1, np.int32)
    while (matcher := own(spec)).limit_error is None:
        for _ in range(250):
            row[:] = -1
            matcher.fill(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            if matcher.limit_error or not matcher.accept(int(rng.choice(np.flatnonzero(bits).tolist()[:-8]))):
                break
        if matcher.limit_error:
            break
    assert "too many states" in (matcher.limit_error or "")
    innocent.fill(row)
    assert innocent.limit_error, "the old lexer is still full"
    again = own(spec)
    row[:] = -1
    again.fill(row)
    assert again.limit_error is None and again.accept(tokenizer.encode("a")[-1])


def test_the_cache_is_bounded_by_bytes(factory: MatcherFactory) -> None:
    base = factory(OBJECT).ll
    cache = GrammarCache(max_entries=100, max_bytes=100_000_000)
    for n in range(20):
        grammar = CachedGrammar(base, "x" * 1000, 0.001)
        cache.put(("regex", str(n)), grammar)
        for _ in range(200):
            grammar.charge(0.002)  # a mask that added states to the lexer
            grammar.charge(0.0001)  # and one that did not
        assert cache.get(("regex", str(n))) is grammar and cache.num_bytes <= 100_000_000
    assert len(cache) == 2, "each is 41 MB by now"
    assert cache.get(("regex", "0")) is None


def test_threads(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    own = MatcherFactory(tokenizer.to_json(), vocab_size=320, eos_token_ids=tokenizer.eos_token_ids)
    own.warm_up().result(timeout=30)
    assert feed(own.submit(OBJECT).result(timeout=30), tokenizer, '{"a": 1}')
    with pytest.raises(InvalidSchemaError):
        own.submit(GrammarSpec(kind="regex", source="(")).result(timeout=30)
    own.close()


def sample(matcher: GrammarMatcher, tokenizer: Tokenizer, rng: random.Random, limit: int = 400) -> str | None:
    """A random text that the grammar allows; None if it does not come to an end."""
    (eos,) = tokenizer.eos_token_ids
    tokens: list[int] = []
    while not matcher.is_terminated and len(tokens) < limit:
        allowed = sorted(mask(matcher))
        token = eos if eos in allowed and rng.random() < 0.5 else rng.choice(allowed)
        assert matcher.accept(token)
        if token == eos:
            break
        tokens.append(token)
    return tokenizer.decode(tokens) if matcher.is_terminated else None


def test_white_space_is_bounded(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    matcher = factory(OBJECT)
    assert feed(matcher, tokenizer, "{" + " " * 32)
    assert not feed(matcher, tokenizer, " ")
    pretty = json.dumps({"a": 1}, indent=8)
    assert feed(factory(OBJECT), tokenizer, pretty)
    rng = random.Random(1)
    for _ in range(20):
        text = sample(factory(OBJECT), tokenizer, rng)
        assert text is None or set(json.loads(text)) == {"a"}


def written(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str, size: int) -> list[int]:
    """Return the tokens of `text`, of which each is the longest that the mask allows and that continues it."""
    rest, ids = text.encode(), []
    specials = tokenizer.special_ids | special_tokens(tokenizer).keys()
    while rest:
        allowed = mask(matcher, -(-size // 32))
        found = [i for i in allowed if (data := tokenizer.token_bytes(i)) and rest.startswith(data)]
        best = max((i for i in found if i not in specials), key=lambda i: len(tokenizer.token_bytes(i)), default=None)
        assert best is not None and not specials & set(found), (text, rest, found)
        assert matcher.accept(best), (text, rest, matcher.error)
        ids.append(best)
        rest = rest.removeprefix(tokenizer.token_bytes(best))
    return ids


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    added = {i: token.content for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
    return {i: text for i, text in added.items() if i in tokenizer.special_ids or text[0] + text[-1] == "<>"}


def spelled(tag: str) -> list[tuple[GrammarSpec, str]]:
    """Constraints whose text spells a special token, and an output of each."""
    closed = {"type": "object", "additionalProperties": False}
    return [
        (choice_spec([tag]), tag),
        (choice_spec([f"a {tag} b", "ab"]), f"a {tag} b"),
        (schema_spec({"const": f"x{tag}y"}), json.dumps(f"x{tag}y")),
        (schema_spec({"enum": [tag, f"{tag}{tag}"]}), json.dumps(tag + tag)),
        (schema_spec({"type": "string", "pattern": f"^{re.escape(tag)}[0-9]$"}), f'"{tag}7"'),
        (schema_spec({**closed, "properties": {tag: {"const": 1}}, "required": [tag]}), f'{{"{tag}": 1}}'),
        (GrammarSpec(kind="regex", source=re.escape(tag) + "+[0-9]"), f"{tag}4"),
        (grammar_spec(f'root ::= "é" {json.dumps(tag)} "x"'), f"é{tag}x"),
        (grammar_spec(f"start: {json.dumps(tag)} // <think>\n"), tag),
    ]


def check_spelled_tokens(tokenizer: Tokenizer, every: int = 1) -> None:
    size = tokenizer.vocab_size
    factory = MatcherFactory(tokenizer.to_json(), vocab_size=size, eos_token_ids=tokenizer.eos_token_ids or (0,))
    for tag in list(special_tokens(tokenizer).values())[::every]:
        for spec, text in spelled(tag):
            matcher = factory(spec)
            written(matcher, tokenizer, text, size)
            assert matcher.is_accepting, (spec.kind, text)


def test_forced_text_that_spells_a_special_token_is_written_in_ordinary_ones(tokenizer: Tokenizer) -> None:
    check_spelled_tokens(tokenizer)


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", "smollm2", "minimind", "gpt2"])
def test_forced_text_with_published_tokenizers(shared_data: Path, name: str) -> None:
    check_spelled_tokens(Tokenizer.from_directory(shared_data / "tokenizers" / name), every=9)


@pytest.mark.parametrize("model", ["unigram", "pieces"])
def test_forced_text_with_sentencepiece_vocabularies(model: str) -> None:
    """`</s>` and the unknown token are pieces of the model too, and merges may make them."""
    letters = [chr(i) for i in range(33, 127)]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, "▁", "s>", "</"]
    merges = [("s", ">"), ("<", "/"), ("</", "s>")]
    if model == "unigram":
        backend = Backend(Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, byte_fallback=True))
    else:
        vocab = {piece: i for i, piece in enumerate(pieces)}
        backend = Backend(BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    check_spelled_tokens(Tokenizer(backend, {"eos_token": "</s>", "unk_token": "<unk>"}))


def test_a_grammar_still_names_special_tokens(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    """By name or id, outside of texts, patterns and comments."""
    call = tokenizer.token_to_id("<tool_call>")
    for source in (f'start: <[{call}]> "a"', 'start: <tool_call> "a"', '// "\nstart: <tool_call> /[<]x>|a/'):
        matcher = factory(grammar_spec(source))
        assert call is not None and mask(matcher) == {call}
        assert matcher.accept(call) and feed(matcher, tokenizer, "a") and matcher.is_accepting
    with pytest.raises(InvalidSchemaError, match="<nothing>"):
        factory(grammar_spec("start: <nothing>"))
