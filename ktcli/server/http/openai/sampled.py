"""The fields of all requests for answers, in OpenAI's API and others: sampling, stops and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from ktcli.dialogue.answer import AnswerOptions
from ktcli.sampling import SamplingSettings
from ktcli.server.http.constraints import (
    MOST_TOKENS,
    NO_LIMIT,
    AnswerConstraints,
    not_supported,
    refuse_elsewhere,
    with_form,
)
from ktcli.server.http.refusals import (
    OWN_NAMES,
    FieldNames,
    about,
    bad_field,
    bad_value,
    require_at_most,
    require_within,
)
from ktcli.text.settings import Settings, override

ANY_SEED = -1
LOGPROBS_MOST = 20
STOPS_MOST = 16
CHOICES_MOST = 16
STOP_CHARS_MOST = 1000
STOP_IDS_MOST = 1024
SALT_CHARS_MOST = 256
BIASES_MOST = 1024
_ELSEWHERE = {
    "format": "use response_format",
    "num_ctx": "use options.num_ctx of Ollama's API",
    **dict.fromkeys(MOST_TOKENS, "use max_tokens"),
    "min_new_tokens": "use min_tokens",
    "stop_sequences": "use stop",
}
_NUMBERS = (
    "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed"
).split()


class StreamOptions(msgspec.Struct):
    """The field `stream_options`."""

    include_usage: bool = False


class Sampled(AnswerConstraints):
    """The fields that completions of both kinds have.

    Attributes:
        own_fields: fields of other APIs that this kind of request has itself.
    """

    own_fields: ClassVar[frozenset[str]] = frozenset()

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    max_tokens: int | None = None
    return_progress: bool = False
    kt_persist: bool = False
    kv_transfer_params: Any = None
    format: Any = None
    num_ctx: Any = None
    num_predict: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    stop_sequences: Any = None

    @property
    def wants_usage(self) -> bool:
        """Whether the request wants a stream to end with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, own: SamplingSettings, names: FieldNames = OWN_NAMES) -> SamplingSettings:
        """Returns the sampling settings of the answer: the model's `own`, overridden by those of the request.

        Args:
            names: what the request calls the fields.
        Raises:
            Refusal: a value is out of range, or `logit_bias` has too many entries or other keys than token ids.
        """
        found = own
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None:
                if name == "seed":
                    if value == ANY_SEED:
                        found = replace(found, seed=None)
                        continue
                    value %= 2**64  # a signed one is meant as its 64 bits
                if name == "top_k":
                    value = max(0, value)  # -1 is off, too
                with about(names[name]):
                    found = override(found, **{name: value})
        field = names["logit_bias"]
        require_at_most(field, len(self.logit_bias or ()), BIASES_MOST)
        with about(field):
            return replace(found, logit_bias=_biases(self.logit_bias, field))

    def answer_options(
        self,
        settings: Settings,
        most: int | None,
        logprobs: int | None,
        names: FieldNames = OWN_NAMES,
        *,
        least: int = 1,
    ) -> AnswerOptions:
        """Returns the options of the answer (sampling, limits, constraints) from the request, or else from the model's
        `settings`.

        Args:
            most: the most tokens, as asked for; NO_LIMIT: as many as there is room for.
            logprobs: the number of likeliest tokens that come with each token; None: no log probabilities.
            least: the least that `most` can be.
            names: what the request calls the fields.
        Raises:
            Refusal: a value cannot be used.
        """
        self._refuse_what_is_not_kept_to(names)
        if (other := self.n_predict) is not None and _is_less(other, most):
            most, names = other, FieldNames(names, max_tokens=names["n_predict"])
        stops = self._stops(names["stop"])
        if most is not None and most != NO_LIMIT:
            require_within(names["max_tokens"], most, least, None)
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= SALT_CHARS_MOST:
            salt = names["cache_salt"]
            raise bad_field(salt, f"must be 1 to {SALT_CHARS_MOST} characters long")
        choices, budget = 1 if self.n is None else self.n, self.thinking_token_budget
        require_within(names["n"], choices, 1, CHOICES_MOST)
        options = AnswerOptions(
            self.sampling(settings.sampling, names),
            stops or settings.stops,
            settings.max_tokens if most is None else None if most == NO_LIMIT else most,
            choices,
            logprobs,
            salt=self.cache_salt or "",
            endless=bool(self.ignore_eos),
            stop_ids=frozenset(self.stop_token_ids or ()),
            min_tokens=self._least_tokens(most, names["min_tokens"]),
            think_budget=settings.think_budget if budget is None else budget,
            persist=self.kt_persist or (most == 1 and bool(self.kv_transfer_params)),
        )
        return with_form(options, self.form(names), names)

    def _stops(self, field: str) -> tuple[str, ...]:
        """Returns the texts that end an answer; errors call them `field`.

        Raises:
            Refusal: there are too many, or one is too long.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        require_at_most(field, len(stops), STOPS_MOST)
        if any(len(each) > STOP_CHARS_MOST for each in stops):
            raise bad_field(field, f"has a string of more than {STOP_CHARS_MOST:,} characters")
        return tuple(each for each in stops if each)

    def _refuse_what_is_not_kept_to(self, names: FieldNames) -> None:
        """Checks that the request has no field that must be kept to and cannot be. Raises: Refusal: it has one."""
        self.refuse_foreign_limits(names)
        others = {name: way for name, way in _ELSEWHERE.items() if name not in self.own_fields}
        refuse_elsewhere(self, others)
        if self.prompt_logprobs is not None and self.prompt_logprobs is not False:
            hint = "use /v1/completions with echo and logprobs"
            raise not_supported(names["prompt_logprobs"], hint)
        if self.best_of not in (None, 1, self.n):
            raise not_supported(names["best_of"])
        if self.thinking_token_budget is not None:
            field = names["thinking_token_budget"]
            require_within(field, self.thinking_token_budget, 0, None)
        require_at_most(names["stop_token_ids"], len(self.stop_token_ids or ()), STOP_IDS_MOST)

    def _least_tokens(self, most: int | None, field: str) -> int:
        """Returns the least number of tokens of an answer of `most` at most; errors call it `field`.

        Raises:
            Refusal: it cannot be kept to.
        """
        least = self.min_tokens or 0
        require_within(field, least, 0, None if most in (None, NO_LIMIT) else most)
        return least


def logprobs_of(wanted: bool | None, likeliest: int | None) -> int | None:
    """Returns the number of likeliest tokens whose log probabilities come with each token; None: no log probabilities.

    Raises:
        Refusal: `likeliest` is negative or more than 20, or is given although no log probabilities are wanted.
    """
    most = likeliest or 0
    require_within("top_logprobs", most, 0, LOGPROBS_MOST)
    if most and not wanted:
        raise bad_field("top_logprobs", "requires logprobs to be true")
    return most if wanted else None


def _biases(said: Mapping[str, float] | None, field: str) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(id), bias) for id, bias in (said or {}).items())
    except ValueError as error:
        raise bad_value(field, f"the keys of {field} must be token ids") from error


def _is_less(most: int, other: int | None) -> bool:
    """Returns whether the first of two numbers of tokens is the one that limits an answer."""
    if other is None or most < NO_LIMIT:
        return True
    return most != NO_LIMIT and (other == NO_LIMIT or most < other)
