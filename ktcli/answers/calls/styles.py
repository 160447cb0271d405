"""How families write tool calls: a table of markers, from which one reader reads all of them.

Which row a model follows is seen in its own chat template, which has the marks of its calls: so a new model of a known
style needs no row. Sources: the templates and cards that the makers publish.
"""

from __future__ import annotations

from enum import Enum

from ktcli.records import dataclass


class Arguments(Enum):
    """The forms of arguments."""

    OBJECT = "object"  # a JSON object, or a list of some, with the name and the arguments in it; or calls of Python
    JSON = "json"  # a JSON object behind the name
    PAIRS = "pairs"  # a key and a value between marks, one pair after the other


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The syntax in which a model writes tool calls.

    Attributes:
        name: one of the families that write so.
        told_by: what a chat template has whose model writes so, all of it.
        begin: the mark that opens a call.
        end: the one that closes it; empty: it ends with its arguments.
        name_end: the mark behind the name; empty: the name ends where the first key begins.
        section: the marks around all calls of an answer; between them only calls mean something.
        misspelt: other marks that models write in the place of those of the section.
        key: the marks around a key.
        value: the marks around a value; the first may be empty.
        prefix: what stands before the name and is no part of it.
        bare: whether an answer that begins with an object is a call, without any mark; then `end` is left out.
        keys: the names of the name and of the arguments in an object.
        fence: what stands around the arguments beside the marks.
        indexed: whether the number of the call stands behind the name, as in NAME:0.
        typed: whether each key says if its value is a text, as in string="true".
        tagged: whether the mark behind a value ends with its key and ">", as tags do that are named by their keys.
    """

    name: str
    told_by: tuple[str, ...]
    arguments: Arguments
    begin: str
    end: str = ""
    name_end: str = ""
    section: tuple[str, str] = ("", "")
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    prefix: str = ""
    bare: bool = False
    keys: tuple[str, str] = ("name", "arguments")
    fence: tuple[str, str] = ("", "")
    indexed: bool = False
    typed: bool = False
    tagged: bool = False
    misspelt: tuple[str, str] = ("", "")

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """The (opening, closing) marks around all tool calls of an answer: the documented pair, then the pair that
        models write in its place; empty where the style has none.
        """
        return tuple(pair for pair in (self.section, self.misspelt) if pair[0])

    @property
    def opens(self) -> tuple[str, ...]:
        """The texts with which a tool call, or the section of all tool calls, begins."""
        return (self.begin, *(opening for opening, _ in self.sections))

    def value_end(self, key: str) -> str:
        """Returns the text that marks the end of an argument's value; `key` is the argument's name, which some styles
        repeat in it.
        """
        return f"{self.value[1]}{key}>" if self.tagged else self.value[1]

    @property
    def marks(self) -> tuple[str, ...]:
        """The different texts that mark the parts of a tool call (call, name, section, key, value), none of them
        empty.
        """
        found = (self.begin, self.end, self.name_end, *self.section, *self.key, *self.value)
        return tuple(dict.fromkeys(mark for mark in found if mark))


# gpt-oss names the tool in the head of a message, whose text is the arguments: `Channels` puts both between these.
IN_CHANNELS = CallStyle(
    "gpt-oss", ("<|channel|>", "functions."), Arguments.JSON,
    "<|start|>functions.", "<|end|>", "<|message|>",
)  # fmt: skip
# The first row counts of which a template has all that tells it.
STYLES = (
    IN_CHANNELS,
    CallStyle(
        "kimi-k2", ("<|tool_call_argument_begin|>",), Arguments.JSON,
        "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), prefix="functions.", indexed=True,
        misspelt=("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    ),
    CallStyle(
        "deepseek-v4", ("｜DSML｜", "tool_calls>"), Arguments.PAIRS,
        '<｜DSML｜invoke name="', "</｜DSML｜invoke>", '">',
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        ('<｜DSML｜parameter name="', '"'), (">", "</｜DSML｜parameter>"), typed=True,
    ),
    CallStyle(
        "deepseek-v3.2", ("｜DSML｜",), Arguments.PAIRS,
        '<｜DSML｜invoke name="', "</｜DSML｜invoke>", '">',
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ('<｜DSML｜parameter name="', '"'), (">", "</｜DSML｜parameter>"), typed=True,
    ),
    CallStyle(
        "deepseek-v3", ("<｜tool▁call▁begin｜>", "```json"), Arguments.JSON,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\n",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), fence=("```json\n", "\n```"),
    ),
    CallStyle(
        "deepseek-v3.1", ("<｜tool▁call▁begin｜>",), Arguments.JSON,
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallStyle(
        "minimax-m2", ("minimax:tool_call",), Arguments.PAIRS,
        '<invoke name="', "</invoke>", '">', ("<minimax:tool_call>", "</minimax:tool_call>"),
        ('<parameter name="', '">'), ("", "</parameter>"),
    ),
    CallStyle(
        "minimax-m3", ("]<]minimax[>[",), Arguments.PAIRS,
        ']<]minimax[>[<invoke name="', "]<]minimax[>[</invoke>", '">',
        ("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
        ("]<]minimax[>[<", ">"), ("", "]<]minimax[>[</"), tagged=True,
    ),
    CallStyle(
        "step-3", ("<steptml:invoke",), Arguments.PAIRS,
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        "</steptml:invoke><｜tool_call_end｜>", '">',
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        ('<steptml:parameter name="', '">'), ("", "</steptml:parameter>"),
    ),
    CallStyle(
        "glm-4.5", ("<arg_key>",), Arguments.PAIRS,
        "<tool_call>", "</tool_call>",
        key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"),
    ),
    CallStyle(
        "qwen3-coder", ("<function=", "<parameter="), Arguments.PAIRS,
        "<function=", "</function>", ">", ("<tool_call>", "</tool_call>"),
        ("<parameter=", ">"), ("", "</parameter>"),
    ),
    CallStyle(
        "hunyuan", ("<tool_calls>", "```json"), Arguments.JSON,
        "<tool_call>", "</tool_call>", "\n", ("<tool_calls>", "</tool_calls>"),
        fence=("```json\n", "\n```"),
    ),
    CallStyle("mistral-3", ("[TOOL_CALLS]", "[ARGS]"), Arguments.JSON, "[TOOL_CALLS]", "", "[ARGS]"),
    CallStyle("mistral", ("[TOOL_CALLS]",), Arguments.OBJECT, "[TOOL_CALLS]"),
    CallStyle("granite-3", ("<|tool_call|>",), Arguments.OBJECT, "<|tool_call|>"),
    CallStyle("qwen3", ("<tool_call>",), Arguments.OBJECT, "<tool_call>", "</tool_call>"),
    CallStyle("lfm-2.5", ("<|tool_call_start|>",), Arguments.OBJECT, "<|tool_call_start|>", "<|tool_call_end|>"),
    CallStyle("lfm-2", ("<|tool_list_start|>",), Arguments.OBJECT, "<|tool_call_start|>", "<|tool_call_end|>"),
    CallStyle(
        "command", ("<|START_ACTION|>", "tool_name"), Arguments.OBJECT, "<|START_ACTION|>", "<|END_ACTION|>",
        keys=("tool_name", "parameters"),
    ),
    CallStyle(
        "llama-4", ("ipython", "<|python_start|>"), Arguments.OBJECT, "<|python_start|>", "<|python_end|>",
        bare=True, keys=("name", "parameters"),
    ),
    CallStyle(
        "llama-3", ("ipython",), Arguments.OBJECT, "<|python_tag|>", bare=True, keys=("name", "parameters"),
    ),
)  # fmt: skip


# Of models whose templates know no calls: what others write most.
GENERIC = CallStyle("generic", (), Arguments.OBJECT, "<tool_call>", "</tool_call>")


def style_of(template: str) -> CallStyle | None:
    """Returns the syntax in which a model with this chat template (its source text) writes tool calls; None if the
    template has the marks of no known syntax.
    """
    return next((row for row in STYLES if all(mark in template for mark in row.told_by)), None)
