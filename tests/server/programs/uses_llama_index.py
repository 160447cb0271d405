"""LlamaIndex's OpenAILike: whole answers, streams, texts, asynchronously."""

from __future__ import annotations

import asyncio

from cases import KEY, MODEL, URL, run
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

LLM = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, max_retries=0)
ASKED = [ChatMessage(role="user", content="hello")]


def case_chat() -> None:
    assert LLM.chat(ASKED).message.content == "you said hello"


def case_stream() -> None:
    pieces = [each.delta for each in LLM.stream_chat(ASKED)]
    assert "".join(filter(None, pieces)) == "you said hello" and len(pieces) > 2, pieces


def case_complete() -> None:
    assert LLM.complete("hello").text == "you said hello"


def case_async() -> None:
    assert asyncio.run(LLM.achat(ASKED)).message.content == "you said hello"


run(globals())
