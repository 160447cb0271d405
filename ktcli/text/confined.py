"""Runs a tokenizer in a helper process, whose memory and processor time are limited and which can be killed.

Tokenizers that nobody has looked at (`components`) run here. The helper is this module run by the same Python; it is
given the file's text on its standard input, and answers requests, one line of JSON each. When it dies, by its limits or
by a fault of the library, the caller gets one sentence, and the next call starts another. Ctrl-C kills it at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ktcli.interrupt import stoppable
from ktcli.text.codec import AddedToken, Codec, Encoded, LibraryCodec

# Address space of the helper; the largest published tokenizer takes a third of it.
MEMORY_BYTES = 1 << 30
LOAD_S = 10  # seconds of processor time
CALL_S = 5  # seconds of processor time that all calls may take beyond
CALL_S_PER_MB = 3  # these for each megabyte of their texts
CALL_S_EACH = 0.05  # and these for each call
TIED = "--tied"
MAX_ANSWER_BYTES = 256 << 20
GLANCE_S = 0.5  # how often a helper that does not answer is looked at
SLEEP_S = 2.0  # how long it may sleep meanwhile


class ConfinedError(Exception):
    """The helper refused, or ended."""


class ConfinedCodec:
    """A `Codec` whose library runs in a helper process.

    Args:
        document: the text of a `tokenizer.json`.
    Raises:
        ConfinedError: the library cannot read it within the limits.
    """

    def __init__(self, document: str) -> None:
        self._document = document
        self._helper: _Helper | None = None
        rows = self._call("added")
        self.added = tuple(AddedToken(*row) for row in rows)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, encoded in the helper process."""
        return list(self._call("encode", text=text))

    def encode_spans(self, text: str) -> Encoded:
        """Returns the token ids of a text, with the place of each token in it, from the helper process."""
        ids, firsts, lasts = self._call("encode_spans", text=text)
        return Encoded(ids, list(zip(firsts, lasts, strict=True)))

    def encode_plain(self, texts: Sequence[str], unknown: Sequence[int]) -> list[list[int]]:
        """Returns the token ids of each text; the added tokens with the ids `unknown` are not recognised in them."""
        return list(self._call("encode_plain", texts=list(texts), unknown=list(unknown)))

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Returns the text that token ids decode to; special tokens are written out if `special` is true, else left
        out.
        """
        return str(self._call("decode", ids=list(ids), special=special))

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, spelled as in the vocabulary; None if there is no such token."""
        found = self._call("id_of", token=token)
        return None if found is None else int(found)

    def word_of(self, id: int) -> str | None:
        """Returns the token with this id, spelled in the letters of the vocabulary; None if there is no such id."""
        found = self._call("word_of", id=id)
        return None if found is None else str(found)

    def _call(self, op: str, **given: Any) -> Any:
        """Returns what a method of the helper's codec returns."""
        if self._helper is None:
            self._helper = _Helper(self._document)
        try:
            return self._helper.ask({"op": op, "given": given})
        except _Refused as error:
            raise ConfinedError(str(error)) from None
        except BaseException:  # it died, or Ctrl-C: the next call starts another
            self._helper.kill()
            self._helper = None
            raise


