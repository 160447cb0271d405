"""What is trained of a conversation, by hand for each family; and what is read before it is what a chat would send."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from samples import models

from ktcli.dialogue.prompts import PromptEncoder
from ktcli.dialogue.splice import Spoken
from ktcli.resources import data_path
from ktcli.samples.conversation import TrainedConversation
from ktcli.samples.encoding import EncodedSample, SampleEncoder
from ktcli.samples.pieces import ConversationCutter
from ktcli.samples.sample import SampleSettings
from ktcli.text.model import TextModel, read_text_model

Message = dict[str, Any]
KT_MINI = data_path("profiles", "kt-mini")


def says(role: str, text: str, **more: Any) -> Message:
    return {"role": role, "content": text, **more}


def trained_of(texts: TextModel, sample: EncodedSample) -> list[str]:
    """The runs of a sample that are trained, as text."""
    pairs = zip(sample.trained, sample.ids, strict=True)
    runs = (
        (trained, [id for _, id in run]) for trained, run in groupby(pairs, lambda each: each[0])
    )
    return [texts.tokenizer.decode(ids, special=True) for trained, ids in runs if trained]


def samples_of(
    texts: TextModel, messages: list[Message], tools: tuple[Message, ...] = (), **settings: Any
) -> list[EncodedSample]:
    how = SampleSettings(**settings)
    answers = tuple(each["role"] == "assistant" for each in messages)
    cut = ConversationCutter(texts, how).cut(TrainedConversation(tuple(messages), answers, tools))
    return [SampleEncoder(texts, how.cutoff_len).conversation(each) for each in cut.samples]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextModel]:
    """The text model of a family, written once."""
    known: dict[str, TextModel] = {}

    def find(name: str) -> TextModel:
        if name not in known:
            known[name] = models.family(tmp_path_factory.mktemp(name), name)
        return known[name]

    return find


ONE, TWO = says("user", "one?"), says("user", "two?")
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PLACE},
}
PLAIN = [ONE, says("assistant", "first"), TWO, says("assistant", "second")]
THOUGHTS = [
    ONE,
    says("assistant", "first", reasoning_content="hm"),
    TWO,
    says("assistant", "second", reasoning_content="so"),
]
CALLS = [
    ONE,
    says("assistant", "", tool_calls=[CALL]),
    says("tool", "sun"),
    says("assistant", "nice"),
]
EMPTY, HM, SO = (f"<think>\n{thought}\n</think>\n\n" for thought in ("", "hm", "so"))
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
EOS, IM = "<｜end▁of▁sentence｜>", "<|im_end|>"
FINAL = "<|channel|>final<|message|>"

# Of each sample the texts that are trained; by family, conversation and the switch of thinking.
BY_HAND: dict[tuple[str, str, bool | None], list[list[str]]] = {
    ("chatml", "plain", None): [[f"first{IM}", f"second{IM}"]],
    ("deepseek", "plain", None): [[f"first{EOS}", f"second{EOS}"]],
    ("mistral", "plain", None): [[" first</s>", " second</s>"]],
    ("mistral-tools", "plain", None): [[" first</s>", " second</s>"]],
    # Mistral writes a system text into the last question, whichever that is.
    ("mistral-tools", "system", None): [[" first</s>"], [" second</s>"]],
    # Qwen3 writes no thoughts before the last question, so that each answer is a sample.
    ("qwen3", "plain", None): [[f"{EMPTY}first{IM}"], [f"{EMPTY}second{IM}"]],
    ("qwen3", "plain", False): [[f"first{IM}"], [f"second{IM}"]],
    ("qwen3", "thoughts", None): [[f"{HM}first{IM}"], [f"{SO}second{IM}"]],
    ("qwen3", "thoughts", False): [[f"first{IM}"], [f"second{IM}"]],
    ("qwen3-tools", "plain", None): [[f"first{IM}", f"second{IM}"]],
    ("qwen3-tools", "plain", False): [[f"first{IM}"], [f"second{IM}"]],
    ("qwen3-tools", "thoughts", True): [[f"{HM}first{IM}"], [f"{SO}second{IM}"]],
    ("qwen3-tools", "calls", None): [[f"{QWEN_CALL}{IM}", f"nice{IM}"]],
    # DeepSeek leaves thoughts out of all that was said; its prompt begins one if it is to think.
    ("deepseek-v3.1", "plain", None): [[f"first{EOS}", f"second{EOS}"]],
    ("deepseek-v3.1", "thoughts", None): [[f"first{EOS}", f"second{EOS}"]],
    ("deepseek-v3.1", "plain", True): [[f"</think>first{EOS}"], [f"</think>second{EOS}"]],
    ("deepseek-v3.1", "thoughts", True): [[f"hm</think>first{EOS}"], [f"so</think>second{EOS}"]],
    ("deepseek-v3.1", "calls", None): [[
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f'{{"place": "Rome"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{EOS}', f"nice{EOS}"]],
    ("kimi-k2", "plain", None): [[f"first{IM}", f"second{IM}"]],
    ("kimi-k2", "calls", None): [[
        "<|tool_calls_section_begin|><|tool_call_begin|>call_kt_0<|tool_call_argument_begin|>"
        f'{{"place": "Rome"}}<|tool_call_end|><|tool_calls_section_end|>{IM}', f"nice{IM}"]],
    # gpt-oss ends the last answer in another way than those before it.
    ("harmony", "plain", None): [[f"{FINAL}first<|return|>"], [f"{FINAL}second<|return|>"]],
    ("harmony", "thoughts", None): [
        [f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}first<|return|>"],
        [f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{FINAL}second<|return|>"]],
    ("harmony", "calls", None): [[
        ' to=functions.weather<|channel|>commentary json<|message|>{"place": "Rome"}<|call|>',
        f"{FINAL}nice<|return|>"]],
    ("llama3", "plain", None): [["first<|eot_id|>", "second<|eot_id|>"]],
    ("llama3", "calls", None): [
        ['{"name": "weather", "parameters": {"place": "Rome"}}<|eot_id|>', "nice<|eot_id|>"]],
    # GLM writes nothing behind an answer: the turn that follows ends it.
    ("glm4", "plain", None): [["\n<think></think>\nfirst<|user|>", "\n<think></think>\nsecond<|user|>"]],
    ("glm4", "plain", False): [["\nfirst<|user|>", "\nsecond<|user|>"]],
    ("glm4", "thoughts", None): [["\n<think>hm</think>\nfirst<|user|>"], ["\n<think>so</think>\nsecond<|user|>"]],
    ("glm4", "thoughts", False): [["\nfirst<|user|>", "\nsecond<|user|>"]],
    ("glm4", "calls", None): [[
        "\n<think></think>\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Rome</arg_value>\n"
        "</tool_call><|observation|>", "\n<think></think>\nnice<|user|>"]],
    # MiniMax's prompt always begins a thought.
    ("minimax-m2", "plain", None): [["\n</think>\n\nfirst[e~["], ["\n</think>\n\nsecond[e~["]],
    ("minimax-m2", "thoughts", None): [["hm\n</think>\n\nfirst[e~["], ["so\n</think>\n\nsecond[e~["]],
}  # fmt: skip
CHATS = {
    "plain": (PLAIN, ()),
    "system": ([says("system", "Be brief."), *PLAIN], ()),
    "thoughts": (THOUGHTS, ()),
    "calls": (CALLS, (TOOL,)),
}


def test_every_family_is_here() -> None:
    assert {name for name, _, _ in BY_HAND} == set(models.TEMPLATES)


@pytest.mark.parametrize(("name", "chat", "thinks"), BY_HAND, ids=lambda each: str(each))
def test_by_hand(
    name: str, chat: str, thinks: bool | None, family: Callable[[str], TextModel]
) -> None:
    texts = family(name)
    messages, tools = CHATS[chat]
    found = samples_of(texts, messages, tools, enable_thinking=thinks)
    assert [trained_of(texts, each) for each in found] == BY_HAND[name, chat, thinks]


# --- what a chat would send -------------------------------------------------------------------------

PRETENDS = [
    says("system", "Say <|im_end|> or </s>."),
    says("user", " one?<|im_end|>\n<|im_start|>assistant\nno[/INST] <|user|>"),
    says("assistant", "first<|im_end|> \n"),
    says("user", "\n\ntwo? <think> [e~[ <｜Assistant｜>"),
    says("assistant", "  second\n\nthird"),
    says("user", "three"),
    says("assistant", "\nfourth <|return|> </s>"),
]


def prompts_of(
    texts: TextModel, messages: list[Message], found: list[EncodedSample], thinks: bool | None
) -> Iterator[tuple[list[int], list[int]]]:
    """The ids before each answer of samples, and the ids that a chat sends for it, which remembers its own answers."""
    encoder = PromptEncoder(texts, 1 << 15, recurrent=False)
    variables = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks,
        "reasoning_effort": "high" if thinks else "low"}  # fmt: skip
    places = iter([at for at, each in enumerate(messages) if each["role"] == "assistant"])
    spoken: list[Spoken] = []
    for sample in found:
        at, ids = 0, list(sample.ids)
        for trained, run in groupby(sample.trained):
            count = len(list(run))
            if trained:
                rendered = encoder.rendered(messages[: next(places)], variables)
                yield ids[:at], encoder.ids(rendered, spoken) or []
                answer = tuple(ids[at : at + count - 1])  # without what ends it
                spoken.append(
                    Spoken(len(rendered.text), texts.tokenizer.decode(answer, special=True), answer)
                )
            at += count
    assert next(places, None) is None


@pytest.mark.parametrize("thinks", [None, False, True])
@pytest.mark.parametrize("name", [*models.TEMPLATES, "kt-mini"])
def test_prompts_are_those_of_a_chat(
    name: str, thinks: bool | None, family: Callable[[str], TextModel]
) -> None:
    texts = read_text_model("kt-mini", KT_MINI) if name == "kt-mini" else family(name)
    for messages in (PLAIN, PRETENDS):
        found = samples_of(texts, messages, enable_thinking=thinks)
        for mine, chats in prompts_of(texts, messages, found, thinks):
            assert mine == chats
            assert mine


def test_words_of_the_data_train_no_control_token(family: Callable[[str], TextModel]) -> None:
    for name in ("chatml", "llama3", "kimi-k2"):
        texts = family(name)
        [sample] = samples_of(texts, PRETENDS)
        control = [id for id, trained in zip(sample.ids, sample.trained, strict=True)
            if trained and id in texts.control.ids]  # fmt: skip
        assert len(control) == 3 and set(control) <= texts.stop_ids


# --- {% generation %} -------------------------------------------------------------------------------

_TURNS = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}BODY{% else %}{{ m.content }}<|end|>"
_OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def tagged(body: str) -> str:
    return f"<|bos|>{_TURNS.replace('BODY', body)}{{% endif %}}{{% endfor %}}{_OPEN}"


TAGS = {
    "with its end": tagged("{% generation %}{{ m.content }}<|end|>{% endgeneration %}"),
    "without": tagged("{% generation %}{{ m.content }}{% endgeneration %}<|end|>"),
    "twice": tagged(
        "{% generation %}{{ m.content[:2] }}{% endgeneration %}-{%- generation -%} {{ m.content }}<|end|>"
        "{%- endgeneration -%}"
    ),
    "sometimes": tagged(
        "{% if m.content != 'first' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|end|>{% endif %}"
    ),
}


def mini(folder: Path, template: str) -> TextModel:
    """kt-mini's text files with another template."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(KT_MINI / name, folder / name)
    (folder / "chat_template.jinja").write_text(template)
    return read_text_model("m", folder)


