"""Streams of text that are split: thoughts from answers, and characters from the special tokens among their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktcli.answers.stream import Thinking
from ktcli.text.codec import LibraryCodec
from ktcli.text.detokenizer import Detokenizer
from ktcli.text.tokenizer import Tokenizer, load_tokenizer


def split(text: str, size: int, *, inside: bool = False, once: bool = False) -> tuple[str, str]:
    """The thoughts of a text that comes in pieces, and the rest."""
    thinking = Thinking(inside, once)
    pieces = [p for i in range(0, len(text), size) for p in thinking.feed(text[i : i + size])]
    pieces += thinking.finish()
    assert "".join(piece for _, piece in pieces) == text
    thoughts, rest = ("".join(p for is_, p in pieces if is_ == wanted) for wanted in (True, False))
    return thoughts, rest


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "inside", "once", "thoughts"),
    [
        ("<think>a</think>b<think>c</think>d", False, False, "<think>a</think><think>c</think>"),
        ("<think>a</think>b<think>c</think>d", False, True, "<think>a</think>"),
        ("a</think>b<think>c", True, True, "a</think>"),
        ("a</think>b<think>c", True, False, "a</think><think>c"),
        ("a<think>b</think>", False, True, ""),
        ("<think>a", False, True, "<think>a"),
        ("<thing>", False, True, ""),
    ],
)
def test_thoughts_are_what_the_tags_hold_once_or_always(
    text: str, inside: bool, once: bool, thoughts: str, size: int
) -> None:
    rest = text
    for part in thoughts.replace("</think><think>", "</think>\0<think>").split("\0"):
        rest = rest.replace(part, "", 1)
    assert split(text, size, inside=inside, once=once) == (thoughts, rest)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary of letters, with tokens for single bytes and one that is special."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b"]
    vocab = {word: id for id, word in enumerate(words)}
    inner = Inner(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<s>"])
    path: Path = tmp_path_factory.mktemp("fallback")
    inner.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("a <0xE2> <s> <0x82> <s> <0xAC> b", "a€b"),  # special ones are none of the text's
        ("a <0xE2> <0x82> <s>", "a"),  # bytes are missing, whatever follows
        ("<s> <0xE2> <s>", ""),
        ("a <s> b <s>", "ab"),
    ],
)
def test_special_tokens_settle_no_bytes(fallback: Tokenizer, tokens: str, text: str) -> None:
    stream = Detokenizer(fallback)
    ids = [id for token in tokens.split() if (id := fallback.id_of(token)) is not None]
    assert len(ids) == len(tokens.split())
    pieces = [stream.feed(id) for id in ids]
    assert "".join(pieces) + stream.finish() == text


def test_a_token_that_is_plain_text_takes_no_place_of_another() -> None:
    """The ids of added tokens are counted from the vocabulary's end, also from one that is not to be found."""
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Inner

    inner = Inner(models.BPE(vocab={"a": 0, "<": 1, "s": 2, ">": 3}, merges=[], unk_token="a"))
    inner.add_special_tokens([AddedToken(f"<{letter}>") for letter in "stu"])
    codec = LibraryCodec(inner)
    first, second, third = (codec.id_of(f"<{letter}>") for letter in "stu")
    assert first == 4 and None not in (second, third)
    assert codec.encode_plain(["a<s><t><u>"], [first]) == [[0, 1, 2, 3, second, third]]
    assert codec.encode_plain(["<s><t><u>"], []) == [[first, second, third]]
