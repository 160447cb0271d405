"""GGUF files of a repository by quant, and what names them: words and pages."""

from __future__ import annotations

import pytest

from ktcli.errors import UsageError
from ktcli.store.hubs import RemoteFile, Snapshot
from ktcli.store.quants import quants_of, recommended
from ktcli.store.reference import parse, repository_named

GB = 10**9


def snapshot(*files: tuple[str, int]) -> Snapshot:
    return Snapshot("hf", "org/repo", "main", tuple(RemoteFile(*each) for each in files))


def test_quants_are_whole_sets_of_models_smallest_first() -> None:
    there = snapshot(
        ("m-Q4_K_M-00001-of-00002.gguf", 2), ("m-Q4_K_M-00002-of-00002.gguf", 3),
        ("m-Q6_K-00001-of-00002.gguf", 2),  # its second half is not there
        ("BF16/m-BF16.gguf", 20), ("UD-Q2_K_XL/m-UD-Q2_K_XL.gguf", 1), ("IQ1_S/anything.gguf", 4),
        ("m.Q8_0.gguf", 9), ("mmproj-F16.gguf", 1), ("imatrix_Q4.gguf", 1), ("model.gguf", 1),
        ("../m-Q3_K.gguf", 1), ("/m-Q3_K.gguf", 1), ("a/b/m-Q3_K.gguf", 1), (".x/m-Q3_K.gguf", 1),
        ("m-Q5_0-00001-of-99999.gguf", 1),
    )  # fmt: skip
    found = {each.name: each.size_bytes for each in quants_of(there)}
    assert found == {"UD-Q2_K_XL": 1, "IQ1_S": 4, "Q4_K_M": 5, "Q8_0": 9, "BF16": 20}
    assert list(found.values()) == sorted(found.values())


@pytest.mark.parametrize(
    ("free", "best"), [(100, "Q8_0"), (17, "Q4_K_M"), (1, "Q2_K")], ids=["all", "some", "none"]
)
def test_the_most_precise_quant_that_leaves_room_is_recommended(free: int, best: str) -> None:
    sizes = {"Q2_K": 3, "Q4_K_M": 5, "Q8_0": 9, "F16": 18}
    there = snapshot(*((f"m-{name}.gguf", size) for name, size in sizes.items()))
    assert recommended(quants_of(there), free).name == best


PAGES = {
    "https://huggingface.co/Qwen/Qwen3-30B-A3B": ("hf", "Qwen/Qwen3-30B-A3B", "", ""),
    "https://huggingface.co/org/repo/tree/main?not-for-all-audiences=true": ("hf", "org/repo", "", ""),
    "https://huggingface.co/org/repo/tree/v1.0/": ("hf", "org/repo", "v1.0", ""),
    "https://hf.co/org/repo/blob/main/m-Q4_K_M-00001-of-00002.gguf": ("hf", "org/repo", "", "Q4_K_M"),
    "https://huggingface.co/org/repo/resolve/abc/UD-Q2_K/x.gguf?download=true": ("hf", "org/repo", "abc", "UD-Q2_K"),
    "hf.co/org/repo:IQ3_XXS": ("hf", "org/repo", "", "IQ3_XXS"),
    "http://www.modelscope.cn/models/org/repo/files": ("ms", "org/repo", "", ""),
    "org/repo@main:Q8_0": ("hf", "org/repo", "main", "Q8_0"),
    "ms:org/repo:Q8_0": ("ms", "org/repo", "", "Q8_0"),
}  # fmt: skip


@pytest.mark.parametrize("text", PAGES)
def test_pages_and_quants_are_read(text: str) -> None:
    found = parse(text)
    assert (found.hub, found.repository, found.revision, found.quant) == PAGES[text]
    if found.name.startswith(("org", "ms--")):
        assert parse(repository_named(found.name)).name == found.name


@pytest.mark.parametrize(
    "text",
    [
        "https://example.com/org/repo", "https://huggingface.co/org", "https://huggingface.co/datasets/org/repo",
        "https://huggingface.co/../..", "https://", "https://huggingface.co/org/repo/tree/..", "org/repo:../x",
        "org/repo:", "https://huggingface.co.evil.com/org/repo",
    ],
)  # fmt: skip
def test_what_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)
