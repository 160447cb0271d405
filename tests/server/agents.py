r"""Coding agents, by their published packages, on a server whose model follows a script.

The packages are in the folder that KT_TEST_AGENTS names, or on the PATH:

    npm install --prefix FOLDER @anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code \
        @continuedev/cli
    python -m venv FOLDER/aider && FOLDER/aider/bin/pip install aider-chat
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat.fake_engine import VOCAB, FakeEngine
from server.running import Running, running, scripted

from ktcli.engine.logits import Logits
from ktcli.native.operands import Run
from ktcli.planner.cost import PieceTimes
from ktcli.server.http import guard

CONTEXT, CHUNK = 1 << 18, 4096
ASKED, AGAIN, SAID = "ALPHA what is in picture.png?", "BETA and now?", "GAMMA is the answer"
MODEL = "fake"
TEMPLATE = (
    "{# <tool_call> #}{% for t in tools or [] %}/{{ t.function.name }}/{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A grey pixel.
PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c6368000000820081"
) + bytes.fromhex("77cd72b60000000049454e44ae426082")


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Attributes:
        path: of its API.
        reads: the tool with which it reads a picture, and its argument; empty: it has no tools.
        sends: whether it sends the server a picture that it has read.
        first, again: its command lines behind the program; `{}` is the address of the server.
        files: that it needs in its home.
        environment: its variables.
    """

    program: str
    path: str
    reads: tuple[str, str]
    sends: bool
    first: Sequence[str]
    again: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


