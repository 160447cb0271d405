"""The program `kt`: runs a command line and handles every failure.

Commands are rows of one table and are imported only when they run, so that `kt --help` costs nothing. `KtError` becomes
one sentence, a hint and its exit code; a closed pipe ends quietly; anything else is our mistake, said in one sentence
(the traceback appears under KT_DEBUG=1). `ExitCode` has the codes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import threading
from collections.abc import Sequence

from ktcli.errors import ExitCode, KtError, NoMemoryLeft, gib
from ktcli.output import Mode, out, visible

# How the linker, C libraries and the interpreter say that there is no memory for code or for another thread.
_NO_MEMORY = ("failed to map", "cannot allocate", "Cannot allocate", "can't start new thread")
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # by a disk


def main(arguments: Sequence[str]) -> int:
    """Runs the command line with these arguments (without the name of the program); returns its exit code."""
    options = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    # Errors in the command line itself come before the option is read.
    out.mode = Mode.JSON if "--json" in options else Mode.HUMAN
    out.says_yes = False
    out.logs_json = "--log-json" in options
    try:
        return _invoke(list(arguments))
    except KtError as error:
        return _fail(error)
    except KeyboardInterrupt as stop:
        # A command that has something to say about going on raises it again with a sentence.
        return _fail(_with_code(KtError("interrupted", hint=str(stop)), ExitCode.INTERRUPTED))
    except BrokenPipeError:
        # The reader is gone: keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OK
    except Exception as error:
        return _fail(_no_memory(), error) if _lacks_memory(error) else _internal(error)
    finally:
        _remember()


def _invoke(arguments: list[str]) -> int:
    """Runs a command, or shows the front page or the version, for which no library has to parse a command line."""
    if arguments in ([], ["-h"], ["--help"]):
        from ktcli.commands.cli import front, help

        if not arguments:
            _complain()
        sys.stdout.write(front.page(help.columns()) + "\n")
        return ExitCode.OK
    if arguments == ["--version"]:
        from ktcli.commands.cli import version

        version.show()
        return ExitCode.OK
    from ktcli.commands.cli import group

    return group.invoke(arguments, _complain)


def _complain() -> None:
    """Warns of what is wrong in the settings file; the command goes on without that."""
    from ktcli import settingsfile

    if sentence := settingsfile.complaint(settingsfile.path()):
        out.warn(sentence, hint="kt config edit opens it; kt config list shows all settings")


def _remember() -> None:
    """Notes where the library is, so that it is missed when its disk is not mounted."""
    if "ktcli.config" not in sys.modules:  # nobody asked for it
        return
    try:
        from ktcli import config, homes
    except (ImportError, MemoryError):  # there is no memory for it
        return
    with contextlib.suppress(KtError, OSError, MemoryError):
        homes.remember(config.home())


def _fail(error: KtError, cause: BaseException | None = None) -> int:
    """Prints an error, under KT_DEBUG with the traceback of its cause, and returns its exit code."""
    if os.environ.get("KT_DEBUG"):
        import traceback

        sys.stderr.write(visible("".join(traceback.format_exception(cause or error))))
    with contextlib.suppress(OSError):  # nobody listens: the exit code says it all the same
        out.error(error)
    return error.exit_code


def _lacks_memory(error: BaseException | None) -> bool:
    """Returns whether an exception, or the one that it came from, is how the system says that there is no memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError | RuntimeError):
        said = str(error)
        return any(words in said for words in _NO_MEMORY) or _lacks_memory(error.__cause__)
    return isinstance(error, MemoryError)


def _no_memory() -> KtError:
    """The error of a system that has no memory left for this process."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return NoMemoryLeft("the system is out of memory")
    return NoMemoryLeft(
        f"the memory limit of {gib(most)} (ulimit -v) is too low",
        hint="raise the limit: ulimit -v unlimited; kt plan MODEL shows what a model needs",
    )


def _internal(error: Exception) -> int:
    """Prints an exception nobody expected, our mistake or the system's, and returns its exit code."""
    if isinstance(error, OSError) and error.errno in _REFUSED and not error.filename:
        # A file that cannot be written has a name; what is printed has none.
        said = KtError(
            f"cannot write the output: {error.strerror}", hint="write to a disk with free space"
        )
    elif isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        said = KtError(f"{where}{error.strerror}")
    else:
        first = (str(error).splitlines() or [""])[0][:300]
        hint = "run the command again with KT_DEBUG=1 for a traceback, and report both"
        said = KtError(f"internal error ({type(error).__name__}: {first})", hint=hint)
        said = _with_code(said, ExitCode.INTERNAL)
    return _fail(said, error)


def _with_code(error: KtError, code: ExitCode) -> KtError:
    error.exit_code = code
    return error


def run() -> None:
    """Runs the command line of this process and exits with its code; called by `ktcli.start`."""
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:  # a pipe without a reader, or a full disk
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not isinstance(error, BrokenPipeError):
                code = code or _internal(error)
    if code == ExitCode.INTERRUPTED and threading.active_count() > 1:
        # The interpreter would wait for a hub client's threads until their files are done.
        os._exit(code)
    sys.exit(code)
