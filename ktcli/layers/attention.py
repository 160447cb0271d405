"""What a decoder layer may mix its tokens with."""

from __future__ import annotations

from ktcli.layers.compressed import CompressedAttention
from ktcli.layers.grouped_query import GroupedQueryAttention
from ktcli.layers.latent import LatentAttention
from ktcli.layers.recurrent import GatedDeltaNet, KimiDelta

Attention = (
    GroupedQueryAttention | LatentAttention | GatedDeltaNet | KimiDelta | CompressedAttention
)
