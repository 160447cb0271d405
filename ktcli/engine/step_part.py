"""One request's part of a step: the run that is computed, and the tokens chosen from its rows.

A run that reads a prompt gives rows only where the prompt ends. A run that goes on with an answer gives the row after
its last id, and one after each drafted id: they are taken in turn, as long as the drafted ids are what was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from ktcli.engine.active import Active
from ktcli.engine.logits import Logits
from ktcli.engine.request import Candidate, Finish, PromptRead, Token
from ktcli.engine.sampler import chosen_id, given_choice
from ktcli.errors import KtError
from ktcli.native import Run
from ktcli.native.choosing import Chooser
from ktcli.records import dataclass


@dataclass(eq=False, slots=True)
class StepPart:
    """The run of one request in a step, and the rows of logits that it got.

    Attributes:
        reads: whether the run reads part of the prompt; else it goes on with the answer.
        rows: the logits after the last id that is known, and after each one that was drafted; empty before the step is
            computed, and where no token follows.
        known: the logits of the prompt whose next tokens are known, where their chances are wanted.
        right: the drafted ids that were chosen so far.
        open: whether the next token is to be chosen: its row is known.
        end: why no token follows; None: one does.
        error: the reason of FAILED.
    """

    active: Active
    run: Run
    reads: bool
    rows: list[Logits] = field(default_factory=list)
    known: list[Logits] = field(default_factory=list)
    right: int = 0
    open: bool = False
    end: Finish | None = None
    error: KtError | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens that the request's run computes in the step."""
        return self.run.ids.size

    @property
    def drafted(self) -> int:
        """The number of drafted tokens in the request's run: those after the first token that gives logits; 0 if the
        run reads the prompt.
        """
        return 0 if self.reads else max(0, self.tokens - self.run.first_output - 1)

    @property
    def row(self) -> Logits:
        """The logits from which the request's next token is chosen: those after the last id of the step that was known,
        or was drafted and right.
        """
        return self.rows[self.right]

    def computed(self, rows: Iterator[Logits]) -> None:
        """Takes the request's rows of logits, the next ones of `rows`, from the computed step, and appends the run's
        ids to the sequence, except for drafted ones (with a recurrent state, none if some are drafted).
        """
        run = self.run
        self.rows = [next(rows) for _ in range(run.first_output, run.ids.size)]
        if (pooled := self.active.answer.pooled) is not None:
            pooled.take(run.start + run.first_output, self.rows)
            self.rows = []
        elif self.reads and self.active.scores:
            self._part_rows()
        self.open = bool(self.rows)
        # A chunk of the prompt ends here, as it would if the request were alone.
        ends_chunk = (
            self.reads and run.chunk is not None and run.start + run.ids.size == sum(run.chunk)
        )
        self.active.computed(run, self.drafted, ends_chunk=ends_chunk)

    def _part_rows(self) -> None:
        """Parts the rows of a run of the prompt: that after its last id, if a token follows, from those whose next
        tokens are known."""
        ends = self.run.start + self.tokens == self.active.prompt_tokens
        self.known = self.rows[: len(self.rows) - ends]
        self.rows = self.rows[len(self.known) :] if self.active.finish is None else []

    def read_on(self, chooser: Chooser) -> PromptRead | None:
        """Returns the event that tells how much of the prompt is computed after this step; None: it is no more than
        before, or the run does not read the prompt.

        Args:
            chooser: computes the log-probabilities of the prompt's tokens, if the request asks for them.
        """
        active, stats = self.active, self.active.answer.stats
        done, before = active.sequence.length, stats.prompt_tokens
        if not self.reads or done <= before:
            return None
        stats.prompt_tokens = done
        total = active.prompt_tokens - stats.reused_tokens
        if done == active.prompt_tokens:
            active.answer.depths = active.sequence.depths
        if active.answer.request.persist:
            active.sequence.persist(whole=done == active.prompt_tokens)
        chances = self._chances(chooser, before) if self.known else ()
        return PromptRead(active.answer, done - stats.reused_tokens, total, chances)

    def _chances(self, chooser: Chooser, since: int) -> tuple[Token, ...]:
        """Returns the prompt's tokens behind the rows from position `since` on, with their chances."""
        answer, start = self.active.answer, self.run.start
        ids = self.active.known[start + 1 : start + 1 + len(self.known)]
        rows = list(zip(ids, self.known, strict=True))[max(0, since - start) :]
        wanted = answer.request.prompt_logprobs or 0
        chosen = chooser.choose([given_choice(row, id, wanted) for id, row in rows])
        return tuple(
            Token(
                answer,
                id,
                Candidate(chosen_id(each, row), each.logprob),
                tuple(Candidate(*pair) for pair in each.likeliest),
            )
            for (id, row), each in zip(rows, chosen, strict=True)
        )

    def take(self, token: Token) -> bool:
        """Appends the chosen token to the answer, or ends the answer if it is a stop id; returns whether the token is
        part of the answer.
        """
        active, answer = self.active, self.active.answer
        self.open = False
        if token.id in answer.request.stop_ids:
            self.end = Finish.STOP
            return False
        active.take(token.id)
        if len(answer.ids) == active.room:
            active.finish = Finish.CONTEXT
        elif len(answer.ids) == answer.request.max_tokens:
            active.finish = Finish.LENGTH
        tried = self.run.first_output + 1 + self.right  # the place of the id drafted for this token
        if self.right < self.drafted and self.run.ids[tried] == token.id:
            self.right += 1
            answer.stats.accepted += 1
            self.open = active.finish is None
        constraint = answer.request.constraint
        whole = constraint is not None and constraint.ended
        if answer.request.ends(token.id) or whole:
            self.end, self.open = Finish.STOP, False
        elif active.finish is not None and not active.kept:
            self.end = active.finish
        return True

    def account(self, seconds: float, choosing_s: float) -> None:
        """Adds a step that took `seconds` to the request's statistics, and appends the drafted ids that were right to
        the sequence, see `Active.keep`.

        Args:
            choosing_s: the part of `seconds` in which tokens were chosen.
        """
        stats, drafted = self.active.answer.stats, self.drafted
        if self.reads:
            stats.prompt_s += seconds
            stats.prompt_choosing_s += choosing_s
            return
        stats.eval_s += seconds
        stats.choosing_s += choosing_s
        stats.steps += 1
        if drafted:
            stats.drafted += drafted
            self.active.keep(self.run, drafted, self.right)

    def finish(self) -> Finish | None:
        """Returns the reason why the request is over after this step; None: it goes on."""
        active = self.active
        if self.end is None and active.sequence.length == len(active.known):
            return active.finish
        return self.end
