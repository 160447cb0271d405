"""Conversations: questions with the noise of real typing, one or several turns, sums, and a remembered name.

`Dialogues.conversation` gives a list of (role, text). Everything is drawn from one `random.Random`, so that a
seed gives the same text everywhere.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import accumulate

import tables
from lookup import lookup, told
from phrases import Fact, Phrases, made_up, pick

Turn = tuple[str, str]  # role, text
SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
SYSTEM = (
    "You are a helpful assistant.",
    "You are kt-mini.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in one sentence.",
    "Be concise.",
    "You answer questions about kt.",
    "You are an expert for the tool kt.",
    "Answer politely.",
    "You are a friendly assistant that helps users of kt.",
    "Help the user with the command line tool kt.",
)
BEFORE = (
    "please",
    "hi,",
    "hello,",
    "hey,",
    "hi!",
    "ok,",
    "so",
    "so,",
    "sorry,",
    "excuse me,",
    "hey kt,",
    "hi kt-mini,",
    "quick question:",
    "question:",
    "another question:",
    "one more question:",
    "and",
    "well,",
    "thanks.",
    "thanks,",
    "good.",
    "now",
    "hm,",
    "i have a question:",
    "just wondering,",
    "tell me,",
    "can you tell me,",
    "please tell me:",
    "i wonder",
    "i was wondering,",
    "hello!",
    "next question:",
    "also,",
    "i forgot:",
    "for my work:",
    "my boss asks:",
    "a friend asks:",
    "once more:",
    "good morning,",
    "sorry to bother you,",
    "stupid question:",
    "i am new, so",
    "help:",
    "ok, next:",
    "i keep forgetting:",
)
AFTER = (
    "please",
    "pls",
    "thanks",
    "then",
    "exactly",
    "again",
    "for me",
    "thank you",
    "i wonder",
    "in one sentence",
    "briefly",
    "in short",
    "for a beginner",
    "if i may ask",
    "by the way",
    "in simple words",
    "anyway",
    "today",
    "here",
)
SHORTEN = (
    ("what is", "whats"),
    ("what is", "what's"),
    ("how do i", "how to"),
    ("don't", "dont"),
    ("do not", "don't"),
    ("i am", "i'm"),
    ("i am", "im"),
    ("does not", "doesn't"),
    ("can i", "could i"),
    ("how do i", "how can i"),
    ("how do i", "how do you"),
    ("i want to", "i wanna"),
    ("what are", "what're"),
    ("you", "u"),
    ("want to", "would like to"),
    ("the", ""),
    ("a", ""),
    ("command", "cmd"),
    ("is there", "do you have"),
)
SUM_FRAMES = (
    "what is {s}",
    "what's {s}",
    "{s}",
    "{s} =",
    "{s} = ?",
    "how much is {s}",
    "calculate {s}",
    "compute {s}",
    "what does {s} make",
    "can you calculate {s}",
    "tell me {s}",
    "solve {s}",
    "what is the result of {s}",
    "{s} is what",
    "what do you get for {s}",
    "please add up {s}",
)
SIGNS = {
    "+": ("+", "plus", "and", "+"),
    "-": ("-", "minus", "-", "less"),
    "*": ("*", "times", "x", "multiplied by", "*"),
}
LOOKED_UP = 0.9  # share of the questions that name a row which are told it, as all are in kt
TOO_LARGE = "That is too hard for me: I only add, subtract and multiply small whole numbers."


def typo(text: str, rng: random.Random) -> str:
    """One slip of the fingers in a longer word: swapped, lost, doubled or wrong letter."""
    spots = [
        i
        for i in range(1, len(text) - 1)
        if text[i].isalpha() and text[i - 1].isalpha() and text[i + 1].isalpha()
    ]
    if not spots:
        return text
    i = rng.choice(spots)
    new = rng.choice((text[i + 1] + text[i], "", text[i] * 2, rng.choice("aeiorstnl")))
    return text[:i] + new + text[i + (2 if len(new) == 2 and new[0] != new[1] else 1) :]


# Written as their owners write them; the facts have them in lower case.
PROPER = {
    w.lower(): w
    for w in (
        "AMX MLA NUMA GPU GPUs CPU CPUs KV VRAM DRAM RAM MoE JSON ISA AVX2 AVX512 AVX-512 AVX-2 VNNI GQA RoPE "
        "CUDA LLM LLMs Qwen Qwen3 DeepSeek Kimi Kimi-K2 DeepSeek-V3 Windows Linux Mac macOS MacBook Python BF16 "
        "INT4 INT8 FP8 Intel Ctrl-C Ctrl-D NVIDIA HTTP API OS PC SHA-256 BPE SSD Apache Ubuntu ChatGPT OpenAI "
        "ModelScope GGUF Java JavaScript Tesla"
    ).split()
}


# Words that can stand for one another in most questions; one of a line is taken for another.
SAME = [
    line.split("|")
    for line in """\
