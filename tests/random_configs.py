"""Random configurations of every family: kt refuses them by name, or computes what transformers does.

A trial changes a few fields of a case's config. By hand, wide: `python tests/random_configs.py --minutes 10`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from convert import convert_checkpoint
from loading import load_engine
from reference import CASES, Case, judge, write_checkpoint
from timelines import logits_of

from ktcli.errors import BadCheckpoint
from ktcli.models import build

THINKER, TEXT = "thinker_config", "text_config"
TOKENS, CHUNK = 90, 50
LEAST_GAP = 1e-5  # between choice scores, which the order of sums may close
EXACT = 1e-4  # of the logits' standard deviation

# Fields that say nothing of the forward.
IDLE = (
    "architectures attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id id2label"
    " initializer_range label2id model_type num_mtp_layers num_nextn_predict_layers output_attentions"
    " output_hidden_states output_router_logits pad_token_id per_layer_config problem_type return_dict"
    " router_aux_loss_coef router_jitter_noise transformers_version use_cache vision_config vocab_size"
    " pretraining_tp is_encoder_decoder mtp_loss_scaling_factor mtp_layer_types mtp_mlp_layer_types"
    " initializer_factor sep_token_id cls_token_id"
).split()
LARGE = ("num_hidden_layers", "hidden_size")  # of the classes' own: trials would take long
# Values worth trying, by the ending of a name.
SIZES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1, 2, 4, 5),
    "hidden_size": (64, 80, 96),
    "num_attention_heads": (2, 4, 6, 8),
    "num_key_value_heads": (1, 2, 4, None),
    "head_dim": (8, 16, 24, 32, None),
    "intermediate_size": (
        24,
        44,
        72,
    ),  # not half of a hidden size, where transformers could not tell how experts lie
    "q_lora_rank": (20, 40, None),
    "kv_lora_rank": (32, 48),
    "nope_head_dim": (16, 24),
    "rope_head_dim": (8, 12, 16),
    "experts": (4, 8, 10, 16),
    "shared_experts": (0, 1, 2, None),
    "experts_per_tok": (1, 2, 3, 4),
    "n_group": (1, 2, 4),
    "topk_group": (1, 2),
    "dense_replace": (0, 1, 2),
    "sliding_window": (1, 5, 20, None),
    "max_window_layers": (0, 1, 2, 9),
    "layer_types": (None,),
    "mlp_layer_types": (None,),
    "max_position_embeddings": (128, 256, 512),
    "mlp_only_layers": ([], [0], [1, 2], None),
    "eps": (1e-6, 1e-5, 1e-3),
    "rope_interleave": (True, False, None),
    "clip_qkv": (None, 0.5),
    "hidden_act": ("silu", "gelu"),
    "tie_word_embeddings": (True, False),
    "use_sliding_window": (True, False),
    "scoring_func": ("sigmoid", "softmax", "sqrtsoftplus"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
}
_FACTORS = (1.0, 1.5, 2.0, 4.0)


@dataclass(frozen=True)
class Trial:
    """A case with changed fields.

    Attributes:
        changes: value by field of the text model's config; `DROPPED`: the field is left out.
        hub: kt reads rotations in the hub's spelling.
    """

    case: Case
    changes: Mapping[str, Any]
    hub: bool = False

    def __str__(self) -> str:
        return f"{self.case.name}{' (hub)' if self.hub else ''}: {dict(self.changes)}"


DROPPED = "(left out)"


def draw(case: Case, rng: random.Random) -> Trial:
    """A few changes of a case."""
    full, given = _inside(case.own_spelling()), _inside(case.values)
    names = sorted(name for name in full.keys() | given.keys() if name not in IDLE)
    changes = {}
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 2, 2, 3, 4)))):
        dropped = name in given and name not in LARGE and rng.random() < 0.15
        changes[name] = DROPPED if dropped else _value(name, full.get(name), full, rng)
    flat = "rope_theta" in (full.get("rope_parameters") or {})
    return Trial(case, changes, hub=flat and type(case) is Case and rng.random() < 0.3)


def _inside(config: Mapping[str, Any]) -> Any:
    for part in (THINKER, TEXT):
        config = config.get(part) or config
    return config


def _value(name: str, value: Any, full: Mapping[str, Any], rng: random.Random) -> Any:
    """Another value of a field."""
    if name == "rope_parameters":
        return _rope(value, full, rng)
    known = [choices for ending, choices in SIZES.items() if name.endswith(ending)]
    if known and not (name.endswith("_types") and isinstance(value, list) and rng.random() < 0.7):
        return deepcopy(rng.choice(known[-1]))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 2 * value, max(value // 2, 1)))
    if isinstance(value, float):
        return value * rng.choice((0.5, 1.7)) or 0.5
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return [rng.choice(value) for _ in value]
    if isinstance(value, list):
        return rng.sample(value, len(value))
    return None


def _rope(value: Any, full: Mapping[str, Any], rng: random.Random) -> Any:
    """Another rotation; one for each kind of layer, where there are several."""
    kinds = [k for k, one in (value or {}).items() if isinstance(one, Mapping)]
    if kinds:
        return {kind: _rope(value[kind], full, rng) for kind in kinds}
    plain = {k: v for k, v in (value or {}).items() if k in ("rope_theta", "mrope_section")}
    plain["rope_theta"] = rng.choice((1e4, 5e5, 1e6))
    own = (value or {}).get("partial_rotary_factor", full.get("partial_rotary_factor"))
    part = rng.choice((own, own, 0.5, 1.0))
    if part:
        plain["partial_rotary_factor"] = part
    scaled = {**plain, "factor": rng.choice(_FACTORS), "original_max_position_embeddings": 32}
    dim = (full.get("qk_rope_head_dim") or full.get("head_dim") or 0) // 2
    pairs = int(dim * (part or 1.0))
    return rng.choice(
        (
            None,
            {**plain, "rope_type": "default"},
            {**plain, "rope_type": "linear", "factor": rng.choice(_FACTORS)},
            {**plain, "rope_type": "dynamic", "factor": rng.choice(_FACTORS)},
            {**scaled, "rope_type": "yarn"},
            {**scaled, "rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
            {
                **scaled,
                "rope_type": "yarn",
                "mscale": 0.7,
                "mscale_all_dim": rng.choice((0.7, 1.0)),
            },
            {**scaled, "rope_type": "yarn", "attention_factor": 1.2},
            {**scaled, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            {
                **scaled,
                "rope_type": "longrope",
                "short_factor": [1.0 + i / 7 for i in range(pairs)],
                "long_factor": [1.5 + i for i in range(pairs)],
            },
        )
    )


def changed(trial: Trial) -> Case:
    """The case of a trial."""
    values = deepcopy(trial.case.values)
    inside = _inside(values)
    for name, value in trial.changes.items():
        inside.pop(name, None)
        if value != DROPPED:
            inside[name] = deepcopy(value)
    return replace(trial.case, values=values)


def verdict(trial: Trial) -> str:
    """What a trial shows: "equal", "refused", "no judge" where transformers cannot run it, or "WRONG: …".

    Where something is chosen, rounding may decide: logits are wrong if they are with other weights, too.
    """
    said = ""
    for seed in (1, 2):
        with tempfile.TemporaryDirectory(prefix="kt-random-") as folder:
            said = _of_seed(trial, seed, Path(folder))
        if not said.startswith(_DIFFERS):
            break
    return said


_DIFFERS = "WRONG: logits"


def _of_seed(trial: Trial, seed: int, folder: Path) -> str:
    case = replace(changed(trial), seed=seed)
    ids = np.random.default_rng(seed).integers(0, 99, TOKENS).tolist()
    try:
        checkpoint = write_checkpoint(case, folder / "checkpoint")
        judged = judge(case, checkpoint, ids)
        if trial.hub:
            config = replace(case, hub={}, renamed={}).hub_spelling()
            (checkpoint / "config.json").write_text(json.dumps(config))
    except Exception:  # whatever transformers says of a config that it cannot run
        return _unjudged(case)
    if not np.isfinite(judged.logits).all():
        return "no judge"
    try:
        pack = convert_checkpoint(checkpoint, folder / "pack", experts="bf16", dense="bf16")
        engine = load_engine(pack, exact=True, all_logits=True, threads=2)
    except BadCheckpoint as error:
        return "refused" if _names_a_field(str(error), case) else f"WRONG: refused, but as {error}"
    session = engine.session()
    logits = np.concatenate([logits_of(session, part) for part in (ids[:CHUNK], ids[CHUNK:])])
    error = np.abs(logits - judged.logits).max(axis=1)
    wrong = np.flatnonzero(error > EXACT * judged.logits.std())
    undecided = np.flatnonzero(judged.margin < LEAST_GAP)
    if not wrong.size or (undecided.size and undecided[0] <= wrong[0]):
        return "equal"
    worst = error.max() / judged.logits.std()
    return f"{_DIFFERS} of {wrong.size} positions from {wrong[0]} on, by {worst:.1e} of sigma"


def _names_a_field(said: str, case: Case) -> bool:
    """Whether a refusal names a field of the config, or of a part of it."""

    def named(part: Mapping[str, Any]) -> bool:
        inner = (value for value in part.values() if isinstance(value, Mapping))
        return any(str(name) in said for name in part) or any(map(named, inner))

    return named(case.own_spelling()) or named(case.values)


def _unjudged(case: Case) -> str:
    """kt may build what transformers refuses, but never fails otherwise than by refusing."""
    try:
        config = case.own_spelling()
    except Exception:
        config = {"model_type": case.model_type, **case.values}
    with suppress(BadCheckpoint):
        build(config)
    return "no judge"


def run(minutes: float, seed: int, only: str) -> int:
    """Trials until the time is over; how many were wrong."""
    rng, found = random.Random(seed), Counter[str]()
    cases = [case for case in CASES if only in case.name]
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        trial = draw(rng.choice(cases), rng)
        try:
            said = verdict(trial)
        except Exception as error:
            said = f"WRONG: {type(error).__name__} {error}"
        found[said.partition(":")[0]] += 1
        if said.startswith("WRONG"):
            print(trial, said, sep="\n    ", flush=True)
    print(dict(found))
    return found["WRONG"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the names of cases")
    words = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    raise SystemExit(min(run(words.minutes, words.seed, words.only), 1))
