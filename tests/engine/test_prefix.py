"""The facts from which the keys of pages begin: what changes the bytes of pages makes other keys."""

from __future__ import annotations

from weights.fake_checkpoint import QWEN3

from ktcli.engine.prefix import facts_of, seed
from ktcli.models import build
from ktcli.store import catalog
from ktcli.weights.formats import FORMATS, INT8_BEFORE
from ktcli.weights.recipe import Recipe


def test_other_rounding_makes_other_keys() -> None:
    """int8 was not rotated, and beside weights with a scale per group a row of activations had one."""
    bf16, model = FORMATS["bf16"], build(QWEN3)
    recipes = (
        *(Recipe(dense=dense) for dense in (FORMATS["int8"], INT8_BEFORE)),
        *(Recipe(bf16, dense) for dense in (FORMATS["int8"], INT8_BEFORE)),
    )
    facts = [facts_of(model, recipe, "weights") for recipe in recipes]
    assert len({seed(each) for each in facts}) == len(recipes)
    assert facts[1]["activations"] == "by group" and "activations" not in facts[3]


def test_what_earlier_versions_stored_is_found() -> None:
    """The keys of pages on people's disks begin from this; where a change of what pages hold changes it, so be it.

    Of CPUs with AVX-512 it is that since rotations are the same on all CPUs."""
    profile = catalog.find("qwen3-30b-a3b")
    assert profile is not None
    found = facts_of(build(profile.config), Recipe(dense=FORMATS["int8"]), "weights")["model"]
    assert isinstance(found, str) and found.startswith("6eac5519bd609ecf")


def test_queries_of_latents_in_rotated_groups_are_marked() -> None:
    """Before, those of some families read two int8 values of each activation."""
    latent = catalog.find("deepseek-v3")
    assert latent is not None
    model = build(latent.config)
    for name, marked in (("int6", True), ("int4-s8", True), ("int8", False), ("int4", False)):
        assert ("queries" in facts_of(model, Recipe(dense=FORMATS[name]), "weights")) == marked
    assert "queries" not in facts_of(build(QWEN3), Recipe(dense=FORMATS["int6"]), "weights")
