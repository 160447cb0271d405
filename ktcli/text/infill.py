"""Finds a model's tokens for filling in text between two others (fill in the middle).

Models that learned it have three marks among their added tokens. The texts go between them as they are; no word of
theirs becomes a mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ktcli.records import dataclass
from ktcli.text.codec import AddedToken

# What stands before the text before, before the text behind, and before the text between. The names are those that
# llama.cpp looks for (llama-vocab.cpp); each of these models was trained with the text before first.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Granite, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
# Behind which the next file would come.
_ENDS = frozenset(
    "<|endoftext|> <|fim_pad|> <|repo_name|> <|file_sep|> <|file_separator|> <fim_pad> <fim-pad> <reponame> <filename>"
    " <file_sep>".split()
)


@dataclass(frozen=True, slots=True)
class Infill:
    """The fill-in-the-middle marks of one tokenizer.

    Attributes:
        marks: the ids before the text before, before the text behind, and before the text between.
        ends: the ids that end the text between.
    """

    marks: tuple[int, int, int]
    ends: frozenset[int]

    @classmethod
    def of(cls, added: Iterable[AddedToken]) -> Infill | None:
        """Returns the ids of the fill-in-the-middle marks among a tokenizer's added tokens; None if it has none."""
        ids = {token.text: token.id for token in added}
        for names in _MARKS:
            if all(name in ids for name in names):
                before, behind, between = (ids[name] for name in names)
                ends = {ids[name] for name in _ENDS if name in ids}
                return cls((before, behind, between), frozenset({before, behind, between, *ends}))
        return None

    def ids(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Returns the ids of a prompt that asks for the text between two others: the mark and the ids of each of the
        two, then the mark of the text between.
        """
        first, second, third = self.marks
        return [first, *before, second, *behind, third]
