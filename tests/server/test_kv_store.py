"""Servers that share a folder: one reads the prompt, another answers, and neither needs the folder to go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
from mini_library import NEEDS_KT_MINI
from server.running import served_by_command
from store.test_network_folder import ALONE, require_mounts

PROMPT = [{"role": "user", "content": "Please count: " + ", ".join(map(str, range(160)))}]
# What vllm-router 0.1.17 adds to a request, and for the server that only reads the prompt. smg 1.13 sends max_tokens
# alone.
ROUTED = {
    **dict.fromkeys(
        "no_stop_trim ignore_eos continue_final_message return_hidden_states".split(), False
    ),
    **dict.fromkeys("separate_reasoning stream_reasoning skip_special_tokens".split(), True),
    "include_reasoning": True,
    "stream": False,
    "logprobs": False,
}
TRANSFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys("remote_engine_id remote_block_ids remote_host remote_port".split()),
}
PREFILL = {**ROUTED, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": TRANSFER}


# How long the folder may take is no business of a test in which it answers.
PATIENT = """
from ktcli.store import remote
from ktcli.start import run
for name in ("OPEN_S", "LOOK_S", "READ_S", "STALL_S"):
    setattr(remote, name, 60.0)
run()
"""


def ask(url: str, messages: list[dict[str, str]], **more: Any) -> tuple[dict[str, Any], str]:
    """The usage and the text of a greedy answer."""
    body = {"model": "kt-mini", "messages": messages, "temperature": 0, "max_tokens": 24, **more}
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["usage"], found["choices"][0]["message"]["content"]


@NEEDS_KT_MINI
def test_one_server_reads_the_prompt_and_another_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, urls = tmp_path / "store", list[str]()
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_CACHE", "0")  # of the disk both would know
    with ExitStack() as servers:
        for _ in range(2):
            options = ("--threads", "1", "--context", "2048", "--kv-store", str(store))
            served = served_by_command(*options, program=("-c", PATIENT))
            urls.append(servers.enter_context(served))
        prefill, decode = urls
        usage, _ = ask(prefill, PROMPT, **PREFILL)
        assert usage["completion_tokens"] == 1
        usage, text = ask(decode, PROMPT, **ROUTED)
        details = usage["prompt_tokens_details"]
        assert usage["prompt_tokens"] - details["cached_tokens"] <= 65
        assert details["cached_tokens_details"]["store"] == details["cached_tokens"] > 256
        metrics = requests.get(f"{decode}/metrics", timeout=60).text
        assert (
            f'kt_prefix_cache_tier_hits_total{{tier="store"}} {details["cached_tokens"]}' in metrics
        )
        speeds = [line for line in metrics.splitlines() if "_per_second{" in line]
        read = [line for line in speeds if 'tier="store"' in line]
        assert len(read) == 1 and float(read[0].split()[-1]) > 0
        assert 'tier="store"' not in requests.get(f"{prefill}/metrics", timeout=60).text
        assert ask(prefill, PROMPT)[1] == text
        # A router that says nothing of pages.
        third = [{"role": "user", "content": "How does kt pull? " * 30}]
        ask(prefill, third, max_tokens=1)
        usage, _ = ask(decode, third)
        assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= 65
        # Without being asked, pages are written in time; with `kt_persist` at once.
        other = [{"role": "user", "content": "What is kt? " * 60}]
        ask(prefill, other, kt_persist=True)
        usage, _ = ask(decode, other)
        assert usage["prompt_tokens_details"]["cached_tokens_details"]["store"] > 64
        # The folder goes away.
        shutil.rmtree(store)
        assert ask(decode, PROMPT)[1] == text
        more = [{"role": "user", "content": "And what is a page? " * 40}]
        usage, _ = ask(decode, more, kt_persist=True)
        assert usage["completion_tokens"] and not store.exists()


FAULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "store_faults.py"
MOST_S = 15.0  # on a machine that others use; benchmarks/store.py says how long it takes


def answered_through(fault: str, **environ: str) -> None:
    """A server whose store fails while it answers goes on, and ends when it is told to."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip is not installed")
    command = [*ALONE, "--net", sys.executable, str(FAULTS), fault, "0"]
    environment = {**os.environ, **environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["after"]["requests"] >= 2 and found["sigterm_s"] < MOST_S
    assert max(found["first_request_more_s"], found["after"]["worst_more_ms"] / 1000) < MOST_S


@pytest.mark.thorough
@NEEDS_KT_MINI
@pytest.mark.parametrize("fault", ["folder_hangs", "folder_unmounted"])
def test_a_server_goes_on_when_its_folder_is_gone(fault: str, tmp_path: Path) -> None:
    require_mounts()
    answered_through(fault, KT_HOME=str(tmp_path / "home"))
