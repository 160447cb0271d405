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
    """A command: its module, its line in `kt --help`, and its heading there."""

    target: str  # "module:function"
    summary: str = ""  # the first line of the function's docstring; empty: hidden from the help
    heading: str = ""
    optional: tuple[str, ...] = ()  # options whose value may be left out; it is then empty
    least_bytes: int = 0  # with less address space its libraries end the process without an error


# Measured with limits of the address space from 60 MiB on, in steps of 50: numpy alone ends the process at 100 MiB,
# tokenizers and llguidance do at 150.
_ARRAYS, _ENGINE = 160 << 20, 256 << 20

# In the order in which somebody new meets them.
COMMANDS: dict[str, Row] = {
    "chat": Row(
        "ktcli.commands.chat.chat:chat",
        "Talk to a model.",
        "Start",
        ("--resume",),
        least_bytes=_ENGINE,
    ),
    "serve": Row(
        "ktcli.commands.serve.serve:serve",
        "Serve a model to programs that speak OpenAI's, Anthropic's or Ollama's API.",
        "Start",
        least_bytes=_ENGINE,
    ),
    "route": Row(
        "ktcli.commands.serve.route:route",
        "Route requests to several servers, by what each has in its cache.",
        "Start",
        least_bytes=_ARRAYS,
    ),
    "store": Row(
        "ktcli.commands.serve.store:app",
        "Run a KV store for several servers.",
        "Start",
        least_bytes=_ARRAYS,
    ),
    "ps": Row(
        "ktcli.commands.serve.servers:ps", "List the running servers of this library.", "Start"
    ),
    "stop": Row("ktcli.commands.serve.servers:stop", "Stop servers of this library.", "Start"),
    "doctor": Row(
        "ktcli.commands.doctor:doctor",
        "Show what this machine is and can do.",
        "Start",
        least_bytes=_ARRAYS,
    ),
    "plan": Row(
        "ktcli.commands.plan:plan",
        "Show which models run here, or where one model goes and how fast it is.",
        "Start",
        least_bytes=_ARRAYS,
    ),
    "search": Row(
        "ktcli.commands.search:search",
        "Find models by name, in the catalogue and on the hubs.",
        "Models",
        least_bytes=_ARRAYS,
    ),
    "pull": Row(
        "ktcli.commands.pull:pull",
        "Download a model into the library.",
        "Models",
        least_bytes=_ARRAYS,
    ),
    "convert": Row(
        "ktcli.commands.convert:convert",
        "Convert a checkpoint into the files that kt runs.",
        "Models",
        least_bytes=_ENGINE,
    ),
    "list": Row(
        "ktcli.commands.library.list:list_models", "List the models in the library.", "Models"
    ),
    "alias": Row(
        "ktcli.commands.library.alias:alias",
        "Give a model a name of your own, or list these names.",
        "Models",
    ),
    "show": Row(
        "ktcli.commands.show:show",
        "Show what a model is and what it needs.",
        "Models",
        least_bytes=_ARRAYS,
    ),
    "verify": Row(
        "ktcli.commands.library.verify:verify",
        "Check a model's files against their hashes.",
        "Models",
    ),
    "rm": Row("ktcli.commands.library.rm:rm", "Remove a model and free its space.", "Models"),
    "prune": Row(
        "ktcli.commands.library.prune:prune", "Remove what interrupted work left behind.", "Models"
    ),
    "du": Row(
        "ktcli.commands.library.du:du", "Show how much disk space each model takes.", "Models"
    ),
    "path": Row(
        "ktcli.commands.library.path:path",
        "Print the folder of a model, or of the library.",
        "Models",
    ),
    "export": Row(
        "ktcli.commands.library.bundle:export",
        "Write a model to a file, for machines without a network.",
        "Models",
    ),
    "import": Row(
        "ktcli.commands.library.bundle:import_bundle",
        "Import a model from a file written by kt export.",
        "Models",
    ),
    "adapter": Row(
        "ktcli.commands.adapter:app",
        "Import LoRA adapters, list, check and convert them.",
        "Models",
        least_bytes=_ARRAYS,
    ),
    "finetune": Row(
        "ktcli.commands.finetune:finetune",
        "Train an adapter on your data.",
        "Models",
        least_bytes=_ENGINE,
    ),
    "placement": Row(
        "ktcli.commands.placement:app",
        "Translate placements of other programs into rules for --placement.",
        "Models",
        least_bytes=_ARRAYS,
    ),
    "engine": Row(
        "ktcli.commands.engine:app",
        "Install programs by others that kt starts, each in an environment of its own.",
        "Models",
    ),
    "cache": Row(
        "ktcli.commands.library.cache:app",
        "Show, check and remove the KV pages on disk.",
        "Models",
        least_bytes=_ARRAYS,
    ),
    "chats": Row(
        "ktcli.commands.chats:app",
        "List saved conversations, and change them.",
        "Chats",
        least_bytes=_ARRAYS,
    ),
    "bench": Row(
        "ktcli.commands.bench.speed:app",
        "Measure speed, even of models that are not downloaded.",
        "Measure",
        least_bytes=_ENGINE,
    ),
    "eval": Row(
        "ktcli.commands.eval.eval:evaluate",
        "Measure how well a model predicts text and answers questions.",
        "Measure",
        least_bytes=_ENGINE,
    ),
    "config": Row("ktcli.commands.config:app", "Show and change the settings.", "Shell"),
    "completion": Row(
        "ktcli.commands.completion:completion",
        "Install shell completion of commands, options and names.",
        "Shell",
    ),
    "logits": Row("ktcli.commands.logits:logits", least_bytes=_ENGINE),
    "names": Row("ktcli.commands.names:names"),
}


def load(name: str) -> Any:
    """Returns the click command of one row, with its module imported."""
    import typer

    module, _, attribute = COMMANDS[name].target.partition(":")
    target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        app = target
        app.info.context_settings = CONTEXT
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=CONTEXT)
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
    """Returns the parameters with typer's checks limited to what was typed and is not text: defaults, and the
    parameters named as `texts`, are valid. Later versions check with a library whose import takes longer than all else
    before a command runs.
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
