"""The requests that a scheduler accepts, and the events that it returns.

A request is data and never changes. Its `Answer` is the account of what became of it, which the scheduler keeps:
whoever submitted the request holds it to cancel, and finds it again in every event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum
from typing import NamedTuple

from ktcli.engine.adapters import AttachedAdapter
from ktcli.engine.constraint import Constraint, ForcedIds
from ktcli.engine.drafting import NO_DRAFTS, DraftOptions
from ktcli.engine.pooling import Pooled, PooledRows
from ktcli.engine.sampler import Sampler
from ktcli.models.pooling import PoolingMode
from ktcli.records import dataclass
from ktcli.sampling import SamplingSettings


class Finish(Enum):
    """The reason why an answer ended."""

    STOP = "stop"  # the model ended it, or a stop string appeared
    LENGTH = "length"  # --max-tokens
    CONTEXT = "context"  # no position left
    CANCELLED = "cancelled"  # Ctrl-C, or whoever asked has left
    FAILED = "failed"  # the model or the machine could not go on


@dataclass(slots=True)
class Stats:
    """The counts and times of one answer; every counted token went through the model once.

    Times are those of the steps that it took part in, with whatever else these computed.
    """

    prompt_tokens: int = 0  # the prompt's tokens, as far as it was read
    reused_tokens: int = 0  # those of them that were already in the cache
    restored: dict[str, int] = field(default_factory=dict)  # of these, what came from each store
    prompt_s: float = 0.0
    prompt_choosing_s: float = 0.0  # of it, choosing tokens, the first one
    tokens: int = 0  # the answer's tokens, without the stop token
    eval_s: float = 0.0
    choosing_s: float = 0.0  # of it, choosing tokens
    queued_s: float = 0.0  # from the request to its first step
    steps: int = 0  # those that the answer took after its first token
    drafted: int = 0  # ids that were tried before anything chose them
    accepted: int = 0  # those of them that were chosen

    @property
    def reused_by_tier(self) -> dict[str, int]:
        """The number of prompt tokens that were already cached, by the name of the tier that had them: "memory", or a
        store such as "disk".
        """
        return {"memory": self.reused_tokens - sum(self.restored.values()), **self.restored}

    def note_reused(self, tokens: int, restored: Mapping[str, int]) -> None:
        """Records that `tokens` of the prompt's tokens were cached. `restored` has the number of them that came from
        each store, by its name; these are added to the ones recorded before, up to `tokens` in all.
        """
        came, left = {**self.restored}, tokens
        for name, n in restored.items():
            came[name] = came.get(name, 0) + n
        self.reused_tokens, self.restored = tokens, {}
        for name, n in came.items():
            if n := min(n, left):
                self.restored[name], left = n, left - n

    @property
    def tokens_per_step(self) -> float:
        """The average number of answer tokens that a step gave, not counting the first token, which the prompt's step
        gives; 0: there was no other step.
        """
        return (self.steps + self.accepted) / self.steps if self.steps else 0.0

    def going_on(self, then: Stats) -> Stats:
        """Returns the statistics of this answer and of the request that continued it, `then`, added up as one answer;
        tokens that were put in between the two count as tokens of the answer.
        """
        put_in = max(0, then.prompt_tokens - self.prompt_tokens - self.tokens)
        return replace(
            self,
            tokens=self.tokens + put_in + then.tokens,
            eval_s=self.eval_s + then.prompt_s + then.eval_s,
            choosing_s=self.choosing_s + then.prompt_choosing_s + then.choosing_s,
            steps=self.steps + then.steps + bool(then.tokens),
            drafted=self.drafted + then.drafted,
            accepted=self.accepted + then.accepted,
        )

    @property
    def prefilled_tokens(self) -> int:
        """The number of prompt tokens that were computed, because they were not cached."""
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for an answer to a prompt.

    Attributes:
        prompt: the ids of the prompt, at least one.
        stop_ids: ids that end the answer and are no part of it.
        max_tokens: the most tokens of the answer; 0: the prompt is only read; None: as many as fit.
        priority: a higher one goes first, -10..10; a request that waits long rises.
        caller: whoever asks: callers of equal priority take turns.
        logprobs: the number of the likeliest tokens whose chances come with each token; None: no chances at all.
        prompt_logprobs: the same for each token of the prompt but the first, all of which is computed for it; None: no
            chances of the prompt.
        depths: how the prompt's first ids were computed, a byte for each, see `forms`; those behind were not. What was
            computed so is found again, or computed again in the same form of latent attention.
        said: the prompt's last ids that belong to the answer, which another request began: penalties count them so.
        salt: what is computed is shared with requests of the same salt only.
        adapter: whose updates the rows get; None: that of all sequences of the engine, if there is one.
        marks: positions of the prompt from which other prompts will probably go on, see `Sequence.adopt`.
        shared: the prompt's first ids with which other conversations begin, too: where layers keep states only these
            may be expanded, see `forms`. All requests of a conversation say the same.
        ends: called with each id of the answer, in order; true: the answer ends with it, as at a stop string.
        draft: what may be tried beside the next token; the answer is the same with drafts and without.
        constraint: what the answer may be, from its first id on; of this request alone. None: anything.
        forced: the ids that the answer has to be, where there is no constraint; None: any.
        pooled: the hidden rows of the prompt that are wanted of an embedding model, instead of an answer; None: an
            answer is.
        min_tokens: the tokens of the answer before which no stop id is chosen, those `said` included; only without a
            constraint.
        persist: whether its pages are written to every store at once, when the prompt is read and at the end.
    """

    prompt: Sequence[int]
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_ids: Collection[int] = ()
    max_tokens: int | None = None
    priority: int = 0
    caller: str = ""
    logprobs: int | None = None
    depths: bytes = b""
    said: int = 0
    salt: str = ""
    adapter: AttachedAdapter | None = None
    marks: Sequence[int] = ()
    shared: int = 0
    ends: Callable[[int], bool] = lambda id: False
    draft: DraftOptions = NO_DRAFTS
    constraint: Constraint | None = None
    forced: ForcedIds | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    pooled: PooledRows | None = None
    persist: bool = False

    @property
    def needs_rows(self) -> bool:
        """Whether the request asks for log-probabilities or hidden rows of prompt tokens before the last, so that all
        prompt tokens are computed.
        """
        pools = self.pooled is not None and self.pooled.mode is not PoolingMode.LAST
        return pools or self.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could come next.

    Attributes:
        logprob: the logarithm of its chance under the model itself, before any setting changed it, nats.
    """

    id: int
    logprob: float


@dataclass(eq=False, slots=True)
class Answer:
    """The state of one request: its answer so far, and how it ended.

    Attributes:
        number: the age: requests are numbered as they come.
        since: the step at which it began to wait.
        ids: the ids of the answer so far.
        finish: the reason why it ended; None: it has not.
        cancelled: whether it is to end at the next step; any thread may set it.
        depths: how the prompt's ids were computed, once it is read, see `Sequence.depths`.
        goes_on: whether it is the rest of an answer that had its turn: nobody else's comes before it.
        pooled: the hidden rows of the prompt, where they are wanted instead of an answer.
    """

    request: GenerationRequest
    number: int
    sampler: Sampler
    stats: Stats = field(default_factory=Stats)
    ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    cancelled: bool = False
    since: int = 0
    depths: bytes = b""
    goes_on: bool = False
    pooled: Pooled | None = field(init=False)

    def __post_init__(self) -> None:
        self.pooled = None if self.request.pooled is None else Pooled(self.request.pooled)

    def cancel(self) -> None:
        """Asks the scheduler to end the answer at its next step; has no effect if the answer has ended."""
        self.cancelled = True


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The event that part of the prompt was read: `done` of the `total` tokens that were not in the cache.

    Attributes:
        chances: the tokens behind those that were read, with their chances, if they were asked for.
    """

    answer: Answer
    done: int
    total: int
    chances: tuple[Token, ...] = ()


class Token(NamedTuple):
    """The event of the next id of an answer.

    Attributes:
        chosen: the id's chance, if chances were asked for.
        likeliest: the likeliest ids, best first, as many as were asked for.
        how: how the id will be computed, see `forms`.
    """

    answer: Answer
    id: int
    chosen: Candidate | None = None
    likeliest: tuple[Candidate, ...] = ()
    how: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer; each answer has exactly one.

    Attributes:
        error: the reason of FAILED.
    """

    answer: Answer
    finish: Finish
    error: Exception | None = None


Event = PromptRead | Token | Finished