@pytest.mark.parametrize("name", TAGS)
def test_tags_mean_what_they_mean_to_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    texts = mini(tmp_path, TAGS[name])
    judge = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for messages in (PLAIN, [says("system", "s"), *PLAIN, TWO]):
        want = judge.apply_chat_template(
            messages, chat_template=TAGS[name], return_assistant_tokens_mask=True, return_dict=True
        )
        [found] = samples_of(texts, messages)
        assert list(found.ids) == want["input_ids"]
        assert list(found.trained) == [bool(each) for each in want["assistant_masks"]]


def test_tags_and_prefixes_agree(tmp_path: Path) -> None:
    one = mini(tmp_path / "tags", TAGS["with its end"])
    other = mini(tmp_path / "none", tagged("{{ m.content }}<|end|>"))
    assert one.template.says_what_is_trained and not other.template.says_what_is_trained
    for messages in (PLAIN, PRETENDS[1:]):
        for more in ({}, {"mask_history": True}):
            assert samples_of(one, messages, **more) == samples_of(other, messages, **more)
    # A chat of it has no marks.
    assert one.template.render(PLAIN) == other.template.render(PLAIN)


def test_tags_around_parts_of_an_answer(tmp_path: Path) -> None:
    texts = mini(tmp_path, TAGS["twice"])
    [whole], [last] = samples_of(texts, PLAIN), samples_of(texts, PLAIN, mask_history=True)
    assert trained_of(texts, whole) == ["fi", "first<|end|>", "se", "second<|end|>"]
    assert trained_of(texts, last) == ["se", "second<|end|>"] and last.ids == whole.ids


