"""Lists the commands: one row each, imported only when it runs.

A row names a function with typed parameters (its docstring is the help text), or a `typer.Typer` for a
family of verbs. Order and headings are those of `kt --help`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

from ktcli.records import dataclass

if TYPE_CHECKING:
    from typer.core import TyperCommand

# click's settings for every command.
CONTEXT: dict[Any, Any] = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True, slots=True)
class Row:
    """A command: its module, and its line in `kt --help`."""

    target: str  # "module:function", below `ktcli.commands`
    summary: str = ""  # the first line of the function's docstring; empty: hidden from the help
    least_bytes: int = 0  # with less address space its libraries end the process without an error
    optional: tuple[str, ...] = ()  # options whose value may be left out; it is then empty
    modes: str = "json quiet"  # which of these options it has without declaring them


# Measured with limits of the address space from 60 MiB on, in steps of 50: numpy alone ends the process at 100 MiB,
# tokenizers and llguidance do at 150.
_ARRAYS, _ENGINE = 160 << 20, 256 << 20

# The commands below each heading of `kt --help`, in the order in which somebody new meets them; without one: hidden.
HEADINGS: dict[str, dict[str, Row]] = {
    "Start": {
        "chat": Row(
            "chat.chat:chat", "Talk to a model.", _ENGINE, optional=("--resume",), modes=""
        ),
        "serve": Row(
            "serve.serve:serve",
            "Serve a model to programs that speak OpenAI's, Anthropic's or Ollama's API.",
            _ENGINE,
        ),
        "route": Row(
            "serve.route:route",
            "Route requests to several servers, by what each has in its cache.",
            _ARRAYS,
        ),
        "store": Row("serve.store:app", "Run a KV store for several servers.", _ARRAYS),
        "ps": Row("serve.servers:ps", "List the running servers of this library."),
        "stop": Row("serve.servers:stop", "Stop servers of this library."),
        "doctor": Row(
            "doctor:doctor", "Show what this machine is and can do.", _ARRAYS, modes="json"
        ),
        "plan": Row(
            "plan:plan",
            "Show which models run here, or where one model goes and how fast it is.",
            _ARRAYS,
            modes="json",
        ),
    },
    "Models": {
        "search": Row(
            "search:search", "Find models by name, in the catalogue and on the hubs.", _ARRAYS
        ),
        "pull": Row("pull:pull", "Download a model into the library.", _ARRAYS),
        "convert": Row(
            "convert:convert", "Convert a checkpoint into the files that kt runs.", _ENGINE
        ),
        "list": Row("library.list:list_models", "List the models in the library."),
        "alias": Row(
            "library.alias:alias", "Give a model a name of your own, or list these names."
        ),
        "show": Row("show:show", "Show what a model is and what it needs.", _ARRAYS, modes="json"),
        "verify": Row("library.verify:verify", "Check a model's files against their hashes."),
        "rm": Row("library.rm:rm", "Remove a model and free its space."),
        "prune": Row("library.rm:prune", "Remove what interrupted work left behind."),
        "du": Row("library.rm:du", "Show how much disk space each model takes."),
        "path": Row(
            "library.list:path", "Print the folder of a model, or of the library.", modes="json"
        ),
        "export": Row(
            "library.bundle:export", "Write a model to a file, for machines without a network."
        ),
        "import": Row(
            "library.bundle:import_bundle", "Import a model from a file written by kt export."
        ),
        "adapter": Row(
            "adapter:app", "Import LoRA adapters, list, check and convert them.", _ARRAYS
        ),
        "finetune": Row("finetune:finetune", "Train an adapter on your data.", _ENGINE),
        "placement": Row(
            "placement:app",
            "Translate placements of other programs into rules for --placement.",
            _ARRAYS,
        ),
        "engine": Row(
            "engine:app",
            "Install programs by others that kt starts, each in an environment of its own.",
        ),
        "cache": Row("library.cache:app", "Show, check and remove the KV pages on disk.", _ARRAYS),
    },
    "Chats": {
        "chats": Row("chats:app", "List saved conversations, and change them.", _ARRAYS),
    },
    "Measure": {
        "bench": Row(
            "bench.speed:app", "Measure speed, even of models that are not downloaded.", _ENGINE
        ),
        "eval": Row(
            "eval.eval:evaluate",
            "Measure how well a model predicts text and answers questions.",
            _ENGINE,
        ),
    },
    "Shell": {
        "config": Row("config:app", "Show and change the settings."),
        "completion": Row(
            "completion:completion",
            "Install shell completion of commands, options and names.",
            modes="json",
        ),
    },
    "": {
        "logits": Row("logits:logits", least_bytes=_ENGINE, modes="json"),
        "names": Row("names:names", modes="json"),
    },
}
COMMANDS = {name: row for rows in HEADINGS.values() for name, row in rows.items()}


def load(name: str) -> Any:
    """Returns the click command for one row of the table of commands, with its module imported."""
    import typer

    from ktcli.commands.cli.options import declared

    module, _, attribute = COMMANDS[name].target.partition(":")
    target = getattr(import_module(f"ktcli.commands.{module}"), attribute)
    if isinstance(target, typer.Typer):
        app = target
        app.info.context_settings, app.info.help = CONTEXT, COMMANDS[name].summary
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=CONTEXT)
        target = declared(target, COMMANDS[name].modes)
        texts = {n for n, hint in get_type_hints(target).items() if hint in (str, str | None)}
        kind = _kind_of_command(COMMANDS[name].optional, texts)
        app.command(name, cls=kind, context_settings=CONTEXT)(target)
    command = typer.main.get_command(app)
    command.name = name
    _in_our_words(command)
    return command


def _kind_of_command(options: tuple[str, ...], texts: Collection[str]) -> type[TyperCommand]:
    """The class of a command that gives these options an empty value where they have none, and takes these parameters
    as texts."""
    from typer.core import TyperCommand

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return list(super().parse_args(ctx, _filled(args, options)))

        def get_params(self, ctx: Any) -> list[Any]:
            return trusted(super().get_params(ctx), texts)

    return Command


def _filled(args: list[str], options: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for at, word in enumerate(args):
        if word == "--":
            return [*found, *args[at:]]
        found.append(word)
        following = args[at + 1 : at + 2]
        if word in options and (not following or following[0].startswith("-")):
            found.append("")
    return found


def trusted(parameters: Iterable[Any], texts: Collection[str] = ()) -> list[Any]:
    """Returns the click parameters of a command, changed so that typer checks only values that were typed: defaults,
    and the parameters named in `texts`, are taken as valid.
    """
    found = list(parameters)
    for parameter in found:
        if "process_value" not in vars(parameter):
            parameter.process_value = _trusting(parameter, is_text=parameter.name in texts)
    return found


def _trusting(parameter: Any, *, is_text: bool) -> Callable[[Any, Any], Any]:
    check: Callable[[Any, Any], Any] = parameter.process_value

    def process(context: Any, value: Any) -> Any:
        source = getattr(context.get_parameter_source(parameter.name), "name", "")
        if value is None and not parameter.required:
            value = () if parameter.multiple or parameter.nargs == -1 else None
        elif value is None or not (source == "DEFAULT" or (is_text and isinstance(value, str))):
            return check(context, value)
        call = parameter.callback
        return value if call is None else call(context, parameter, value)

    return process


def _in_our_words(command: Any) -> None:
    """Gives a command and those below it the help of `help.render`."""

    def write(context: Any, formatter: Any) -> None:
        from ktcli.commands.cli import help  # only a command that is asked for help needs it

        known = command.get_params(context)
        formatter.write(help.render(context.command_path, command, known, help.columns()))

    command.format_help = write
    for child in getattr(command, "commands", {}).values():
        _in_our_words(child)