_CLAUDE = ("-p", "--model", MODEL, "--dangerously-skip-permissions")
_QWEN = (
    "--yolo", "--auth-type", "openai", "--openai-api-key", "none", "--openai-base-url", "{}/v1", "-m", MODEL,
)  # fmt: skip
_QWEN_SET = json.dumps({"model": {"generationConfig": {"modalities": {"image": True}}}})
_CODEX_SET = """\
model = "fake"
model_provider = "kt"
[model_providers.kt]
name = "kt"
base_url = "{}/v1"
wire_api = "responses"
"""
_CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_OPENCODE_SET = json.dumps(
    {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "kt": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "{}/v1", "apiKey": "none"},
                "models": {MODEL: {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}},
            }
        },
    }
)  # fmt: skip
_CONTINUE_SET = (
    "name: kt\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: fake\n    provider: openai\n    model: fake\n"
    "    apiBase: {}/v1\n    apiKey: none\n    capabilities: [tool_use, image_input]\n"
)
_AIDER = (
    "--model", "openai/fake", "--openai-api-base", "{}/v1", "--openai-api-key", "none", "--no-git", "--yes-always",
    "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-stream", "--no-pretty",
    "--restore-chat-history",
)  # fmt: skip
AGENTS = {
    "Claude Code": Agent(
        "claude", "/v1/messages", ("Read", "file_path"), True,
        [*_CLAUDE, ASKED], [*_CLAUDE, "--continue", AGAIN],
        environment={
            "ANTHROPIC_BASE_URL": "{}", "ANTHROPIC_AUTH_TOKEN": "none", "IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "Codex": Agent(
        "codex", "/v1/responses", ("view_image", "path"), True,
        [*_CODEX, ASKED], [*_CODEX, "resume", "--last", AGAIN], {".codex/config.toml": _CODEX_SET},
    ),
    "OpenCode": Agent(
        "opencode", "/v1/chat/completions", ("read", "filePath"), True,
        ["run", "-m", f"kt/{MODEL}", ASKED], ["run", "-m", f"kt/{MODEL}", "--continue", AGAIN],
        {".config/opencode/opencode.json": _OPENCODE_SET},
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "Qwen Code": Agent(
        "qwen", "/v1/chat/completions", ("read_file", "file_path"), True,
        [*_QWEN, ASKED], [*_QWEN, "--continue", AGAIN],
        {".qwen/settings.json": _QWEN_SET},
    ),
    "Continue": Agent(
        "cn", "/v1/chat/completions", ("Read", "filepath"), False,
        ["-p", "--auto", "--config", ".continue/config.yaml", ASKED],
        ["-p", "--auto", "--config", ".continue/config.yaml", "--resume", AGAIN],
        {".continue/config.yaml": _CONTINUE_SET}, {"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    "aider": Agent(
        "aider", "/v1/chat/completions", ("", ""), False, [*_AIDER, "--message", ASKED], [*_AIDER, "--message", AGAIN],
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
}  # fmt: skip


def program(agent: Agent) -> str | None:
    """The path of an agent's program; None: it is not here."""
    folder = Path(os.environ.get("KT_TEST_AGENTS", "/nonexistent"))
    places = (folder / "node_modules/.bin", folder / agent.program / "bin")
    return shutil.which(
        agent.program, path=os.pathsep.join([*map(str, places), os.environ["PATH"]])
    )


class LongEngine(FakeEngine):
    """Says what `answer` returns for a prompt, and reads prompts of agents in seconds.

    Attributes:
        prompts: what it was asked, as text.
    """

    def __init__(self, tokenizer: Any, answer: Callable[[str], str]) -> None:
        super().__init__(tokenizer, lambda question: "", CONTEXT, CONTEXT, streams=3)
        self.max_tokens, self.max_rows = CHUNK, CHUNK + self.max_outputs
        self.piece_times = PieceTimes.assumed(CHUNK)
        self.prompts: list[str] = []
        self._answer = answer
        self._replies: dict[int, list[int]] = {}

    def chunk_tokens(self, left: int) -> int:
        return min(left, CHUNK)

    def _run(self, run: Run) -> list[Logits]:
        for at, id in enumerate(run.ids.tolist(), run.start):
            self._ids[run.pages[at // 64], at % 64] = id
        if run.first_output >= run.ids.size:
            return []
        whole = self._ids[run.pages].ravel()
        return [
            Logits.of(self._row(whole[: run.start + at + 1]), run.temperature)
            for at in range(run.first_output, run.ids.size)
        ]

    def _row(self, ids: Any) -> Any:
        begins = int(np.flatnonzero(ids == self.tokenizer.id_of("<|assistant|>"))[-1]) + 1
        key = zlib.crc32(ids[:begins].tobytes())
        if key not in self._replies:
            prompt = self.tokenizer.decode(ids[:begins].tolist(), special=True)
            self.prompts.append(prompt)
            reply = self.tokenizer.encode(self._answer(prompt))
            self._replies[key] = [*reply, self.tokenizer.id_of("<|end|>")]
        out = np.full(VOCAB, -10, dtype=np.float32)
        reply = self._replies[key]
        out[reply[min(len(ids) - begins, len(reply) - 1)]] = 10
        return out


@dataclass
class Watched:
    """A server that an agent uses.

    Attributes:
        log: an entry for each request.
        bodies: of all requests, in the order in which they came.
    """

    server: Running
    engine: LongEngine
    log: list[dict[str, Any]]
    bodies: list[bytes]


@contextmanager
def watched(folder: Path, answer: Callable[[str], str]) -> Iterator[Watched]:
    """Serves a model that answers prompts as it is told, while the context lasts."""
    folder.mkdir()
    made = scripted(folder, lambda question: "", template=TEMPLATE)
    engine = LongEngine(made.texts.tokenizer, answer)
    log, bodies, read = list[dict[str, Any]](), list[bytes](), guard._body

    async def noted(*arguments: Any) -> bytes | None:
        body = await read(*arguments)
        bodies.append(body or b"")
        return body

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "_body", noted)
        with running(replace(made, engine=engine), log=log.append) as server:  # type: ignore[arg-type]
            yield Watched(server, engine, log, bodies)


def run(
    agent: Agent, home: Path, url: str, words: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Runs an agent once, in a home and a folder of its own."""
    work = home / "work"
    if not work.exists():
        work.mkdir(parents=True)
        (work / "picture.png").write_bytes(PICTURE)
        for name, text in agent.files.items():
            path = (work if name.startswith(".continue") else home) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{}", url))
    found = program(agent)
    assert found is not None
    given = {name: value.replace("{}", url) for name, value in agent.environment.items()}
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TERM": "dumb",
        "CI": "1",
        "NO_PROXY": "*",
        **given,
    }
    return subprocess.run(
        [found, *(word.replace("{}", url) for word in words)],
        cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