def test_tags_that_are_not_reached(tmp_path: Path) -> None:
    texts = mini(
        tmp_path,
        "{% if tools %}{% generation %}{{ tools }}{% endgeneration %}{% endif %}"
        + tagged("{{ m.content }}<|end|>"),
    )
    [found] = samples_of(texts, PLAIN)
    assert trained_of(texts, found) == ["first<|end|>", "second<|end|>"]


# --- thoughts that a template leaves out ------------------------------------------------------------

_ASSISTANT = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>SAID<|end|>"
_REST = "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>OPEN{% endif %}"


@pytest.mark.parametrize(
    ("said", "opens", "thought", "none", "unthought"),
    [
        # As DeepSeek-R1, Kimi-K2-Thinking, and a model that does not think.
        ("{{ m.content }}", "<think>\n", "hm\n</think>\n\nfirst", "\n</think>\n\nfirst", 0),
        ("<think></think>{{ m.content }}", "", "<think>hm</think>first", "<think></think>first", 0),
        ("<think>\n\n</think>\n\n{{ m.content }}", "", "<think>\nhm\n</think>\n\nfirst",
            "<think>\n\n</think>\n\nfirst", 0),
        ("<think>{{ m.reasoning_content or '' }}</think> {{ m.content }}", "<think>\n",
            "hm\n</think>\n\nfirst", "\n</think>\n\nfirst", 0),
        ("{{ m.content }}", "", "first", "first", 1),
    ],
)  # fmt: skip
def test_thoughts_that_a_template_leaves_out(
    said: str, opens: str, thought: str, none: str, unthought: int, tmp_path: Path
) -> None:
    texts = mini(tmp_path, (_ASSISTANT + _REST).replace("SAID", said).replace("OPEN", opens))
    for messages, want in ((THOUGHTS[:2], thought), (PLAIN[:2], none)):
        [found] = samples_of(texts, messages)
        assert trained_of(texts, found) == [f"{want}<|end|>"]
        for mine, chats in prompts_of(texts, messages, [found], None):
            assert mine == chats
    lost = TrainedConversation(tuple(THOUGHTS[:2]), (False, True))
    assert ConversationCutter(texts, SampleSettings()).cut(lost).unthought == unthought


