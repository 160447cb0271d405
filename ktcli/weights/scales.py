"""What a conversion must know of a checkpoint's scales before it writes anything.

A weight that is NaN is found when it is read, which may be late in a conversion. Scales stored as powers of two
(E8M0) are few, a byte for 32 weights or more, so they are looked through first; a second read of the same
bytes, which soon after come from the page cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ktcli.errors import BadCheckpoint
from ktcli.layers.tensors import Tensor
from ktcli.weights.checkpoint import HINT
from ktcli.weights.coded import E8M0, E8M0_NAN, Coded
from ktcli.weights.encode import pieces_of
from ktcli.weights.storage import Part, Read, Reader

AT_ONCE = 16 << 20  # bytes, as much as a piece of a conversion


def check_scales(tensors: Iterable[Tensor], checkpoint: Reader) -> None:
    """That no power of two among the scales of these tensors is NaN.

    Raises:
        BadCheckpoint: one is, a source is missing, or a file cannot be read.
    """
    for part in _powers_of_two(tensors, checkpoint):
        end = part.entry.offset + part.entry.size_bytes
        for offset in range(part.entry.offset, end, AT_ONCE):
            raw = checkpoint.read(Read(part.file, offset, min(AT_ONCE, end - offset)))
            if raw.max() == E8M0_NAN:
                at = offset - part.entry.offset + int(raw.argmax())
                raise BadCheckpoint(
                    f"{part.name} in {part.file} holds NaN as scale {at}", hint=HINT
                )


def _powers_of_two(tensors: Iterable[Tensor], checkpoint: Reader) -> Iterator[Part]:
    """The E8M0 scales, each once although several tensors may take their rows from one source."""
    seen: set[str] = set()
    for tensor in tensors:
        for piece in pieces_of(tensor, checkpoint):
            for index in range(tensor.count if "{e}" in piece.name else 1):
                source = checkpoint.find(piece.at(index))
                if source.name in seen or not isinstance(source.storage, Coded):
                    continue
                seen.add(source.name)
                yield from (part for part in source.parts[1:] if part.entry.dtype in E8M0)