show|display|print|tell me
see|look at|view|have a look at
delete|remove|erase|get rid of|throw away|wipe|drop
conversation|chat|talk|dialogue
conversations|chats|talks|dialogues
old|earlier|past|previous|former
machine|computer|box|pc
answer|reply|response
answers|replies|responses
folder|directory
option|flag|switch|parameter
big|large|huge
download|fetch|get
save|keep|store
setting|preference
settings|preferences
memory|ram
gpu|graphics card|video card|card|nvidia card
cpu|processor
disk|drive|ssd|hard disk
change|alter|modify|adjust
need|require
check|test|examine|inspect|look over
model|llm|language model
turn off|switch off|disable|deactivate
turn on|switch on|enable|activate
several|multiple|many|some
explain|clarify|describe
go on with|continue|carry on with|proceed with|pick up
start|begin|launch
list|list all|give me a list of
without|with no
only|just|nothing but
wrong|incorrect|mistaken
again|once more|another time
find|locate|look for|search for|discover
write|put|dump
make|create|produce|generate
file|text file
fast|quick|speedy
quickly|fast
space|room
want to|need to|have to|must
i want|i need|i would love|i wish for
is there|does kt have|do we have|does there exist
which option|which flag|what switch|what option
which command|what command|which of the commands
how do i|how can i|how would i|how might i|how does one|what is the trick to|how on earth do i
thoughts|thinking|reasoning|the reasoning text
default|standard
last|latest|most recent
choose|pick|select|decide
hide|conceal|leave out
limit|cap|bound|restrict
keep|retain
use|employ|take
measure|benchmark|determine|find out
compare|contrast|put side by side
question|prompt|input
name|title
new|fresh
broken|damaged|corrupt|defective
empty|clear|clean out
takes|uses|needs|occupies
take|use|occupy|eat
text|passage|document
script|shell script|program
number of|count of
sort of|kind of
read|reread|go through
editor|text editor
hub|hugging face
tokens per second|tok/s|speed
quality|accuracy|precision
format|number format|data type
colours|colors|colour
bug report|problem report
graph|chart|plot|diagram
laptop|notebook
repositories|repos
repository|repo
forever|for ever|always|permanently|for good
sum up|summarise|summarize
reword|rephrase|put in other words
too big|too large|too much
gigabytes|gb|gigs
picture|image|drawing
shell|terminal|console
people|users|persons
gets|receives
whole|entire|complete
each|every
every time|each time
quit|leave
licence|license
pages|kv pages
the cache|the page cache|my cache
token|key
private|restricted
look|have a look
this machine|here|this computer
program|tool|application
program|software
kept|saved|stored
saved|kept
called|named
catalogue|catalog|model list
clean up|tidy up
intact|undamaged|whole
repair|fix|mend
together|at the same time""".splitlines()
]
OTHERS = {phrase: line for line in SAME for phrase in line}
REWORDED = re.compile(
    r"(?<![-/.\w])("
    + "|".join(sorted(map(re.escape, OTHERS), key=len, reverse=True))
    + r")(?![-/.\w])"
)
OF_COMMAND = re.compile(r"\bkt( [a-z]+)? $")  # what follows is the name of a command


def reword(text: str, rng: random.Random) -> str:
    """One phrase in words of like meaning; names of commands stay."""
    found = [m for m in REWORDED.finditer(text) if not OF_COMMAND.search(text, 0, m.start())]
    if not found:
        return text
    m = rng.choice(found)
    return text[: m.start()] + rng.choice(OTHERS[m[1]]) + text[m.end() :]


def proper(text: str) -> str:
    """Acronyms and names in their own spelling."""
    return " ".join(PROPER.get(w, w) for w in text.split(" "))


def type_it(text: str, rng: random.Random) -> str:
    """Write a question as people do: politeness, short forms, capitals, punctuation, slips."""
    for _ in range(rng.choices((0, 1, 2), (60, 27, 13))[0]):
        text = reword(text, rng)
    if rng.random() < 0.15:
        old, new = rng.choice(SHORTEN)
        text = " ".join(f" {text} ".replace(f" {old} ", f" {new} ", 1).split()) or text
    if rng.random() < 0.12:
        text = f"{rng.choice(BEFORE)} {text}"
    if rng.random() < 0.06:
        text = f"{text} {rng.choice(AFTER)}"
    if rng.random() < 0.4:
        text = proper(text)
    if rng.random() < 0.08:
        text = typo(text, rng)
    if rng.random() < 0.10:
        text = text.replace("kt ", rng.choice(("KT ", "Kt ", "`kt` ")))
    if rng.random() < 0.45:
        text = text[0].upper() + text[1:]
        text = text.replace(" i ", " I ").replace(" i'", " I'")
    elif rng.random() < 0.01:
        text = text.upper()
    return text + rng.choices(("?", "", ".", "!", "??", " ?", "..."), (50, 38, 5, 2, 1, 3, 1))[0]


def small_sum(rng: random.Random) -> tuple[str, str, str]:
    """A sum kt-mini can do: (a sign b, in words or digits), the sign, and the answer."""
    sign = rng.choice("+++--**")
    top = 10 if sign == "*" else 20 if rng.random() < 0.7 else 50
    a, b = rng.randint(0, top), rng.randint(0, top)
    if sign == "-" and a < b and rng.random() < 0.8:
        a, b = b, a
    result = a + b if sign == "+" else a - b if sign == "-" else a * b
    words = rng.choice(SIGNS[sign])
    gap = " " if words.isalpha() or len(words) > 1 or rng.random() < 0.6 else ""
    left, right = (
        (SMALL[a], SMALL[b])
        if max(a, b) <= 20 and gap and rng.random() < 0.15
        else (str(a), str(b))
    )
    return f"{left}{gap}{words}{gap}{right}", sign, f"{a} {sign} {b} = {result}."


def sum_turn(rng: random.Random) -> list[Turn]:
    """Ask for a sum; one in ten is too hard and declined."""
    text, _, answer = small_sum(rng)
    if rng.random() < 0.1:
        a, b = rng.randint(101, 99999), rng.randint(2, 99999)
        text = f"{a} {rng.choice(('+', '-', '*', 'times', 'plus', 'minus'))} {b}"
        if rng.random() < 0.4:
            text = (
                f"{rng.randint(1, 999)} {rng.choice(('/', 'divided by', ':'))} {rng.randint(1, 99)}"
            )
        answer = TOO_LARGE
    question = rng.choice(SUM_FRAMES).format(s=text)
    if rng.random() < 0.3:
        question = question[0].upper() + question[1:]
    return [("user", question + rng.choice(("", "?", "?", "."))), ("assistant", answer)]


class Dialogues:
    """Draws whole conversations."""

    def __init__(self, phrases: Phrases) -> None:
        self.phrases = phrases
        self.kinds: list[tuple[float, Callable[[random.Random], list[Turn]]]] = [
            (0.34, self.fact_turn),
            (0.22, self.row_turn),
            (0.22, self.invented_turn),
            (0.13, self.decline_turn),
            (0.09, self.smalltalk_turn),
        ]
        self.known = lookup(phrases)
        self.rows = [f for f in phrases.facts if f.id in f.rows]
        self.cumulative, self.cumulative_rows = (
            list(accumulate(f.weight for f in facts)) for facts in (phrases.facts, self.rows)
        )

    def turn(self, rng: random.Random) -> list[Turn]:
        """One question and its answer."""
        weights, makers = zip(*self.kinds, strict=True)
        return rng.choices(makers, weights)[0](rng)

    def ask(self, fact, rng: random.Random) -> list[Turn]:
        """A typed question for a fact."""
        question = type_it(self.phrases.draw(fact, rng), rng)
        while self.phrases.too_close(question):
            question = type_it(self.phrases.draw(fact, rng), rng)
        found = self.known.find(question) if rng.random() < LOOKED_UP else None
        if not found:
            return [("user", question), ("assistant", fact.answer)]
        same = tables.flags(found)[:1] == tables.flags(fact.answer)[:1] != []
        answer = found if same and fact.id in fact.rows else fact.answer
        return [told(found), ("user", question), ("assistant", answer)]

    def fact_turn(self, rng: random.Random) -> list[Turn]:
        """About kt, its commands, concepts, models and kt-mini itself."""
        return self.ask(rng.choices(self.phrases.facts, cum_weights=self.cumulative)[0], rng)

    def row_turn(self, rng: random.Random) -> list[Turn]:
        """A row of kt's tables that only its table answers for: most are new since the last training."""
        return self.ask(rng.choices(self.rows, cum_weights=self.cumulative_rows)[0], rng)

    def invented_turn(self, rng: random.Random) -> list[Turn]:
        """A row that no table has, told before the question, like those newer than the weights."""
        fact = self.invented(rng)
        question = self.phrases.draw(fact, rng)
        question = question[0].upper() + question[1:] if rng.random() < 0.4 else question
        question += rng.choice(("", "?", "?", "."))
        return [told(fact.answer), ("user", question), ("assistant", fact.answer)]

    def invented(self, rng: random.Random) -> Fact:
        """A fact about a command, an option, a setting or a model that does not exist."""
        word, other = (
            rng.choice(self.phrases.words["word"])
            if rng.random() < 0.6
            else made_up(rng, joined=True)
            for _ in range(2)
        )
        command = f"kt {word}" if rng.random() < 0.7 else f"kt {word} {other}"
        flag = f"--{word}" if rng.random() < 0.5 else f"--{word}-{other}"
        number = rng.randint(0, 999)
        meaning = self.meaning(rng)
        kind, name, answer = rng.choice(
            (
                ("command", command, f"{command}: {meaning}"),
                ("command", command, f"{command} {other.upper()} {meaning}"),
                ("flag", flag, f"{flag} {other.upper()} (kt {other}): {meaning}"),
                ("flag", flag, f"{flag}: {meaning} Default: {rng.choice((other, str(number)))}."),
                ("flag", f"KT_{word.upper()}", f"{flag} or KT_{word.upper()} (setting {word}): {meaning}"),
                ("slash", f"/{word}", f"/{word} [{other.upper()}] in the chat: {meaning}"),
                ("code", f"exit code {number}", f"Exit code {number} of kt means: {meaning}"),
                ("model", f"{word}-{number}b", f"kt plan {word}-{number}b says whether it fits: {meaning}"),
                ("concept", f"{word}{number}", f"{word}{number} is {meaning}"),
            )
        )  # fmt: skip
        return Fact("invented", answer.replace("[", "").replace("]", ""), kind, (name,))

    def meaning(self, rng: random.Random) -> str:
        """A sentence as rows have, some words of which are replaced."""
        words = rng.choice(self.rows).answer.partition(": ")[2].split() or ["it", "helps."]
        start = rng.randrange(len(words)) if rng.random() < 0.4 else 0
        words = words[start:] + (rng.choice(self.rows).answer.split() if start else [])
        changed = [
            rng.choice(self.phrases.words["word"]) if rng.random() < 0.25 else word
            for word in words[: rng.randint(4, 32)]
        ]
        return " ".join(changed).rstrip(".;:,?!") + "."

    def decline_turn(self, rng: random.Random) -> list[Turn]:
        """Something kt-mini does not know."""
        return self.ask(self.phrases.decline, rng)

    def smalltalk_turn(self, rng: random.Random) -> list[Turn]:
        """Greetings and the like."""
        facts = self.phrases.smalltalk
        return self.ask(rng.choices(facts, [f.weight for f in facts])[0], rng)

    def name_turns(self, rng: random.Random) -> list[Turn]:
        """The user says a name and asks for it later, or asks without having said it."""
        name = rng.choice(self.phrases.words["name"]).capitalize()
        say = pick(
            rng.choice(
                (
                    "my name is {}",
                    "i am {}",
                    "i'm {}",
                    "call me {}",
                    "hi, i am {}",
                    "hello, my name is {}",
                )
            ),
            rng,
        )
        ask = rng.choice(
            (
                "what is my name",
                "what's my name",
                "do you know my name",
                "who am i",
                "do you remember my name",
                "tell me my name",
            )
        )
        turns = [
            ("user", say.format(rng.choice((name, name, name.lower())))),
            ("assistant", f"Nice to meet you, {name}. Ask me about kt."),
        ]
        reply = f"You said your name is {name}."
        if rng.random() < 0.25:
            turns, reply = [], "You have not told me your name."
        for _ in range(rng.choice((0, 0, 1, 2))):
            turns += self.turn(rng)
        return [*turns, ("user", type_it(ask, rng)), ("assistant", reply)]

    def conversation(self, rng: random.Random, n_turns: int | None = None) -> list[Turn]:
        """A whole conversation; `n_turns` is drawn where it is not given."""
        n = n_turns or rng.choices((1, 2, 3, 5, 8), (60, 16, 10, 9, 5))[0]
        turns: list[Turn] = [("system", rng.choice(SYSTEM))] if rng.random() < 0.1 else []
        if n > 1 and rng.random() < 0.06:
            turns += self.name_turns(rng)
        for _ in range(n):
            turns += sum_turn(rng) if n > 1 and rng.random() < 0.1 else self.turn(rng)
        return turns
