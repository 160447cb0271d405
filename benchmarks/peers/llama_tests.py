"""Runs llama.cpp's own tests of its server against `kt serve kt-mini`, and counts them.

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python==0.3.36 && tar xzf llama_cpp_python-*.tar.gz
    python -m benchmarks.peers.llama_tests llama_cpp_python-0.3.36/vendor/llama.cpp [NAME ...]

Nothing of llama.cpp is kept here: its tests are copied into a folder of their own, where `utils.py` starts kt with what
is equivalent to llama-server's options (an alias presets sampling). Words and token counts of llama.cpp's small model
may be any others, and so may the number of steps in which a prompt is read; nothing else is loosened. Which of the rest
apply is for a person to judge: docs/serving.md has the reasons.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = (
    "chat_completion compat_anthropic compat_oai_responses template tokenize tool_call completion embedding security "
    "basic ctx_shift"
).split()
# `utils.py` of the copy; the original is beside it as `llama_utils.py`.
_UTILS = '''
import atexit, hashlib, json, os, shutil, socket, subprocess, sys, time
from pathlib import Path
import llama_utils
from llama_utils import *
from llama_utils import ServerPreset, ServerProcess, server_instances

ROOT, HERE = Path("{root}"), Path(__file__).parent
# Templates that llama-server has by name.
LLAMA3 = (
    "{{{{ bos_token }}}}{{% for m in messages %}}<|start_header_id|>{{{{ m.role }}}}<|end_header_id|>\\n\\n"
    "{{{{ m.content }}}}<|eot_id|>{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|start_header_id|>assistant<|end_header_id|>\\n\\n{{% endif %}}"
)
COMMAND_R = (
    "{{% for m in messages %}}<|START_OF_TURN_TOKEN|>"
    "<|{{{{ {{'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}}[m.role] }}}}_TOKEN|>"
    "{{{{ m.content }}}}<|END_OF_TURN_TOKEN|>{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{{% endif %}}"
)
CHATML = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\\n{{{{ m.content }}}}<|im_end|>\\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\\n{{% endif %}}"
)
NAMED = {{"llama3": LLAMA3, "command-r": COMMAND_R, "chatml": CHATML}}
# Words that only llama.cpp's small model says.
WORDS = {{"But she couldn't", "(Suddenly)+|\\\\{{ \\" Sarax.", "^ blue", "(Aside|she|felter|alonger)+", "Whillicter",
         "(Suddenly)+", "(\\\\{{|John)+", "[ -3000 ]", "(going|bed)+"}}
KEPT = {{}}


def match_regex(regex, text):
    return bool(text) if regex in WORDS else llama_utils.match_regex(regex, text)


def folder_of(self):
    template = self.chat_template
    if self.chat_template_file:
        template = (Path("{templates}") / Path(self.chat_template_file).name).read_text()
    template = NAMED.get(template, template)
    name = (self.model_alias or "kt-mini").split(",")[0]
    folder = HERE / "models" / hashlib.sha1(repr(template).encode()).hexdigest()[:10] / name
    if self.server_embeddings:
        folder = HERE / "models/embedder" / name
        make = "import sys; from pathlib import Path; from embedders import *; write_embedder(Path(sys.argv[1]))"
        env = {{**os.environ, "PYTHONPATH": str(ROOT / "tests") + ":" + str(ROOT)}}
        if not folder.exists():
            folder.mkdir(parents=True)
            subprocess.run([sys.executable, "-c", make, str(folder)], env=env, check=True, capture_output=True)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({{**config, "max_position_embeddings": 8192}}))
    if not folder.exists():
        shutil.copytree(ROOT / "profiles/kt-mini", folder, ignore=shutil.ignore_patterns("recipe"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({{**config, "max_position_embeddings": 8192}}))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
    return folder


def start(self, timeout_seconds=60):
    preset = ["--temperature", str(self.temperature), "--seed", str(self.seed)]
    preset += ["--max-tokens", str(self.n_predict)] if (self.n_predict or 0) > 0 else []
    if self.reasoning:  # llama-server's `auto` sets the variable, too
        preset += ["--no-think" if self.reasoning == "off" else "--think"]
    # The tokenizer of the embedder has a token for each letter.
    context = (4 if self.server_embeddings else 1) * (self.n_ctx or 2048)
    context //= 1 if self.kv_unified else self.n_slots or 1
    options = ["--context", str(8192 if self.chat_template_file else min(context, 8192))]
    options += ["--parallel", str(self.n_slots or 1)]
    for alias in (self.model_alias or "").split(",")[1:]:
        options += ["--model-alias", alias]
    if self.api_key:
        options += ["--api-key", self.api_key, "--allow-origin", "*"]
    if self.cors_origins:
        hosts = ("localhost", "127.0.0.1", "[::1]")
        for origin in (f"http://{{host}}{{port}}" for host in hosts for port in ("", ":8080", ":3000")):
            options += ["--allow-origin", origin]
    folder = folder_of(self)
    key = repr((str(folder), preset, options))
    fresh = any(word in os.environ.get("PYTEST_CURRENT_TEST", "") for word in ("cache", "progress"))
    if not fresh and key in KEPT:
        self.process, self.server_port = KEPT[key]
        self.kept = True
        server_instances.add(self)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        self.server_port = free.getsockname()[1]
    home = HERE / "homes" / str(self.server_port)
    home.mkdir(parents=True)
    (home / "config.toml").write_text('cache = "0"')
    env = {{**os.environ, "PYTHONPATH": str(ROOT), "KT_HOME": str(home), "KT_CONFIG": str(home / "config.toml")}}
    kt = [sys.executable, "-m", "ktcli"]
    subprocess.run([*kt, "alias", "preset-name", str(folder), *preset], env=env, check=True, capture_output=True)
    command = [*kt, "serve", "preset-name", "--yes", "--port", str(self.server_port), *options]
    log = (home / "log").open("w")
    self.process = subprocess.Popen(command, env=env, cwd=home, stdout=log, stderr=log)
    self.kept = not fresh
    server_instances.add(self)
    begun = time.time()
    while time.time() - begun < timeout_seconds:
        assert self.process.poll() is None, (home / "log").read_text()
        try:
            if llama_utils.requests.get(self.make_url("/health"), timeout=5).ok:
                break
        except llama_utils.requests.RequestException:
            time.sleep(0.05)
    if self.kept:
        KEPT[key] = self.process, self.server_port
        while len(KEPT) > 6:
            _stop(KEPT.pop(next(iter(KEPT)))[0])


def _stop(process):
    process.terminate()
    process.wait(30)


def stop(self):
    server_instances.discard(self)
    if self.process and not self.kept:
        _stop(self.process)
    self.process = None


_request, _stream = ServerProcess.make_request, ServerProcess.make_stream_request


def _on(data):
    """Where llama.cpp's model talks on for 128 tokens, kt-mini would come to its end."""
    return {{**data, "ignore_eos": True}} if data and data.get("max_tokens") == 128 else data


