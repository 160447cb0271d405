"""The catalogue: every profile is complete, and its numbers are those of its config."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from declared import declared

from ktcli.errors import BadCheckpoint, NotFound
from ktcli.models import _FILE_OF as FAMILY_OF
from ktcli.models import build
from ktcli.store import catalog
from ktcli.store.profile import HUBS
from ktcli.store.reference import parse
from ktcli.unsupported import UNSUPPORTED, unsupported_named, unsupported_type
from ktcli.weights.recipe import Recipe

PUBLISHED = [name for name in catalog.names() if not catalog.get(name).builtin]

# parameters and expert parameters as their makers count them (facts published with the models)
COUNTED = {
    "deepseek-v2-lite": (15.7e9, 14.4e9),
    "deepseek-v3": (671.0e9, 653.9e9),
    "deepseek-v3.2": (671.9e9, 653.9e9),
    "glm-5": (743.9e9, 724.8e9),
    "kimi-k2": (1026.4e9, 1014.7e9),
    "qwen3-30b-a3b": (30.5e9, 29.0e9),
    "qwen3-235b-a22b": (235.1e9, 227.1e9),
    "deepseek-r1": (671.0e9, 653.9e9),
    "deepseek-v2.5": (235.7e9, 222.7e9),
    "kimi-k2-thinking": (1026.4e9, 1014.7e9),
    "kimi-k2.5": (1026.4e9, 1014.7e9),
    "qwen3-30b-a3b-2507": (30.5e9, 29.0e9),
    "qwen3-coder-30b-a3b": (30.5e9, 29.0e9),
    "qwen3-235b-a22b-2507": (235.1e9, 227.1e9),
    "qwen2-57b-a14b": (57.4e9, 49.3e9),
    "mixtral-8x7b": (46.7e9, 45.1e9),
    "mixtral-8x22b": (140.6e9, 135.3e9),
    "deepseek-v4-flash": (284.3e9, 277.0e9),
    "glm-4.5-air": (106.9e9, 99.7e9),
    "glm-4.5": (352.8e9, 336.0e9),
    "glm-4.6": (352.8e9, 336.0e9),
    "minimax-m2": (228.7e9, 224.7e9),
    "ernie-4.5-21b-a3b": (21.8e9, 20.4e9),
    "glm-4.7-flash": (29.9e9, 27.8e9),
    "olmoe-1b-7b": (6.92e9, 6.44e9),
    "qwen3-8b": (8.19e9, 0),
    "qwen3-4b": (4.02e9, 0),
    "qwen3-0.6b": (0.596e9, 0),
    "qwen3-embedding-0.6b": (0.596e9, 0),
    "qwen3-next-80b-a3b": (79.7e9, 77.3e9),
    "gpt-oss-20b": (20.9e9, 19.1e9),
    "gpt-oss-120b": (116.8e9, 114.7e9),
    "mimo-v2-flash": (308.8e9, 302.8e9),
    "nemotron-3-nano-30b-a3b": (31.6e9, 29.4e9),
    "nemotron-3-super-120b-a12b": (120.67e9, 112.7e9),
    "deepseek-v4-pro": (1573.0e9, 1547.4e9),
    "glm-4.7": (352.8e9, 336.0e9),
    "glm-5.1": (743.9e9, 724.8e9),
    "glm-5.2": (743.4e9, 724.8e9),
    "kimi-k2.6": (1026.4e9, 1014.7e9),
    "minimax-m2.5": (228.7e9, 224.7e9),
    "minimax-m2.7": (228.7e9, 224.7e9),
    "minimax-m3": (426.2e9, 413.1e9),
    "qwen3-coder-next": (79.7e9, 77.3e9),
    "qwen3.5-27b": (26.9e9, 0),
    "qwen3.5-35b-a3b": (34.7e9, 32.2e9),
    "qwen3.5-122b-a10b": (122.1e9, 116.0e9),
    "qwen3.5-397b-a17b": (396.3e9, 386.5e9),
    "qwen3.6-27b": (26.9e9, 0),
    "qwen3.6-35b-a3b": (34.7e9, 32.2e9),
    "trinity-mini": (26.1e9, 24.2e9),
    "trinity-nano": (6.12e9, 5.44e9),
}


def test_the_table_covers_the_catalogue() -> None:
    assert set(COUNTED) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_profile_builds_its_model(name: str) -> None:
    profile = catalog.get(name)
    built = build(profile.config)
    experts = sum(t.elements for t in built.tensors if t.role.value == "experts")
    assert experts == profile.expert_parameters
    assert profile.parameters == pytest.approx(COUNTED[name][0], rel=0.002)
    assert profile.expert_parameters == pytest.approx(COUNTED[name][1], rel=0.003)
    assert sum(declared(built).values()) == profile.parameters
    Recipe.named(profile.experts, profile.dense)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_repository_means_its_profile(name: str) -> None:
    profile = catalog.get(name)
    alone = FAMILY_OF[profile.config["model_type"]] in ONLY_ON_HUGGING_FACE
    assert set(profile.repositories) == ({"hf"} if alone else set(HUBS))
    assert re.fullmatch(r"20[0-9]{2}-[0-9]{2}", profile.released)
    for hub, repository in profile.repositories.items():
        assert parse(f"{hub}:{repository}").name == name
        assert parse(f"{hub}:{repository}@main").name != name


# Families of which no repository on ModelScope is known for certain.
ONLY_ON_HUGGING_FACE = {
    "afmoe",
    "axk1",
    "axk2",
    "cohere2_moe",
    "exaone_moe",
    "gemma3",
    "gemma4",
    "granitemoehybrid",
    "laguna",
    "lfm2_moe",
    "llama4",
    "minimax",
    "mistral4",
    "phimoe",
}


def test_every_family_has_a_published_repository_on_both_hubs() -> None:
    known: dict[str, list[Mapping[str, str]]] = {file: [] for file in FAMILY_OF.values()}
    for profile in map(catalog.get, PUBLISHED):
        known[FAMILY_OF[profile.config["model_type"]]].append(profile.repositories)
    for each in catalog.published():
        known[FAMILY_OF[each.model_type]].append(each.repositories)
    assert all(any("hf" in one for one in ids) for ids in known.values())
    without = {family for family, ids in known.items() if not any("ms" in one for one in ids)}
    assert without == ONLY_ON_HUGGING_FACE


def test_published_ids_are_ids_and_none_is_there_twice() -> None:
    ids = [f"{h}:{r}" for each in catalog.published() for h, r in each.repositories.items()]
    assert len(set(ids)) == len(ids)
    for text in ids:
        found = parse(text)
        assert f"{found.hub}:{found.repository}" == text
        assert catalog.find(found.name) is None  # it has no profile
    [found] = catalog.published_matching("exaone LGAI")
    assert found.model_type == "exaone_moe"
    assert found.reference in catalog.unknown("k-exaone-236b").hint


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_code_of_the_repository_is_named(name: str) -> None:
    assert "auto_map" not in catalog.get(name).config


def test_nulls_are_in_the_config() -> None:
    config = catalog.get("deepseek-v2-lite").config
    assert "q_lora_rank" in config
    assert config["q_lora_rank"] is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("qwen3", "qwen3-30b-a3b, "),
        ("qwen3", "qwen3-4b"),  # the nearest of all, which is dense
        ("qwen3-8", "qwen3-8b"),
        ("kimmi", "did you mean: kimi-k2"),
        ("kimi", "kimi-k2"),
        ("deepsek-v3", "deepseek-v3"),
        ("KT-MINI2", "kt-mini"),
    ],
)
def test_a_wrong_name_gets_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(NotFound) as caught:
        catalog.get(typed)
    assert meant in caught.value.hint


@pytest.mark.parametrize("typed", ["kimi-k3", "Qwen3.8-Flash-Next", "deepseek-v4.1-flash"])
def test_a_model_that_kt_cannot_run_yet_is_refused_by_name(typed: str) -> None:
    with pytest.raises(NotFound, match="is not supported yet: it has") as caught:
        catalog.get(typed)
    assert "model_type" in str(caught.value) and "kt plan" in caught.value.hint
    assert all(unsupported_named(name) is None for name in catalog.names())
    assert all(unsupported_type(kind) is None for kind in FAMILY_OF)


@pytest.mark.parametrize("kind", [*(each.model_type for each in UNSUPPORTED), "qwen4_exp_text"])
def test_a_model_type_that_kt_cannot_run_yet_is_refused_by_name(kind: str) -> None:
    with pytest.raises(
        BadCheckpoint, match=rf"'{kind.removesuffix('_text')}'\) is not supported yet"
    ):
        build({"model_type": kind})


def test_case_does_not_matter() -> None:
    assert catalog.get("Kimi-K2") is catalog.get("kimi-k2")
