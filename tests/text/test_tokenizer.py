"""Tokenizers from data files: what is read, what is refused, and text that comes out whole."""

import base64
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from chat.fake_engine import write_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

from ktcli.answers.stream import StopStrings, Thinking
from ktcli.errors import BadCheckpoint
from ktcli.text import tiktoken
from ktcli.text.detokenizer import REPLACEMENT, Detokenizer
from ktcli.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "Hello, world!",
    "  two spaces, and a tab\t.\n\nnew paragraph",
    "naïve café 😀👩‍👩‍👧 日本語のテキスト привет",
    "x = {'a': 1}  # 1234567 it's I'LL",
    "\u200b\ufeff zero width",
    "",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def prefix_space(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Llama's kind: a space before the first word that decoding takes away, and byte fallback."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "!"]
    letters = sorted({c for text in TEXTS for c in text if c.isascii() and c.isalnum()})
    vocab = {word: id for id, word in enumerate([*words, *letters])}
    inner = Inner(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    path = tmp_path_factory.mktemp("metaspace")
    inner.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte_level", "prefix_space"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_add_up(
    kind: str, text: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    pieces = [stream.feed(id) for id in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("ranked")
    rank_file(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["byte_level", "prefix_space", "ranked"])
@given(data=st.data())
def test_pieces_of_any_ids_add_up(
    kind: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    """However broken the bytes: what is shown token by token is what the whole decodes to."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    bytes_only = [tokenizer.id_of(name) for name in ("Ġ", "ä", "¸", "Ń", "ð", "Ł", "ĺ", "Ģ")]
    if kind == "prefix_space":
        names = (0x20, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80)
        bytes_only = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in names]
    rubbish = st.lists(st.sampled_from(bytes_only), max_size=24)
    others = st.lists(st.integers(0, 402), max_size=3)
    ids = [id for part in data.draw(st.lists(rubbish | others, max_size=4)) for id in part]
    stream = Detokenizer(tokenizer)
    shown = "".join(stream.feed(id) for id in ids)
    ended = [*ids, *tokenizer.encode("!")]
    assert tokenizer.decode(ended).startswith(shown)
    whole = shown + "".join(stream.feed(id) for id in tokenizer.encode("!"))
    assert whole + stream.finish() == tokenizer.decode(ended)
    stream = Detokenizer(tokenizer)
    shown = "".join(stream.feed(id) for id in ids) + stream.finish()
    if not tokenizer.decode(ids).endswith(REPLACEMENT):
        assert shown == tokenizer.decode(ids)


def test_what_no_byte_can_finish_is_shown_at_the_end(
    byte_level: Tokenizer, prefix_space: Tokenizer
) -> None:
    """A byte that begins nothing is rubbish; one that begins a character is a character unfinished."""
    for tokenizer, first, lone in ((byte_level, "ä", "Ģ"), (prefix_space, "<0xE4>", "<0x80>")):
        begun = tokenizer.encode("a one")
        for name, said in ((first, "a one"), (lone, "a one\ufffd")):
            stream = Detokenizer(tokenizer)
            ids = [*begun, tokenizer.id_of(name)]
            assert "".join(stream.feed(id) for id in ids) + stream.finish() == said


def test_half_a_character_is_never_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab 😀")
    for cut in range(len(ids)):
        stream = Detokenizer(byte_level)
        shown = "".join(stream.feed(id) for id in ids[:cut]) + stream.finish()
        assert "ab 😀".startswith(shown)


def test_rubbish_bytes_do_not_hold_everything_back(byte_level: Tokenizer) -> None:
    rubbish = [byte_level.id_of("Ģ")] * 50  # the byte 0x80, never a character's first
    stream = Detokenizer(byte_level)
    shown = "".join(stream.feed(id) for id in [*rubbish, *byte_level.encode("end")])
    assert shown.endswith("end") and len(shown) <= 60


def test_special_tokens_are_read_and_not_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|user|>hi<|end|>")
    assert set(ids) & byte_level.special_ids and byte_level.decode(ids) == "hi"
    assert byte_level.decode(ids, special=True) == "<|user|>hi<|end|>"


def test_cutting_and_filling_are_switched_off(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text())
    document["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    document["padding"] = {
        "strategy": {"Fixed": 999}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    path.write_text(json.dumps(document))
    text = "a sentence of many more than four tokens"
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


HOSTILE = {
    "empty": b"",
    "not json": b"{",
    "a list": b"[]",
    "a number": b"1",
    "no model": b'{"version": "1.0"}',
    "no tokens": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
    "unknown model": b'{"version": "1.0", "model": {"type": "Shell", "command": "id"}}',
    "merge of nothing": b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}',
    "a panic": b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":4294967295},'
    b'"merges":[["a","b"]]}}',
    "endless merges": b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":['
    + b",".join([b'["a","b"]'] * 2_000_000)
    + b"]}}",
    "not utf-8": b"\xff\xfe\x00",
    "deep": b'{"version":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "bad pattern": b'{"version":"1.0","pre_tokenizer":{"type":"Split","pattern":{"Regex":"("},'
    b'"behavior":"Isolated","invert":false},"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_one_sentence(
    tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadCheckpoint) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
    assert capfd.readouterr() == ("", "")


LONGER = {"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 10}
ANYWHERE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "l" * 10}
TENFOLD = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 10,
           "pair": [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"], "special_tokens": {}}  # fmt: skip
BOMBS = {
    "normalizer": {"type": "Sequence", "normalizers": [LONGER] * 12},
    "decoder": {"type": "Sequence", "decoders": [ANYWHERE] * 12},
}


@pytest.mark.parametrize("part", BOMBS)
def test_rules_that_multiply_a_text(tmp_path: Path, part: str) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: BOMBS[part]}))
    with pytest.raises(BadCheckpoint, match="times longer"):
        load_tokenizer(tmp_path)


def test_rules_of_published_tokenizers_pass(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    llama = [{"type": "Prepend", "prepend": "x"}, *[spaces] * 6]
    rules = {"normalizer": {"type": "Sequence", "normalizers": llama}}
    path.write_text(json.dumps(json.loads(path.read_text()) | rules))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a   b")) == "xa b"


def test_a_text_is_not_framed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    frames = {"post_processor": {"type": "Sequence", "processors": [TENFOLD] * 6}}
    path.write_text(json.dumps(json.loads(path.read_text()) | frames))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("once")) == "once"


def test_a_pattern_that_never_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    document["pre_tokenizer"] = split
    path.write_text(json.dumps(document))
    with pytest.raises(BadCheckpoint, match="cannot encode the text"):
        load_tokenizer(tmp_path).encode("a" * 100 + "b")
    assert capfd.readouterr() == ("", "")


def test_too_large_and_missing(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="missing"):
        load_tokenizer(tmp_path)
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(3 << 30)  # sparse: no memory and no disk
    with pytest.raises(BadCheckpoint, match="larger than"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(BadCheckpoint):
        load_tokenizer(tmp_path)


# --- tiktoken ------------------------------------------------------------------------------------


def rank_file(folder: Path) -> dict[bytes, int]:
    """A rank file whose tokens overlap in many ways, with its configuration."""
    draw = random.Random(1)
    tokens = [bytes([byte]) for byte in range(256)]
    words = (
        b" the| and|in|ing|th|he|an|nd|er| t| a| th|ther|the|there|1234|12|34|\xe4\xb8|\xe4\xb8\xad"
    )
    tokens += dict.fromkeys(words.split(b"|"))
    while len(tokens) < 600:
        made = draw.choice(tokens[:300]) + draw.choice(tokens[:300])
        if made not in tokens:
            tokens.append(made)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    decoder = {
        "600": {"content": "[BOS]", "special": True},
        "602": {"content": "<|im_end|>", "special": True},
        "603": {"content": "<think>", "special": False},
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ranks


def merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Tiktoken's rule, slowly: join the neighbours whose union has the lowest rank."""
    parts = [bytes([byte]) for byte in word]
    while True:
        unions = [(ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(pairwise(parts))]
        if not unions or min(unions)[0] == 1 << 30:
            return [ranks[part] for part in parts]
        at = min(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_tiktoken_equals_the_rule(tmp_path: Path) -> None:
    regex = pytest.importorskip("regex")
    ranks = rank_file(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    pattern = regex.compile(tiktoken.KIMI, regex.V1)
    texts = [
        *TEXTS,
        "The other thing 1234567",
        "中文 and 中english中",
        "I'LL they'Re\r\n\r\n  end  ",
    ]
    for text in texts:
        want = [
            id
            for word in pattern.findall(text)
            for id in (
                [ranks[word.encode()]] if word.encode() in ranks else merged(word.encode(), ranks)
            )
        ]
        assert tokenizer.encode(text) == want
        assert tokenizer.decode(want) == text
    assert tokenizer.encode("[BOS]a<|im_end|>") == [600, ranks[b"a"], 602]
    assert tokenizer.id_of("<|reserved_token_601|>") == 601
    assert tokenizer.decode([600, 603, 602]) == "<think>"


@pytest.mark.parametrize(
    "content",
    [b"", b"YQ==", b"YQ== x", b"!!! 0", b"YQ== 0", b"YQ== 1", b"YQ== 0\nYQ== 1", b" 0", b"\n\n"],
)
def test_malformed_ranks_are_one_sentence(tmp_path: Path, content: bytes) -> None:
    rank_file(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"tiktoken\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["tokenizer.json", "tiktoken.model"])
def test_an_added_token_that_is_no_text_is_one_sentence(tmp_path: Path, kind: str) -> None:
    """JSON can hold half of a surrogate pair."""
    rank_file(tmp_path)
    name = "tokenizer_config.json"
    if kind == "tokenizer.json":
        name = kind
        write_tokenizer(tmp_path)
    document = json.loads((tmp_path / name).read_text())
    odd = {"id": 601, "content": "<\ud800>", "special": True}
    if kind == "tokenizer.json":
        document["added_tokens"].append(odd)
    else:
        document["added_tokens_decoder"]["601"] = odd
    (tmp_path / name).write_text(json.dumps(document))
    with pytest.raises(BadCheckpoint, match=rf"{name} adds the token '<\\ud800>', which is not"):
        load_tokenizer(tmp_path)


def test_an_unknown_class_is_not_run(tmp_path: Path) -> None:
    rank_file(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Evil", "auto_map": {}}')
    with pytest.raises(BadCheckpoint, match="code that kt does not run"):
        load_tokenizer(tmp_path)


# --- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("one STOP two", ["STOP"], "one "),
        ("one STO two", ["STOP"], "one STO two"),
        ("aaab", ["aab"], "a"),
        ("ends in ST", ["STOP"], "ends in ST"),
        ("a##b", ["###", "##"], "a"),
        ("nothing", [], "nothing"),
        ("x\n\nUser: y", ["\n\nUser:", ""], "x"),
    ],
)
def test_stop_strings(text: str, stops: list[str], want: str, size: int) -> None:
    stream = StopStrings(stops)
    shown = "".join(stream.feed(text[i : i + size]) for i in range(0, len(text), size))
    assert shown + stream.finish() == want


@example(text="abb", stops=["abb", "b"], cuts=[])
@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_stop_strings_do_not_depend_on_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    """Overlapping ones either: the first that is complete ends the text, of several the longest."""
    ends = [(at + len(stop), at) for stop in stops if stop and (at := text.find(stop)) >= 0]
    want = text[: min(ends)[1]] if ends else text
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stream = StopStrings(stops)
    shown = "".join(stream.feed(text[a:b]) for a, b in pairwise(edges))
    assert shown + stream.finish() == want
    assert stream.stopped == bool(ends)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_thinking(size: int) -> None:
    text = "<b><think>a < b</thin></think>c<think>d"
    stream = Thinking()
    pieces = [p for i in range(0, len(text), size) for p in stream.feed(text[i : i + size])]
    pieces += stream.finish()
    assert "".join(part for _, part in pieces) == text
    assert "".join(part for thought, part in pieces if not thought) == "<b>c"


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model trained on a few sentences, as Llama's and T5's are."""
    trainer = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp(request.param)
    text = folder / "text.txt"
    text.write_text("\n".join(TEXTS[:5] * 20 + ["the theory of the thing, then there"] * 9))
    llama = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    trainer.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        model_type=request.param,
        vocab_size=360,
        byte_fallback=True,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **(llama if request.param == "bpe" else {}),
    )
    return folder


def test_sentencepiece_equals_its_library(pieces: Path) -> None:
    import sentencepiece

    judge = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "tokenizer.model"))
    tokenizer = load_tokenizer(pieces)
    for text in [*TEXTS, "then the thing", "  the   the  ", "naïve ①ﬁ", "unseen Ωmega ☃"]:
        ids = tokenizer.encode(text)
        assert ids == judge.encode(text), text
        assert tokenizer.decode(ids) == judge.decode(ids), text
    assert {judge.bos_id(), judge.eos_id()} <= tokenizer.special_ids


def test_a_sentencepiece_config_may_add_tokens(pieces: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((pieces / "tokenizer.model").read_bytes())
    added = {"360": {"content": "[INST]", "special": True}, "361": {"content": ""}, "362": 5}
    config = {"legacy": False, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the[INST]the")
    assert tokenizer.id_of("[INST]") in tokenizer.special_ids
    plain = load_tokenizer(pieces)
    assert ids[: len(plain.encode("the"))] == plain.encode("the")
    assert tokenizer.decode(ids, special=True) == "the[INST]the"  # no space after a special token


def test_damaged_sentencepiece_files_are_refused(
    pieces: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a sentence: the library's panics say nothing on the terminal."""
    data = (pieces / "tokenizer.model").read_bytes()
    draw = random.Random(3)
    damaged = [
        data[: len(data) // 3],
        b"",
        b"\x0a",
        b"\xff" * 40,
        b"\x0a\xff\xff\xff\xff\x0f" + data,
        data + b"\x1a\x05\x12\x03abc",  # a table of characters that is none
    ]
    for _ in range(30):
        at = draw.randrange(len(data))
        damaged.append(data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :])
    for each in damaged:
        (tmp_path / "tokenizer.model").write_bytes(each)
        try:
            load_tokenizer(tmp_path).encode("the theory")
        except BadCheckpoint as error:
            assert "tokenizer.model" in str(error)
    assert capfd.readouterr().err == ""
