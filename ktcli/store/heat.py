"""Heat maps, which count how often each expert of each layer was chosen in chats with a model.

    KT_HOME/heat/NAME.json     {"kt_heat": 1, "tokens": T, "counts": [[...], ...]}

A model has one, which all its conversions share: the formats of the weights hardly change the choices. It
stays when a conversion is removed, and goes with the model (`removal.forget`). Where one's own library has none, that
of a further library is read, and what is counted is added to a map of one's own. A map is
advice on where to place experts and nothing else: one that is damaged or of another shape counts as
none, and one that cannot be written is no error. Old counts fade, so that the map follows use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktcli import config, manifest, smallfiles
from ktcli.errors import KtError
from ktcli.records import dataclass
from ktcli.store import places

# All counts are halved as often as a map stands for more tokens than this. With 8 of 256 experts per
# token, one that is chosen a tenth as often as the others then still has 400 to 800 hits; somebody who
# computes 10,000 tokens a day forgets half of an old habit within two weeks.
FADE_TOKENS = 1 << 18
MAX_BYTES = 4 << 20  # twenty times the largest map so far (Kimi-K2: 60 layers of 384 experts)
_MAX_TOKENS = 1 << 40  # far above what is written; sums of counts up to it stay inside int64
WAIT_S = 5.0  # whoever holds the lock writes a map, in milliseconds
_VERSION = 1
_FOLDER = "heat"

I64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Heat:
    """The numbers of times that experts were chosen.

    Attributes:
        counts: the choices of each expert, [MoE layers, E] int64, none larger than `tokens`.
        tokens: the number of tokens that were counted, as far as they have not faded.
    """

    counts: I64Array
    tokens: int

    @classmethod
    def of(cls, counts: I64Array, top_k: int) -> Heat:
        """Returns the heat map of fresh counts, [MoE layers, experts], where every layer chose `top_k` experts for each
        token. The number of tokens is derived: the most choices of a layer divided by `top_k`, rounded up, and at least
        the highest count.
        """
        most = int(counts.sum(axis=1).max(initial=0))
        return cls(counts, max(-(-most // max(1, top_k)), int(counts.max(initial=0))))

    def __add__(self, other: Heat) -> Heat:
        return Heat(self.counts + other.counts, self.tokens + other.tokens)

    def faded(self) -> Heat:
        """Returns the heat map with all counts and the number of tokens halved, rounding down, as often as it takes for
        at most FADE_TOKENS tokens.
        """
        halvings = 0
        while self.tokens >> halvings > FADE_TOKENS:
            halvings += 1
        return Heat(self.counts >> halvings, self.tokens >> halvings)

    def hit_rate(self, share: float) -> float:
        """Returns the fraction (0 to 1) of all choices that fell on the most frequently chosen experts: the fraction
        `share` of the experts of all layers together, but at least one; 0 if nothing was counted.
        """
        ordered = np.sort(self.counts, axis=None)[::-1]
        best = max(1, round(share * ordered.size))
        return float(ordered[:best].sum() / max(1, ordered.sum()))

    def needed(self, hits: float) -> I64Array:
        """Returns, int64 [MoE layers], the least number of experts of each layer that together received at least the
        fraction `hits` (0 to 1) of the layer's choices; 0 where nothing was counted.
        """
        reached = np.cumsum(np.sort(self.counts, axis=1)[:, ::-1], axis=1)
        missing = reached < hits * reached[:, -1:]
        return np.where(reached[:, -1] > 0, missing.sum(axis=1) + 1, 0).astype(np.int64)


def path_of(model: str) -> Path:
    """Returns the path of the file with a model's heat map (how often each expert was chosen), which need not exist;
    `model` is a name from `places.model_name`.
    """
    return _folder() / f"{model}.json"


def lock(*, frees: bool = False) -> AbstractContextManager[None]:
    """Returns the context manager that locks all heat maps while one is changed; `frees`: whether one is removed."""
    what = "changing the heat map of a model"
    return smallfiles.lock(_folder() / ".lock", what, wait_s=WAIT_S, frees=frees)


def _folder() -> Path:
    return config.home() / _FOLDER


def read(
    pack: Path, shape: tuple[int, int], warn: Callable[[str], object] = lambda said: None
) -> Heat | None:
    """Returns the stored heat map (how often each expert was chosen) for the model of a pack; None if there is no
    usable one. The pack need not exist.

    Args:
        shape: the numbers of MoE layers and of experts per layer of the model.
        warn: called with a sentence that says why a map that is there is ignored.
    """
    own = path_of(places.model_name(pack))
    further = (library / _FOLDER / own.name for library in config.libraries())
    path = next(filter(Path.is_file, (own, *further)), own)
    try:
        return _parse(smallfiles.read_bounded(path, MAX_BYTES), shape)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = " ".join(str(error).split())[:100] or type(error).__name__
    warn(f"the heat map {path} is ignored: {why}")
    return None


def add(pack: Path, fresh: Heat, warn: Callable[[str], object] = lambda said: None) -> bool:
    """Adds fresh counts to the stored heat map (how often each expert was chosen) of the model of a pack; concurrent
    calls lose nothing.

    Args:
        warn: called with a sentence if the stored map is damaged or of another shape; it is then replaced.
    Returns:
        Whether the map was written: not if the model is gone, nothing was counted, or the library is read-only, full or
            busy.
    """
    layers, experts = fresh.counts.shape
    if fresh.tokens == 0:
        return False
    try:
        with lock():
            if not (pack / manifest.PACK).is_file():  # removed meanwhile
                return False
            known = read(pack, (layers, experts), warn)
            _write(
                path_of(places.model_name(pack)),
                (known + fresh if known else fresh).faded(),
            )
    except (OSError, KtError):
        return False
    return True


def _write(path: Path, heat: Heat) -> None:
    """Writes a map whole or not at all; the caller holds the lock."""
    document = {"kt_heat": _VERSION, "tokens": heat.tokens, "counts": heat.counts.tolist()}
    smallfiles.write(path, json.dumps(document, separators=(",", ":")) + "\n")


def _parse(text: bytes, shape: tuple[int, int]) -> Heat:
    try:
        document = smallfiles.json_object(text)
    except ValueError:
        document = {}
    if "kt_heat" not in document:
        raise ValueError("it is not a heat map")
    if document["kt_heat"] != _VERSION:
        raise ValueError(f"its version is {str(document['kt_heat'])[:20]}, not {_VERSION}")
    tokens, rows = document.get("tokens"), document.get("counts")
    if type(tokens) is not int or not 0 <= tokens <= _MAX_TOKENS:
        raise ValueError("its number of tokens is not a number")
    layers, experts = shape
    if type(rows) is not list or len(rows) != layers:
        raise ValueError(f"it does not have {layers} layers")
    if any(type(row) is not list or len(row) != experts for row in rows):
        raise ValueError(f"it does not have {experts} experts per layer")
    # Nobody is chosen twice by one token.
    if any(type(hits) is not int or not 0 <= hits <= tokens for row in rows for hits in row):
        raise ValueError(f"it contains values that are not counts from 0 to {tokens}")
    return Heat(np.array(rows, dtype=np.int64).reshape(shape), tokens)
