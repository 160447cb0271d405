"""`kt bench serve`: the performance of a server that speaks OpenAI's API under load."""

from __future__ import annotations

import secrets
from collections import Counter
from math import inf
from pathlib import Path
from typing import Annotated

from ktcli import smallfiles
from ktcli.commands.cli.api_key import given_key
from ktcli.commands.cli.declarations import option, writable
from ktcli.commands.view.picture import PlotOpt, draw_into
from ktcli.errors import KtError, counted
from ktcli.output import out

UrlOpt = Annotated[str, option("--url URL", "Address of the server, with or without /v1.")]
ModelOpt = Annotated[
    str | None, option("--model NAME", "Model to request. Default: the server's first.")
]
KeyOpt = Annotated[
    str | None,
    option("--api-key KEY", "API key to send. Other users can see it in the process list."),
]
KeyFileOpt = Annotated[
    Path | None,
    option(
        "--api-key-file FILE", "File with the API key to send; it must be readable only by you."
    ),
]
PromptsOpt = Annotated[int, option("--num-prompts N", "Requests to send.", min=1, max=100_000)]
RateOpt = Annotated[
    float | None,
    option(
        "--request-rate R",
        "Requests per second, at random times (Poisson). Default: all at once.",
        min=0.001,
    ),
]
ConcurrencyOpt = Annotated[
    int | None,
    option("--max-concurrency N", "Maximum number of concurrent requests.", min=1, max=1024),
]
InputOpt = Annotated[
    int, option("--input-len N", "Length of each prompt, in tokens.", min=1, max=1 << 20)
]
OutputOpt = Annotated[
    int, option("--output-len N", "Length of each answer, in tokens.", min=1, max=1 << 20)
]
SeedOpt = Annotated[
    int | None,
    option(
        "--seed N",
        "Seed of the words and times. Default: a new one each run, so that no prompt is cached.",
        min=0,
    ),
]
FileOpt = Annotated[
    Path | None,
    option(
        "--output-file FILE",
        "Also write one line of JSON per request to this file.",
        callback=writable,
    ),
]


def serve(
    url: UrlOpt = "http://127.0.0.1:11435",
    model: ModelOpt = None,
    num_prompts: PromptsOpt = 16,
    request_rate: RateOpt = None,
    max_concurrency: ConcurrencyOpt = None,
    input_len: InputOpt = 256,
    output_len: OutputOpt = 64,
    seed: SeedOpt = None,
    api_key: KeyOpt = None,
    api_key_file: KeyFileOpt = None,
    output_file: FileOpt = None,
    plot: PlotOpt = None,
) -> None:
    """Measure a server that speaks OpenAI's API under load.

    Sends chats of random words to kt serve, vLLM, SGLang, llama-server or another server, and
    reads their streams. Prints the same table as SGLang's bench_serving. TTFT is the time to the
    first piece of an answer, ITL the time between two pieces. Behind a router that names its servers
    (kt route) a second table has the figures of each.

    Examples:

      kt bench serve

      kt bench serve --url http://127.0.0.1:8000 --max-concurrency 8 --num-prompts 64

      kt bench serve --request-rate 2 --input-len 1024 --output-len 128 --plot latency.svg --json
    """
    from ktcli.commands.view import serving
    from ktcli.measure.endpoint import Endpoint
    from ktcli.measure.latency import Served
    from ktcli.measure.traffic import Traffic, drive

    endpoint = Endpoint.at(url, given_key(api_key, api_key_file), model or "")
    chosen = secrets.randbelow(1 << 31) if seed is None else seed
    traffic = Traffic(
        num_prompts, input_len, output_len, request_rate or inf, max_concurrency, chosen
    )
    with out.progress(f"serve {endpoint.model}", num_prompts, unit="requests") as bar:
        driven = drive(endpoint, traffic, lambda done: bar.update(done=done))
    if output_file is not None:
        smallfiles.write_named(output_file, serving.request_lines(driven))
    errors = Counter(each.error for each in driven.answers if each.error)
    first = errors.most_common(1)[0][0] if errors else ""
    served = Served.of(driven)
    if not served.completed:
        raise KtError(f"{endpoint.url} answered none of {counted(num_prompts, 'request')}: {first}")
    counts = [endpoint.count(each.text) for each in driven.answers if not each.error]
    told = [count for count in counts if count is not None]
    retokenized = sum(told) if len(told) == len(counts) else None
    document = serving.serving_document(endpoint, traffic, driven, served, retokenized)
    out.result(document, lambda: serving.serving_words(document))
    if plot is not None:
        title = f"{endpoint.model}, {counted(served.completed, 'request')}"
        draw_into(plot, lambda beside: serving.draw_percentiles(served, title, beside))
    if errors:
        out.warn(f"{counted(served.failed, 'request')} failed: {first}")