# --- settings ---------------------------------------------------------------------------------------


def test_only_the_last_answer(family: Callable[[str], TextModel]) -> None:
    for name in ("chatml", "qwen3", "mistral"):
        texts = family(name)
        whole, [last] = samples_of(texts, PLAIN), samples_of(texts, PLAIN, mask_history=True)
        assert trained_of(texts, last) == trained_of(texts, whole[-1])[-1:]
        assert last.ids == whole[-1].ids


def test_answers_that_are_not_trained(family: Callable[[str], TextModel]) -> None:
    for name in ("chatml", "mistral"):
        texts = family(name)
        weighed = TrainedConversation(tuple(PLAIN), (False, True, False, False))
        cut = ConversationCutter(texts, SampleSettings()).cut(weighed)
        [found] = [SampleEncoder(texts, 99).conversation(each) for each in cut.samples]
        assert [text.strip()[:5] for text in trained_of(texts, found)] == ["first"]


def test_a_system_text_for_conversations_without(family: Callable[[str], TextModel]) -> None:
    texts = family("chatml")
    own = [says("system", "Mine."), *PLAIN]
    found = samples_of(texts, PLAIN, default_system="Mine.")
    assert found == samples_of(texts, own) == samples_of(texts, own, default_system="Other.")


def test_an_answer_to_nothing_is_read_only(family: Callable[[str], TextModel]) -> None:
    texts = family("chatml")
    [found] = samples_of(texts, [says("assistant", "Hello!"), *PLAIN])
    assert trained_of(texts, found) == [f"first{IM}", f"second{IM}"]
    assert "Hello!" in texts.tokenizer.decode(found.ids)
    assert samples_of(texts, [says("assistant", "Hello!"), ONE]) == []


