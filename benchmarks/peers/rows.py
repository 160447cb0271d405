"""What is measured: which engine, which model, which bits, and the ratio that is the goal.

A pairing is two loaded engines, kt's and a peer's; its works are measured one after the other without
loading anything again. Pairings with the same kt engine stand together, so that kt loads once for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to do from an empty cache: `decode` one token after the other, or `prefill` at once.

    Attributes:
        n_tokens: of each stream.
        by_layer: also on the smaller cut of the model, for the time of a layer.
        streams: the sequences that are decoded together, a token of each in a step.
    """

    kind: str
    n_tokens: int
    by_layer: bool = False
    streams: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind} {self.n_tokens}" + (f" x {self.streams}" if self.streams > 1 else "")

    @property
    def all_tokens(self) -> int:
        """The tokens of all streams."""
        return self.n_tokens * self.streams


DECODE = Work("decode", 128)
STREAMS = Work("decode", 32, streams=8)
PREFILL = (Work("prefill", 512, by_layer=True), Work("prefill", 1024))


@dataclass(frozen=True, slots=True)
class Kt:
    """kt's side.

    Attributes:
        experts, dense: names of kt's number formats.
        isa: row of kernels to force; None: the best this CPU has.
    """

    experts: str
    dense: str
    isa: str | None = None

    @property
    def name(self) -> str:
        return f"{self.experts} on {self.isa}" if self.isa else self.experts


@dataclass(frozen=True, slots=True)
class Pairing:
    """kt and a peer on one model.

    Attributes:
        engine: name of the peer, see `engines.ENGINES`.
        mix: number formats of the peer's file, see `shapes.MIXES`.
        layers: of the large and of the small cut. The large one gives the speeds; the difference of
            both is the time of a layer. Peers compute the last layer of a prompt for its last token
            only, so that a raw prompt speed counts one layer too many for them.
        goals: works to do, and the least ratio wanted of each; None: for information.
    """

    model: str
    layers: tuple[int, int]
    kt: Kt
    engine: str
    mix: str
    goals: dict[Work, float | None] = field(default_factory=dict)

    def name(self, work: Work) -> str:
        """What `--only` looks at."""
        return f"{work.name} {self.model} {self.kt.name} against {self.engine} {self.mix}"

    @property
    def streams(self) -> int:
        """The most sequences that some work decodes together."""
        return max(work.streams for work in self.goals)

    def only(self, words: tuple[str, ...], skipped: tuple[str, ...] = ()) -> Pairing:
        """With the works whose names hold every word and none of those skipped."""
        kept = {
            work: goal
            for work, goal in self.goals.items()
            if all(word in self.name(work) for word in words)
            and not any(word in self.name(work) for word in skipped)
        }
        return replace(self, goals=kept)


def _goals(decode: float | None = None, prefill: float | None = None) -> dict[Work, float | None]:
    """Both kinds of work."""
    return {DECODE: decode, **dict.fromkeys(PREFILL, prefill)}


_QWEN, _DEEPSEEK = "qwen3-30b-a3b", "deepseek-v2-lite"
_INT4, _INT8, _BF16 = Kt("int4", "int8"), Kt("int8", "int8"), Kt("bf16", "bf16")
_NL4 = Kt("nl4-s8", "int8")
_AVX2 = Kt("int4", "int8", isa="avx2")
_AVX2_INT8 = Kt("int8", "int8", isa="avx2")
_SHORT = PREFILL[0]

PAIRINGS = (
    Pairing(_QWEN, (8, 2), _INT4, "llama.cpp", "Q4_0", {**_goals(1.25, 5.0), STREAMS: 1.3}),
    Pairing(_QWEN, (8, 2), _INT4, "ik_llama", "Q4_0", {**_goals(1.10, 2.0), STREAMS: None}),
    Pairing(_QWEN, (8, 2), _INT4, "ik_llama", "Q4_K_M", {DECODE: 1.10, _SHORT: None}),
    # 4.25 bits on both sides, from codebooks.
    Pairing(_QWEN, (8, 2), _NL4, "llama.cpp", "IQ4_XS", {DECODE: 1.2, _SHORT: None}),
    Pairing(_QWEN, (8, 2), _NL4, "ik_llama", "IQ4_XS", {DECODE: 1.2, _SHORT: None}),
    # 4.5 bits on both sides to the last bit; kt's own default has 4.25.
    Pairing(_QWEN, (8, 2), Kt("int4-g32", "int8"), "llama.cpp", "Q4_0", {DECODE: None}),
    Pairing(_QWEN, (8, 2), _INT8, "llama.cpp", "Q8_0", _goals(1.25, 5.0)),
    Pairing(_QWEN, (8, 2), _INT8, "ik_llama", "Q8_0", _goals(None, 2.0)),
    # Fewer layers: two engines with eight layers of bf16 are 22 GB.
    Pairing(_QWEN, (4, 1), _BF16, "llama.cpp", "BF16", _goals(1.25, None)),
    Pairing(_QWEN, (4, 1), _BF16, "ik_llama", "BF16", _goals(None, 1.2)),
    Pairing(_QWEN, (4, 1), _BF16, "transformers", "BF16", dict.fromkeys(PREFILL, 2.0)),
    Pairing(_DEEPSEEK, (6, 2), _INT4, "llama.cpp", "Q4_0", {DECODE: 1.25, _SHORT: 5.0}),
    Pairing(_DEEPSEEK, (6, 2), _INT8, "llama.cpp", "Q8_0", {DECODE: 1.25, _SHORT: 5.0}),
    Pairing(_QWEN, (8, 2), _AVX2, "llama.cpp-avx2", "Q4_0", {_SHORT: 2.0}),
    Pairing(_QWEN, (8, 2), _AVX2_INT8, "llama.cpp-avx2", "Q8_0", {_SHORT: 2.0}),
)


def chosen(
    words: tuple[str, ...], engines: tuple[str, ...], skipped: tuple[str, ...] = ()
) -> list[Pairing]:
    """The pairings with these engines (none named: all), and their works as `Pairing.only` says."""
    return [
        kept
        for pairing in PAIRINGS
        if (not engines or pairing.engine in engines)
        and (kept := pairing.only(words, skipped)).goals
    ]
