"""A request in progress in the scheduler: the rest of its prompt, its next token, and the resources that it holds."""

from __future__ import annotations

import secrets
from dataclasses import field

import numpy as np

from ktcli.engine.constraint import Forcing, mask_of
from ktcli.engine.contract import Engine
from ktcli.engine.draft_length import MOST_ROWS
from ktcli.engine.drafting import Drafting
from ktcli.engine.forms import ABSORBED, How, how_to_read
from ktcli.engine.logits import Logits
from ktcli.engine.pace import PIECE_STEP
from ktcli.engine.pages import PoolFull
from ktcli.engine.pagetable import pages_for
from ktcli.engine.request import Answer, Candidate, Finish, Token
from ktcli.engine.sampler import History, chosen_id
from ktcli.engine.sequence import Sequence
from ktcli.native import PAGE_TOKENS, Run
from ktcli.native.choosing import ChosenToken, TokenChoice
from ktcli.records import dataclass

# Ids of an answer that are computed again in one step, after its pages were given back or a draft failed.
_AGAIN = MOST_ROWS
# Tokens of an answer for which there must be room before its prompt is read.
_SLICE = PAGE_TOKENS


def _even(tokens: int, most: int) -> int:
    """The first of as few equal pieces of at most `most` tokens as so many divide into."""
    if tokens <= most:
        return tokens
    equal = -(-tokens // -(-tokens // most))
    return min(most, -(-equal // PIECE_STEP) * PIECE_STEP)


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """The number of rows that a step has for the drafts of one answer.

    Attributes:
        outputs: the rows of its run that can give logits, 1 at least.
        beside: the rows of others in the step.
    """

    outputs: int = 1
    beside: int = 0


NO_DRAFT_ROOM = DraftRoom()


@dataclass(eq=False, slots=True)
class Active:
    """A request that the scheduler works on, with its sequence.

    Attributes:
        room: the most tokens of the answer.
        sequence: its timeline.
        kept: whether the timeline is the caller's, and stays.
        prompt_tokens: the tokens of the prompt.
        drafting: its drafts; None: every step computes one token.
        known: the ids of the prompt and the answer; those that the timeline has not are still to be computed.
        finish: the reason why no token follows; a kept timeline still gets the last one.
        begun: whether a step has computed anything of it since its timeline was opened.
    """

    answer: Answer
    room: int
    submitted_s: float
    sequence: Sequence
    kept: bool
    drafting: Drafting | None = None
    prompt_tokens: int = field(init=False)
    known: list[int] = field(init=False)
    finish: Finish | None = None
    begun: bool = False
    _history: History = field(init=False)
    # How the prompt's ids are computed, see `forms`; None: it was not opened yet.
    _how: How | None = None
    _found: int = 0  # the ids that were found when it was opened first
    # Start and tokens of each of the prompt.
    _chunks: list[tuple[int, int]] = field(default_factory=list)
    _forcing: Forcing | None = field(init=False)
    _salt: str = field(init=False)

    def __post_init__(self) -> None:
        request = self.answer.request
        # What others computed is found without the rows of its tokens.
        self._salt = secrets.token_hex(16) if request.needs_rows else request.salt
        self.known = list(request.prompt)
        self.prompt_tokens = len(self.known)
        counts = self.answer.sampler.settings.counts
        asked = self.prompt_tokens - request.said
        self._history = History(self.known[:asked], counts=counts)
        for id in self.known[asked:]:
            self._history.append(id)
        held = request.forced if request.constraint is None else None
        self._forcing = None if held is None else Forcing(held, request.stop_ids)
        if request.max_tokens == 0 or request.pooled is not None:
            self.finish = Finish.LENGTH  # once the prompt is read

    @property
    def reading(self) -> bool:
        """Whether some tokens of the request's prompt are still to be computed."""
        return self.sequence.length < self.prompt_tokens

    @property
    def held(self) -> bool:
        """Whether the request waits for its constraint to become ready, with its prompt computed except for the last
        id.
        """
        return self._late and self.sequence.length >= self.prompt_tokens - 1

    @property
    def _late(self) -> bool:
        constraint = self.answer.request.constraint
        return constraint is not None and not constraint.ready

    @property
    def pages_ahead(self) -> int:
        """The number of KV-cache pages that the request still needs beyond its computed positions: for all its known
        ids and up to 64 more of the answer.
        """
        return max(0, pages_for(self._ends) - pages_for(self.sequence.length))

    @property
    def windows_ahead(self) -> int:
        """The number of KV-cache pages of the layers with a sliding window that the request needs beyond those it
        holds, to go on one token at a time; a step with a longer piece of the prompt briefly takes more.
        """
        return self.sequence.windows_ahead(self._ends)

    @property
    def _ends(self) -> int:
        """Where what it knows and a first piece of what follows end."""
        return min(len(self.known) + _SLICE, self.prompt_tokens + self.room)

    def open(self, engine: Engine, *, bring: bool = True) -> None:
        """Opens the request's sequence, or opens it again: the longest prefix of the known ids whose KV-cache pages are
        in memory or on disk becomes its contents, and only the rest is still to be computed.

        Args:
            bring: whether pages may come from disk, which takes room in memory.
        """
        request, stats, pools = self.answer.request, self.answer.stats, engine.pools
        first = self._how is None
        if self._how is None:
            self._how = how_to_read(
                request.depths,
                self.prompt_tokens,
                latent=pools.latent,
                within=None if pools.states is None else request.shared,
            )
        answered = range(self.prompt_tokens, len(self.known))
        said = np.array([engine.how_at(at) for at in answered], np.uint8)
        how = np.concatenate((self._how, said))
        reused = self.sequence.adopt(
            self.known, how, request.marks, self._salt, request.adapter, bring=bring
        )
        if first:  # What was not found the first time is read without deferral, now and whenever it is read again.
            self._how[reused:] &= ABSORBED
            self._found = reused
        if stats.queued_s:
            return
        if self.drafting is not None:
            self.drafting.begin(self.known)
        stats.prompt_tokens = reused
        stats.note_reused(reused, self.sequence.restored)
        self._chunks.clear()
        while reused < self.prompt_tokens:
            self._chunks.append((reused, engine.chunk_tokens(self.prompt_tokens - reused)))
            reused = sum(self._chunks[-1])

    def start(self, now_s: float) -> None:
        """Records that a step with this request begins at `now_s`, in seconds; the first one ends the request's time in
        the queue.
        """
        if not self.answer.stats.queued_s:
            self.answer.stats.queued_s = max(now_s - self.submitted_s, 1e-9)
        self.begun = True

    def give_back(self) -> None:
        """Releases the pages and states of the request's sequence; the ids of its prompt and answer stay known, to be
        computed again later.
        """
        self.sequence.close()
        self.begun = False

    @property
    def scores(self) -> bool:
        """Whether each row of the prompt's next piece gives logits or a hidden row, and not only the last: for the
        log-probabilities of the prompt's tokens, or for pooling.
        """
        request = self.answer.request
        pools = request.pooled is not None and request.pooled.needs_all(self.sequence.length)
        return pools or request.prompt_logprobs is not None

    def reads(self, engine: Engine, most: int) -> Run:
        """Returns the run (token ids with their positions and KV-cache pages) that computes at most the next `most`
        tokens of the prompt: a piece of the chunk that would be computed in one step if the request were alone.

        Raises:
            PoolFull: too few KV-cache pages are available for the run.
        """
        at = self.sequence.length
        if depth := self._depth_found(at):
            return self._reads_answer(at, depth, most)
        late = next((p for p in range(at, self._found) if self._depth_found(p)), self.prompt_tokens)
        chunk = next((chunk for chunk in reversed(self._chunks) if chunk[0] <= at), None)
        if chunk is None:  # what was found when it began is lost
            chunk = at, engine.chunk_tokens(min(late, self._chunks[0][0]) - at)
        end = min(sum(chunk), late)
        upto = at + self.sequence.until_mark(_even(end - at, most))
        if self._late:
            upto = min(upto, self.prompt_tokens - 1)  # the last id's logits are for choosing
        pools = self.answer.pooled is not None
        wanted = upto == len(self.known) and (self.finish is None or pools)
        return self._run(upto, wanted, 0, chunk)

    def _depth_found(self, position: int) -> int:
        """The depth of deferral with which an id of the prompt is computed: above 0 it was found when it began."""
        assert self._how is not None, "it was not opened"
        return int(self._how[position]) & ~ABSORBED

    def _reads_answer(self, at: int, depth: int, most: int) -> Run:
        """The run that computes ids of an earlier answer again as they were: each alone, and deferred so deep."""
        upto, end = at + 1, min(at + most, at + _AGAIN, self._found)
        while upto < end and self._depth_found(upto) == depth:
            upto += 1
        upto = at + self.sequence.until_mark(upto - at)
        return self._run(upto, False, depth, (at, 1))

    def writes(self, engine: Engine, room: DraftRoom = NO_DRAFT_ROOM) -> Run:
        """Returns the run (token ids with their positions and KV-cache pages) that computes the ids of the answer that
        the sequence lacks, followed by drafted ids, each of which gives logits. One id is lacking, or several if the
        sequence's pages were released before.

        Args:
            room: the number of rows that the step has for drafts of this answer.
        Raises:
            PoolFull: too few KV-cache pages are available for the run.
        """
        at = self.sequence.length
        if at == len(self.known):  # the step before was interrupted after it was computed
            at = self.sequence.truncate(at - 1)
        depth, upto = engine.depth_at(at), at + 1
        while upto < min(len(self.known), at + _AGAIN) and engine.depth_at(upto) == depth:
            upto += 1
        wanted = upto == len(self.known) and self.finish is None
        drafted = self._draft(engine, upto - at - 1, room) if wanted else ()
        if drafted:
            try:
                return self._run(upto, wanted, depth, (at, 1), drafted)
            except PoolFull:
                pass  # a draft is worth nobody's pages
        return self._run(upto, wanted, depth, (at, 1))

    def _draft(self, engine: Engine, waiting: int, room: DraftRoom) -> tuple[int, ...]:
        """The ids to try behind those that are known: none after a stop, none that defers otherwise than the last."""
        if self.drafting is None:
            return ()
        request, said = self.answer.request, len(self.answer.ids)
        limit = self.room if request.max_tokens is None else min(self.room, request.max_tokens)
        most = min(limit - said, room.outputs) - 1
        drafted = self.drafting.next(waiting, most, room.beside)
        at = len(self.known)
        depth = engine.depth_at(at - 1)
        unfit = (
            i
            for i, id in enumerate(drafted)
            if id in request.stop_ids or engine.depth_at(at + i) != depth
        )
        return drafted[: next(unfit, len(drafted))]

    def computed(self, run: Run, drafted: int, *, ends_chunk: bool) -> None:
        """Appends the ids of a computed run to the request's sequence, except for the `drafted` ids at its end. Appends
        none if some are drafted and a layer keeps a recurrent state.
        """
        if not drafted:
            self.sequence.commit(run, prompt=ends_chunk)
        elif not self.sequence.recurrent:
            self.sequence.commit(run, run.ids.size - drafted, prompt=False)

    def keep(self, run: Run, drafted: int, right: int) -> None:
        """Appends the first `right` of the `drafted` last ids of a computed run to the request's sequence. Where layers
        keep recurrent states, appends the whole run if all drafted ids are right, else nothing: the right ids are then
        computed again.
        """
        if not self.sequence.recurrent:
            sure = run.ids.size - drafted
            rest = run._replace(ids=run.ids[sure:], start=run.start + sure)
            self.sequence.commit(rest, right, prompt=False)
        elif right == drafted:
            self.sequence.commit(run, prompt=False)

    def choice(self, logits: Logits) -> TokenChoice:
        """Returns the inputs for choosing the next token from these logits: the request's sampling settings, a random
        number, the ids seen so far and the mask of allowed ids.
        """
        wanted = self.answer.request.logprobs
        likeliest = -1 if wanted is None else wanted
        constraint = self.answer.request.constraint
        mask = None if constraint is None else constraint.mask()
        if self._forcing is not None:
            mask = self._forcing.mask(logits.values.size)
        if mask is None and self._goes_on:
            mask = ~mask_of(self.answer.request.stop_ids, logits.values.size)
        return self.answer.sampler.choice(logits, self._history, mask=mask, likeliest=likeliest)

    @property
    def _goes_on(self) -> bool:
        """Whether the answer is too short to end."""
        request = self.answer.request
        return request.said + len(self.answer.ids) < request.min_tokens

    def token(self, engine: Engine, chosen: ChosenToken, logits: Logits) -> Token:
        """Returns the event of the answer's next token: the id that was chosen from these logits, with
        log-probabilities if the request asks for them.

        Raises:
            KtError: the error of the request's constraint, after which no id can follow.
            BadPack: the logits hold NaN or infinity.
            UsageError: the mask leaves no token.
        """
        constraint = self.answer.request.constraint
        if constraint is not None and constraint.error is not None:
            raise constraint.error
        id, how = chosen_id(chosen, logits), engine.how_at(len(self.known))
        if self.answer.request.logprobs is None:
            return Token(self.answer, id, how=how)
        likeliest = tuple(Candidate(*pair) for pair in chosen.likeliest)
        return Token(self.answer, id, Candidate(id, chosen.logprob), likeliest, how)

    def take(self, id: int) -> None:
        """Appends an id to the answer, and passes it to the answer's constraint and drafts."""
        self.answer.ids.append(id)
        self.answer.stats.tokens += 1
        self.known.append(id)
        self._history.append(id)
        if (constraint := self.answer.request.constraint) is not None:
            constraint.take(id)
        if self._forcing is not None:
            self._forcing.take(id)
        if self.drafting is not None:
            self.drafting.said(id)

    def _run(
        self,
        upto: int,
        wanted: bool,
        depth: int,
        chunk: tuple[int, int],
        drafted: tuple[int, ...] = (),
    ) -> Run:
        """The run of the ids up to `upto` and of those drafted; `wanted`: with logits after the last known."""
        ids = np.array([*self.known[self.sequence.length : upto], *drafted], dtype=np.int32)
        return self.sequence.extend(
            ids,
            first_output=0 if self.scores and self.reading else ids.size - len(drafted) - wanted,
            temperature=self.answer.sampler.sums_at if wanted else 0.0,
            defer=depth,
            chunk=chunk,
        )