def make_request(self, method, path, data=None, headers=None, **more):
    found = _request(self, method, path, _on(data), headers, **more)
    found.headers = llama_utils.requests.structures.CaseInsensitiveDict(found.headers)
    if self.debug and path == "/chat/completions" and found.status_code == 200:  # kt has a path for the prompt
        prompt = _request(self, "POST", "/apply-template", data, headers).body["prompt"]
        found.body["__verbose"] = {{"prompt": prompt.replace("<|bos|>", "<s> ")}}
    return found


def make_stream_request(self, method, path, data=None, headers=None, host=None):
    return _stream(self, method, path, _on(data), headers, host)


ServerProcess.start, ServerProcess.stop = start, stop
ServerProcess.make_request, ServerProcess.make_stream_request = make_request, make_stream_request
ServerPreset.load_all = staticmethod(lambda: None)
atexit.register(lambda: [_stop(process) for process, _ in KEPT.values()])
'''
_CONFTEST = """

class AnyCount:
    def __eq__(self, other):
        return type(other) is int and other > 0


def pytest_collection_modifyitems(items):
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        params.update({name: AnyCount() for name in ("n_prompt", "n_tokens", "batch_count") if name in params})
"""


def copied(source: Path, folder: Path) -> None:
    """Copies the tests of llama.cpp's sources into a folder, where they start kt."""
    shutil.copytree(source / "tools/server/tests", folder, dirs_exist_ok=True)
    (folder / "utils.py").rename(folder / "llama_utils.py")
    about = {"root": ROOT, "templates": (source / "models/templates").resolve()}
    (folder / "utils.py").write_text(_UTILS.format(**about))
    (folder / "wget.py").write_text("")
    with (folder / "conftest.py").open("a") as conftest:
        conftest.write(_CONFTEST)


def run(folder: Path, name: str) -> tuple[Counter[str], list[str]]:
    """Returns how many tests of a file had which outcome, and the names of those that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-m", "not slow"]
    command += [
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(folder / "temp"),
        f"unit/test_{name}.py",
    ]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (?:unit/\S+?::)?(.*)$", said, re.MULTILINE)
    failed = [test.partition(" - ")[0] for outcome, test in found if outcome in ("FAILED", "ERROR")]
    return Counter(outcome.lower() for outcome, _ in found), failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="folder of llama.cpp's sources")
    parser.add_argument("names", nargs="*", default=NAMES, help="tests, such as tokenize")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kt-llama-tests-") as temp:
        folder = Path(temp) / "tests"
        copied(asked.source, folder)
        for name in asked.names:
            counts, failed = run(folder, name)
            print(f"{name}: {', '.join(f'{n} {kind}' for kind, n in sorted(counts.items()))}")
            for each in failed:
                print(f"    {each}")


if __name__ == "__main__":
    main()
