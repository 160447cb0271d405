"""Published models that people ask for and kt cannot run yet: refused by name, with the reason, not as unknown
models."""

from __future__ import annotations

from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class UnsupportedModel:
    """A model that is known and not supported.

    Attributes:
        model_type: as its config.json says.
        title: the name its makers use.
        lacks: what kt would need for it, as the end of a sentence.
    """

    model_type: str
    title: str
    lacks: str

    @property
    def sentence(self) -> str:
        """The sentence that explains why the model is not supported."""
        return f"{self.title} (model_type {self.model_type!r}) is not supported yet: {self.lacks}"


_DISK = "needs weights that stay on disk while it answers, which kt does not support"
UNSUPPORTED = (
    UnsupportedModel("kimi_k3", "Kimi-K3", f"it has 2.8T parameters and {_DISK}"),
    UnsupportedModel("qwen4_exp", "Qwen3.8-Flash-Next", f"it has tables of n-grams and {_DISK}"),
    UnsupportedModel("deepseek_v41", "DeepSeek-V4.1", f"it has tables of n-grams and {_DISK}"),
    UnsupportedModel(
        "longcat_flash",
        "LongCat-Flash",
        "its layers add experts around a second attention, which kt cannot wire",
    ),
    UnsupportedModel(
        "mistral_large4",
        "Mistral-Large-4",
        "its layers share keys and values, which kt does not support",
    ),
    UnsupportedModel("hy_v4", "Hy4", "its latent attention has sinks, which kt does not support"),
    UnsupportedModel("jamba", "Jamba", "it has layers of Mamba-1, and kt supports only Mamba-2"),
)


def unsupported_type(model_type: str) -> UnsupportedModel | None:
    """Returns the known but unsupported model with whose model_type the given one, from a config, begins ("hy_v4_moe"
    with "hy_v4"); None if there is none.
    """
    return next((each for each in UNSUPPORTED if model_type.startswith(each.model_type)), None)


def unsupported_named(name: str) -> UnsupportedModel | None:
    """Returns the known but unsupported model whose title is the beginning of a short name, or of the name in a
    repository id, ignoring case; None if there is none.
    """
    said = name.rpartition("/")[2].lower()
    return next((each for each in UNSUPPORTED if said.startswith(each.title.lower())), None)
