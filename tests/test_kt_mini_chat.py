"""The built-in model, through the whole path: converted, loaded, asked, and judged on unseen questions.

The questions are not in its training data in that phrasing; `mini_quality` scores an answer by required
and forbidden words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mini_quality import load_items, score

from ktcli.assembly.load import load
from ktcli.assembly.prepare import prepare
from ktcli.assembly.request import Wanted
from ktcli.chat import chats
from ktcli.chat.chat import Chat
from ktcli.chat.recorder import ChatRecorder
from ktcli.dialogue.local import LocalBackend
from ktcli.main import main
from ktcli.sampling import SamplingSettings
from ktcli.store import heat, library, places
from ktcli.store.entry import BUILTIN
from ktcli.store.places import EntryKind
from ktcli.text.model import read_text_model
from ktcli.text.settings import Settings

Ask = Callable[[str], str]
RECIPE = Path(__file__).parents[1] / "profiles" / "kt-mini" / "recipe"
pytestmark = pytest.mark.skipif(
    library.find(BUILTIN, EntryKind.CHECKPOINT) is None,
    reason="the trained model is not in this tree; profiles/kt-mini/recipe makes it",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def library_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(home))


@pytest.fixture(scope="module")
def backend(home: Path) -> LocalBackend:
    patch = pytest.MonkeyPatch()
    patch.setenv("KT_HOME", str(home))
    try:
        wanted = Wanted(threads=1)  # small steps: a second thread would only wait
        ready = prepare(BUILTIN, wanted, read_text_model)
        return LocalBackend(
            ready.name, load(ready, wanted), read_text_model(ready.name, ready.pack)
        )
    finally:
        patch.undo()


@pytest.fixture
def ask(backend: LocalBackend) -> Ask:
    """A question in a conversation of its own."""

    def run(question: str) -> str:
        settings = Settings(SamplingSettings(greedy=True), max_tokens=200)
        return "".join(piece.text for piece in Chat(backend, settings).ask(question))

    return run


def passed(items: list[dict], ask: Ask) -> tuple[float, str]:
    """The share of right answers, and the wrong ones for the report."""
    answers = [(item, ask(item["question"])) for item in items]
    wrong = [f"{item['question']} -> {said}" for item, said in answers if not score(said, item)]
    return 1 - len(wrong) / len(items), "\n".join(wrong)


@pytest.mark.parametrize(("part", "least"), [("kt", 0.9), ("greetings", 0.9), ("decline", 0.9)])
def test_unseen_questions(ask: Ask, part: str, least: float) -> None:
    share, wrong = passed(load_items()[part], ask)
    assert share >= least, wrong


@pytest.mark.thorough
def test_rows_of_the_tables(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the weights learned of kt's tables they can say: every third row, asked for by its name."""
    monkeypatch.syspath_prepend(str(RECIPE))
    import phrases
    import tables

    learned = json.loads(tables.LEARNED.read_text())["rows"]
    facts = phrases.Phrases(lambda question: False).of_rows()
    asked = {key: facts[key] for key in sorted(learned) if key in facts and facts[key].names}
    items = [
        {
            "question": f"what is {next(phrases.expand(fact.names[0]))}?",
            "required": [[" ".join(learned[key].split()[:5])]],
            "forbidden": [],
        }
        for key, fact in list(asked.items())[::3]
    ]
    share, wrong = passed(items, ask)
    assert share >= 0.85, wrong


def test_sums(ask: Ask) -> None:
    """Small arithmetic, which a model of this size knows mostly."""
    share, wrong = passed(load_items()["sums"], ask)
    assert share >= 0.5, wrong


def test_a_conversation_computes_only_what_is_new(backend: LocalBackend) -> None:
    chat = Chat(backend, Settings(SamplingSettings(greedy=True), max_tokens=100))
    list(chat.ask("What is kt?"))
    before = chat.used
    text = "".join(piece.text for piece in chat.ask("And what does kt pull do?"))
    assert chat.reply is not None and chat.reply.stats.reused_tokens == before
    assert "pull" in text
    fresh = Chat(backend, chat.settings)
    fresh.conversation.turns = chat.conversation.turns[:2]
    assert "".join(piece.text for piece in fresh.ask("And what does kt pull do?")) == text


def test_a_kept_conversation_goes_on_as_if_never_left(backend: LocalBackend) -> None:
    """The same ids are read, and the same answer follows."""
    chat = Chat(backend, Settings(SamplingSettings(greedy=True), max_tokens=40))
    recorder = ChatRecorder(chat, pytest.fail)
    for question in ("What is kt?", "And what does kt pull do?"):
        list(chat.ask(question))
    recorder.close()
    again = Chat(backend)
    kept = ChatRecorder(again, pytest.fail)
    kept.take_over(chats.find("last"))
    answers = ["".join(piece.text for piece in each.ask("And kt rm?")) for each in (chat, again)]
    assert answers[0] == answers[1] and again.session.sequence.ids == chat.session.sequence.ids
    assert chat.loss is None
    kept.close()


def test_every_choice_of_every_token_is_recorded(
    capsys: pytest.CaptureFixture[str], backend: LocalBackend
) -> None:
    pack = library.resolve(BUILTIN, EntryKind.PACK).path
    spec = backend.engine.spec
    tokens = 0
    heat.path_of(places.model_name(pack)).unlink(missing_ok=True)
    for question in ("what is kt?", "what does kt pull do? " * 20):
        line = ["chat", "kt-mini", question, "--json", "--greedy", "--max-tokens", "9"]
        assert main([*line, "--threads", "1"]) == 0
        stats = json.loads(capsys.readouterr().out)["stats"]
        tokens += stats["prompt_eval_count"] + stats["eval_count"]
        found = heat.read(pack, (spec.moe_layers, spec.experts))
        assert found is not None and found.tokens == tokens
        assert (found.counts.sum(axis=1) == tokens * spec.top_k).all()
    assert main(["show", "kt-mini", "--experts"]) == 0
    assert f"{tokens:,} tokens" in capsys.readouterr().out


def test_the_command_line(capsys: pytest.CaptureFixture[str], backend: LocalBackend) -> None:
    assert main(["chat", "what does kt convert do?"]) == 0
    said = capsys.readouterr()
    assert "convert" in said.out and said.err == ""