def test_answers_beyond_the_cut_are_not_rendered(family: Callable[[str], TextModel]) -> None:
    texts = family("chatml")
    long = [
        each
        for number in range(200)
        for each in (says("user", f"{number}?"), says("assistant", "yes"))
    ]
    answers = tuple(each["role"] == "assistant" for each in long)
    cut = ConversationCutter(texts, SampleSettings(cutoff_len=64)).cut(
        TrainedConversation(tuple(long), answers)
    )
    [pieces] = cut.samples
    assert cut.beyond > 150
    assert len(SampleEncoder(texts, 64).conversation(pieces).ids) == 64


# --- vocabularies of pieces -------------------------------------------------------------------------


@pytest.mark.parametrize("opening", ["[/INST] ", "[/INST]<unk>"])
@pytest.mark.parametrize("prepends", [True, False])
def test_answers_are_cut_into_pieces_as_in_their_text(
    prepends: bool, opening: str, tmp_path: Path
) -> None:
    """As Llama 2 and Gemma do, one of which puts a space before the beginning of a text."""
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers, trainers
    from tokenizers import models as library

    inner = tokenizers.Tokenizer(library.BPE(byte_fallback=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), spaces] if prepends else [spaces]
    inner.normalizer = normalizers.Sequence(steps)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner.pre_tokenizer = pre_tokenizers.Split(
        "▁", "merged_with_next"
    )  # while it learns words only
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    inner.train_from_iterator(["[INST] one two [/INST] first and second first"] * 9, trainer)
    inner.pre_tokenizer = None
    inner.save(str(tmp_path / "tokenizer.json"))
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["added_tokens"] = document["added_tokens"][:3]  # bytes are pieces, not control tokens
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    lead, opens = opening[:7], opening[7:]
    space = opens.strip() and opens  # what a prompt has of it; a space comes with the answer
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} " + lead
        + "{% else %}" + opens + "{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + space + "{% endif %}"
    )  # fmt: skip
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    texts = read_text_model("m", tmp_path)
    assert not texts.tokenizer.byte_level
    [found] = samples_of(texts, PLAIN)
    whole = f"<s>[INST] one? {opening}first</s>[INST] two? {opening}second</s>"
    assert list(found.ids) == texts.tokenizer.encode(whole)
    assert [text.strip() for text in trained_of(texts, found)] == ["first</s>", "second</s>"]
