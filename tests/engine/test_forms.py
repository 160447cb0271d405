"""Which ids of a prompt are expanded follows from the request alone."""

from __future__ import annotations

import pytest

from ktcli.engine.forms import ABSORBED, expanded_spans, how_to_read


@pytest.mark.parametrize(
    ("before", "n", "expanded"),
    [
        (b"", 1, []),
        (b"", 64, []),
        (b"", 65, [(0, 64)]),
        (b"", 128, [(0, 64)]),
        (b"", 129, [(0, 128)]),
        (bytes([ABSORBED]) * 70, 300, [(128, 256)]),
        (bytes([ABSORBED]) * 70, 256, []),  # a page is not worth expanding what is before it
        (bytes(64) + bytes([ABSORBED]) * 6, 400, [(0, 64), (128, 384)]),
        (
            bytes(64) + bytes([ABSORBED]) * 6,
            40,
            [],
        ),  # less than was computed: nothing of it is known
    ],
)
def test_which_ids_are_expanded(before: bytes, n: int, expanded: list[tuple[int, int]]) -> None:
    assert expanded_spans(how_to_read(before, n, latent=True)) == expanded
    assert not how_to_read(before, n, latent=False).any()


def test_where_others_go_on_from_a_state_only_what_all_have_in_common_is_expanded() -> None:
    assert expanded_spans(how_to_read(b"", 500, latent=True, within=200)) == [(0, 192)]
    assert expanded_spans(how_to_read(b"", 500, latent=True, within=20)) == []