class RunsCodec:
    """A `Codec` whose library runs here, but in a helper process for texts with long runs of some characters.

    Args:
        here: the library in this process.
        document: the text of its `tokenizer.json`.
        runs: a regular expression of the runs that take its patterns quadratic time.
    """

    def __init__(self, here: LibraryCodec, document: str, runs: str) -> None:
        self._here, self._document = here, document
        self._runs = re.compile(runs)
        self._confined: ConfinedCodec | None = None
        self.added = here.added
        self.decode, self.id_of, self.word_of = here.decode, here.id_of, here.word_of

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text; one with long runs of some characters is encoded in the helper process."""
        return self._for(text).encode(text)

    def encode_spans(self, text: str) -> Encoded:
        """Returns the token ids of a text, with the place of each token in it."""
        return self._for(text).encode_spans(text)

    def encode_plain(self, texts: Sequence[str], unknown: Sequence[int]) -> list[list[int]]:
        """Returns the token ids of each text; the added tokens with the ids `unknown` are not recognised in them."""
        return self._for("".join(texts)).encode_plain(texts, unknown)

    def _for(self, text: str) -> Codec:
        if not self._runs.search(text):
            return self._here
        self._confined = self._confined or ConfinedCodec(self._document)
        return self._confined


class _Refused(Exception):
    """The library raised; the helper goes on."""


class _Helper:
    """A helper process that has read the tokenizer."""

    def __init__(self, document: str) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ktcli.text.confined", *_tied()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the caller, who kills it
        )
        self._end = weakref.finalize(self, _kill, self._process)
        try:
            self.ask({"document": document})
        except BaseException as error:
            self.kill()
            if isinstance(error, _Refused):
                raise ConfinedError(str(error)) from None
            raise

    def ask(self, request: dict[str, Any]) -> Any:
        """Returns the answer to a request; waits as long as the helper's processor time lasts."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            with stoppable():
                self._wait()
                line = self._process.stdout.readline(MAX_ANSWER_BYTES)
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise ConfinedError(self._why())
        answer = json.loads(line)
        if "error" in answer:
            raise _Refused(str(answer["error"]))
        return answer["value"]

    def _wait(self) -> None:
        """Waits for the beginning of an answer; ends a helper that sleeps, as a library does that has no memory left to
        say so."""
        assert self._process.stdout is not None
        slept = 0.0
        while not select.select([self._process.stdout], [], [], GLANCE_S)[0]:
            slept = slept + GLANCE_S if _sleeps(self._process.pid) else 0.0
            if slept >= SLEEP_S:
                self._process.kill()

    def _why(self) -> str:
        """Returns the reason why the helper ended, or has to."""
        self._process.kill()
        status = self._process.wait()
        if -status == signal.SIGXCPU:
            return "it takes more processor time than any published tokenizer"
        return f"it takes more than {MEMORY_BYTES >> 20:,} MiB of memory, or is damaged"

    def kill(self) -> None:
        self._end()


def _tied() -> list[str]:
    """Returns the arguments of a helper that is to end with the thread that starts it: the main one, which lasts."""
    return [TIED] if threading.current_thread() is threading.main_thread() else []


def _sleeps(process: int) -> bool:
    """Returns whether a process waits for something else than a processor or a disk."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "S"


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    process.wait()


_PR_SET_PDEATHSIG = 1


# --- the helper -----------------------------------------------------------------------------------


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started it may block all
    if TIED in sys.argv:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    codec: LibraryCodec | None = None
    spare = float(CALL_S)
    for line in requests:
        began = _spent()
        granted = CALL_S_EACH + CALL_S_PER_MB * len(line) / 1e6
        _allow(LOAD_S if codec is None else spare + granted)
        try:
            request = json.loads(line)
            if codec is None:
                codec, value = _read(request["document"]), None
            else:
                if request["op"] == "encode_plain":
                    _allow(LOAD_S)  # it may make a second tokenizer
                    codec.prepare(request["given"]["unknown"])
                    began = _spent()
                    _allow(spare + granted)
                value = _answer(codec, request)
                spare = min(CALL_S, spare + granted - (_spent() - began))
            answer: dict[str, Any] = {"value": value}
        except MemoryError:
            os._exit(1)
        except BaseException as error:  # the library's panics are no Exceptions
            answer = {"error": " ".join(str(error).split())[:150]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if codec is None:
            return


def _spent() -> float:
    """Returns the processor time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _allow(seconds: float) -> None:
    """Grants `seconds` more of processor time, after which SIGXCPU ends the process."""
    _limit(resource.RLIMIT_CPU, max(1, int(_spent() + seconds) + 1))


def _limit(kind: int, most: int) -> None:
    """Limits a resource, or leaves it at what this process may have at most."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _read(document: str) -> LibraryCodec:
    import tokenizers

    return LibraryCodec(tokenizers.Tokenizer.from_str(document))


def _answer(codec: LibraryCodec, request: dict[str, Any]) -> Any:
    if request["op"] == "added":
        return [(token.id, token.text, token.special) for token in codec.added]
    found = getattr(codec, request["op"])(**request["given"])
    if isinstance(found, Encoded):  # pairs would be three times as large when read again
        return found.ids, [first for first, _ in found.spans], [last for _, last in found.spans]
    return found


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
