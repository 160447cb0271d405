"""A program in the place of SGLang that answers as it does, in all its failures, and the source of its flags."""

from __future__ import annotations

from pathlib import Path

from server.standins import StandIn, make_environment

from ktcli.server.sglang.flags import SWITCH, FlagTable, recorded
from ktcli.server.sglang.line import EngineOption, ServerLine
from ktcli.server.sglang.supervision import EngineSettings
from ktcli.store import engines

# It does what it is told by the file `behaviour` beside it: "ok", or how it fails. It writes down its command line, as
# it got it and as others see it, and starts a worker, as SGLang starts its schedulers.
FAKE = """
import json, os, pathlib, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
here = pathlib.Path(__file__).parent
how = (here / "behaviour").read_text().split()
starts = here / "starts"
starts.write_text(f"{starts.read_text() if starts.exists() else ''}{os.getpid()}\\n")
(here / "words").write_text(json.dumps(sys.argv[1:]))
(here / "seen").write_bytes(pathlib.Path("/proc/self/cmdline").read_bytes())
worker = subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(60)"])
workers = here / "workers"
workers.write_text(f"{workers.read_text() if workers.exists() else ''}{worker.pid}\\n")
def option(name, default=""):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
def say(line):
    print(f"[2026-11-28 22:00:00 TP0] {line}", flush=True)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 47 GiB"
LAST = {
    "oom": OOM,
    "missing": "OSError: /models/x does not appear to have a file named config.json",
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error",
    "port": "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
    "driver": "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    "flags": "launch_server.py: error: unrecognized arguments: --kt-weight-path",
    "strange": "ValueError: something that nobody has seen before",
}
def die(what, code=1):
    print("Traceback (most recent call last):\\n  File \\"x.py\\", line 1, in <module>", flush=True)
    say(LAST.get(what, what))
    os._exit(code)
say("server_args=ServerArgs(model_path='/models/x')")
if how[0] == "start":
    die(how[1])
if how[0] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how[0] == "zombie":
    say("a scheduler is dead, and its parent ends without it")
    os._exit(1)
if how[0] == "log":
    line = b"x" * 999 + b"\\n"
    for _ in range(int(how[1]) // 1000):
        os.write(1, line)
ready_s = time.monotonic() + float(option("--fake", "0.0"))
wedged = threading.Event()
class Handler(BaseHTTPRequestHandler):
    def reply(self, status, said, kind="application/json"):
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def allowed(self):
        key = option("--api-key")
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.reply(401, {"error": "Unauthorized"})
    def do_GET(self):
        if wedged.is_set():
            time.sleep(60)
        if self.path == "/health":
            self.reply(200 if how[0] != "slow" else 503, b"")
        elif self.path == "/metrics":
            self.reply(200, b'sglang:num_running_reqs{model_name="m"} 3.0\\nsglang:num_queue_reqs 1.0\\n', "text/plain")
        elif self.allowed() and self.path == "/v1/models":
            context = int(option("--context-length"))
            row = {"id": option("--served-model-name"), "object": "model", "max_model_len": context}
            self.reply(200, {"object": "list", "data": [row]})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if how[0] == "load":
            die(how[1])
        if how[0] == "wedge":
            wedged.set()
            time.sleep(60)
        if not self.allowed():
            return
        rows = [{"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "Hello."}}]
        rows += [{"delta": {}, "finish_reason": "stop"}]
        text = ""
        for row in rows:
            choice = {"index": 0, "finish_reason": None, **row}
            said = {"id": "1", "object": "chat.completion.chunk", "choices": [choice]}
            text += f"data: {json.dumps(said)}\\n\\n"
        text += "data: [DONE]\\n\\n"
        self.reply(200, text.encode(), "text/event-stream")
    def log_message(self, *_): ...
if how[0] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (worker.kill(), os._exit(0)))
server = ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
say("The server is fired up and ready to roll!")
while how[0] != "later" or not (here / "dies").exists():
    time.sleep(0.02 if how[0] == "later" else 1)
die(how[1])
"""


def source_of(table: FlagTable) -> str:
    """The source of a `server_args.py` with the flags of a table, written as SGLang's is."""
    types = {
        "int": "int",
        "float": "float",
        "json": "json.loads",
        "text": "str",
        "other": "nullable_str",
    }
    lines = [
        "import argparse",
        "import dataclasses",
        "import json",
        "",
        "@dataclasses.dataclass",
        "class ServerArgs:",
    ]
    lines += [
        "    host: str = '127.0.0.1'",
        "",
        "    @staticmethod",
        "    def add_cli_args(parser):",
    ]
    for flag in table.flags:
        words = [repr(name) for name in flag.names]
        if flag.kind == SWITCH:
            words.append("action='store_true'")
        else:
            words.append(f"type={types[flag.kind]}")
        if flag.nargs:
            words.append(f"nargs={flag.nargs!r}")
        if flag.choices is not None:
            words.append(f"choices={list(flag.choices)!r}")
        if flag.required:
            words.append("required=True")
        lines.append(f"        parser.add_argument({', '.join(words)})")
    return "\n".join(lines) + "\n"


class FakeSglang(StandIn):
    """An environment with a program in the place of SGLang."""

    @property
    def server_args(self) -> Path:
        """The source of its flags."""
        return self.package / "srt" / "server_args.py"


def install_fake() -> FakeSglang:
    """Puts a program in the place of SGLang into the library."""
    row = engines.row_of("sglang-kt")
    packages = make_environment(row, engines.path_of(row))
    (packages / "sglang" / "srt").mkdir(parents=True)
    (packages / "sglang" / "__init__.py").touch()
    (packages / "sglang" / "launch_server.py").write_text(FAKE, encoding="utf-8")
    (packages / "sglang" / "srt" / "server_args.py").write_text(
        source_of(recorded()), encoding="utf-8"
    )
    fake = FakeSglang(packages / "sglang")
    fake.does("ok")
    return fake


def settings_at(port: int, folder: Path, key: str = "") -> EngineSettings:
    options = [
        EngineOption("--host", ("127.0.0.1",)),
        EngineOption("--port", (str(port),)),
        EngineOption("--served-model-name", ("qwen",)),
        EngineOption("--context-length", ("8192",)),
    ]
    options += [EngineOption("--api-key", (key,), secret=True)] if key else []
    engine = engines.require("sglang-kt")
    line = ServerLine(tuple(options), {"CUDA_VISIBLE_DEVICES": "0"})
    return EngineSettings(
        engine, line, "qwen", 8192, f"http://127.0.0.1:{port}", 0.2, folder / "log"
    )
