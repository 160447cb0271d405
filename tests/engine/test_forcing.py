"""Answers that are held to ids: each of them is chosen, whatever the logits are, and then the answer ends."""

from __future__ import annotations

import numpy as np
import pytest
from engine.toy import STOP, VOCAB, ToyEngine

from ktcli.engine import GenerationRequest, Scheduler
from ktcli.engine.constraint import ForcedIds, Forcing
from ktcli.engine.drafting import DraftOptions
from ktcli.engine.request import Answer, Finish
from ktcli.sampling import SamplingSettings

IDS = (5, 66, 5, 0, 31, 32, 7)
PROMPT = [9, *IDS, 9]  # drafts are looked up in it
HOT = SamplingSettings(temperature=5.0, seed=3, repetition_penalty=1.5, logit_bias=((5, -100.0),))


def answered(request: GenerationRequest) -> Answer:
    engine = ToyEngine()
    scheduler = Scheduler(engine, clock=engine.clock)
    answer = scheduler.submit(request)
    while not scheduler.idle:
        scheduler.step()
    return answer


def asked(forced: ForcedIds | None, **more: object) -> GenerationRequest:
    given = {"sampling": HOT, "stop_ids": (STOP,), "max_tokens": 20, **more}
    return GenerationRequest(PROMPT, forced=forced, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [HOT, SamplingSettings(greedy=True)])
@pytest.mark.parametrize("draft", [DraftOptions(drafts=False), DraftOptions(length=4)])
def test_it_is_those_ids_and_ends(sampling: SamplingSettings, draft: DraftOptions) -> None:
    answer = answered(asked(ForcedIds(IDS), sampling=sampling, draft=draft))
    assert tuple(answer.ids) == IDS and answer.finish is Finish.STOP


def test_it_is_cut_as_others_are() -> None:
    answer = answered(asked(ForcedIds(IDS), max_tokens=3))
    assert tuple(answer.ids) == IDS[:3] and answer.finish is Finish.LENGTH
    answer = answered(asked(ForcedIds(IDS), ends=lambda id: id == 0))
    assert tuple(answer.ids) == IDS[:4] and answer.finish is Finish.STOP


def test_one_that_begins_otherwise_is_the_model_s() -> None:
    free = answered(asked(None))
    other = tuple((id + 1) % VOCAB for id in free.ids)
    assert answered(asked(ForcedIds(other, lead=1))).ids == free.ids
    led = ForcedIds((*free.ids[:2], *other[:9]), lead=2)
    assert tuple(answered(asked(led)).ids) == led.ids
    late = ForcedIds((free.ids[0], *other[:9]), lead=2)
    assert answered(asked(late)).ids == free.ids


def test_a_constraint_comes_first() -> None:
    class OnlyEight:
        ready, error, ended = True, None, False

        def mask(self) -> np.ndarray:
            return np.array([1 << 8, 0, 0], np.uint32)

        def take(self, id: int) -> None:
            pass

    assert set(answered(asked(ForcedIds(IDS), constraint=OnlyEight())).ids) == {8}


def test_masks() -> None:
    forcing = Forcing(ForcedIds((1, 40), lead=1), (2, 33))
    assert forcing.mask(VOCAB) is None
    for id, words in ((1, (0, 1 << 8, 0)), (40, (1 << 2, 1 << 1, 0)), (2, None)):
        forcing.take(id)
        mask = forcing.mask(VOCAB)
        assert (None if mask is None else tuple(mask.tolist())) == words
    beyond = Forcing(ForcedIds((VOCAB + 96, -1)), ())
    assert not np.any(beyond.mask(VOCAB)), "of a client that knows another vocabulary"
