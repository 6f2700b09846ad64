"""Chat Completions: what is sent, what real and broken servers answer, and what becomes of it."""

from __future__ import annotations

import json

import model_bench as bench
import pytest
import scripted_provider as scripted
import trio
from scripted_provider import call, chunked, delta, sends
from trio.testing import MockClock

from loop_protocol.v1.types import (
    Message,
    ModelRef,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    Usage,
)
from loopd.agent import ModelError, Reply, ThinkingDelta
from loopd.config import ModelConfig
from loopd.models import Catalogue

HELLO: list[Message] = [bench.user(0, "hello")]
STOP = delta("stop")
Provider = scripted.ScriptedProvider


async def answer(models: Catalogue, say: bench.Said | None = None, ref: ModelRef = bench.M) -> Reply:
    return await bench.ask(models.resolve(ref), HELLO, say or bench.Said())


# --- what is sent -----------------------------------------------------------------------------------------------------


async def test_a_request_has_system_history_tools_and_limits(provider: Provider, models: Catalogue) -> None:
    provider.script = sends(delta(content="x"), STOP)
    run = ToolCallBlock("c1", "bash", {"command": "ls"})
    history: list[Message] = [
        bench.user(0, "a", "b"),
        bench.assistant(1, ThinkingBlock("hm"), run),
        bench.result(2, run, "out"),
    ]
    await bench.ask(models.resolve(bench.EYES), history, bench.Said(), tools=(bench.BASH,), max_output_tokens=9)
    [asked] = provider.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == f"Bearer {bench.KEY}"
    assert asked.json == {
        "model": "eyes",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "out"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [
            {
                "type": "function",
                "function": {"name": "bash", "description": "Run it", "parameters": bench.BASH.parameters},
            }
        ],
        "max_tokens": 9,
    }


async def test_effort_is_asked_for_where_the_model_has_one(provider: Provider, models: Catalogue) -> None:
    provider.script = sends(delta(content="x"), STOP)
    await answer(models, ref=ModelRef("local", "eyes", "high"))
    assert provider.asked[0].json["reasoning_effort"] == "high"


def test_the_limit_of_the_model_holds_where_none_is_asked_for() -> None:
    listed = (ModelConfig(id="m", max_output=100),)
    models = bench.catalogue("http://127.0.0.1:1/v1", models=listed)
    asked = [
        json.loads(bench.body(models.resolve(bench.M), HELLO, max_output_tokens=limit)) for limit in (None, 9, 999)
    ]
    assert [body["max_tokens"] for body in asked] == [100, 9, 100]


@pytest.mark.parametrize(
    ("url", "name"), [("https://api.openai.com/v1", "max_completion_tokens"), ("http://10.0.0.1/v1", "max_tokens")]
)
def test_the_limit_has_the_name_that_the_server_knows(url: str, name: str) -> None:
    model = bench.catalogue(url).resolve(bench.M)
    assert json.loads(bench.body(model, HELLO, max_output_tokens=3))[name] == 3


@pytest.mark.parametrize(("asked", "sent"), [(None, 20), (3, 3), (99, 20)])
def test_an_answer_is_never_longer_than_the_model_can_make_it(asked: int | None, sent: int) -> None:
    able = bench.catalogue("http://10.0.0.1/v1", models=(ModelConfig(id="m", max_output=20),)).resolve(bench.M)
    body = able._body(bench.request(able, HELLO, max_output_tokens=asked))  # type: ignore[attr-defined]
    assert json.loads(body)["max_tokens"] == sent


async def test_configured_headers_are_sent_and_win(provider: Provider) -> None:
    models = bench.catalogue(provider.url, headers={"Authorization": "Basic abcdefgh", "X-Team": "t"})
    provider.script = sends(delta(content="x"), STOP)
    await answer(models)
    assert provider.asked[0].headers["authorization"] == "Basic abcdefgh"
    assert provider.asked[0].headers["x-team"] == "t"
    await models.aclose()


# --- what real servers answer -----------------------------------------------------------------------------------------


async def test_a_recorded_text_stream(provider: Provider, models: Catalogue) -> None:
    provider.script = scripted.says(scripted.recorded("chat_text"), close=True)
    said = bench.Said()
    reply = await answer(models, said)
    assert reply.content == [TextBlock(said.text)]
    assert said.text.startswith("Hello! I")
    assert (reply.stop_reason, reply.usage) == ("length", Usage(23, 24))


async def test_a_recorded_tool_call(provider: Provider, models: Catalogue) -> None:
    provider.script = scripted.says(scripted.recorded("chat_tool"), at_once=100, close=True)
    reply = await answer(models)
    [made] = reply.content
    assert isinstance(made, ToolCallBlock)
    assert (made.id, made.name) == ("J89wesxe2znyqxhoxn7qwGikXsyGitHY", "read_file")
    assert list(made.arguments) == ["path"]
    assert (reply.stop_reason, reply.usage) == ("toolUse", Usage(242, 35, cache_read_tokens=9))


async def test_thinking_is_kept_apart_under_both_of_its_names(provider: Provider, models: Catalogue) -> None:
    provider.script = sends(delta(reasoning_content="let "), delta(reasoning="me see"), delta(content="42"), STOP)
    said = bench.Said()
    reply = await answer(models, said)
    assert reply.content == [ThinkingBlock("let me see", "openai-chat reasoning_content"), TextBlock("42")]
    assert said.deltas[:2] == [ThinkingDelta("let "), ThinkingDelta("me see")]


@pytest.mark.parametrize(
    ("fragments", "calls"),
    [
        pytest.param([call(0, "{}", id="a", name="f"), call(1, "{}", id="b", name="g")], "fg", id="by index"),
        pytest.param([call(0, "{}", id="a", name="f"), call(0, "{}", id="b", name="g")], "fg", id="every index 0"),
        pytest.param([call(None, "{}", id="a", name="f"), call(None, "{}", id="b", name="g")], "fg", id="no index"),
        pytest.param([call(None, "{}", name="f"), call(None, "{}", name="g")], "fg", id="neither"),
        pytest.param([call(0, "{", id="a", name="f"), call(0, "}", id="a", name="f")], "f", id="all of it repeated"),
        pytest.param([call(0, "{", name="f"), call(0, "}", id="")], "f", id="empty id"),
        pytest.param([call(0, "{", name="f"), call(0, "}", id="late")], "f", id="late id"),
        pytest.param([call(0, "{}", id="a", name="f"), call(1, "{}", id="a", name="g")], "fg", id="one id twice"),
        pytest.param([call(0, "", id="a", name="f")], "f", id="no arguments"),
        pytest.param(
            [call(0, "{", id="a", name="f"), call(1, "{", id="b", name="g"), call(0, "}"), call(1, "}")],
            "fg",
            id="interleaved",
        ),
    ],
)
async def test_calls_are_put_together_however_they_are_numbered(
    provider: Provider, models: Catalogue, fragments: list[bytes], calls: str
) -> None:
    provider.script = sends(*fragments, delta("tool_calls"))
    reply = await answer(models)
    made = [block for block in reply.content if isinstance(block, ToolCallBlock)]
    assert "".join(block.name for block in made) == calls
    assert all(block.arguments == {} for block in made)
    assert len({block.id for block in made} - {""}) == len(calls)


@pytest.mark.parametrize(
    ("finish", "stop_reason"),
    [("eos", "stop"), ("end_turn", "stop"), ("tool_calls", "stop"), ("model_length", "length")],
)
async def test_an_end_by_another_name_is_an_end(
    provider: Provider, models: Catalogue, finish: str, stop_reason: str
) -> None:
    provider.script = sends(delta(content="x"), delta(finish))
    assert (await answer(models)).stop_reason == stop_reason


@pytest.mark.parametrize("finish", ["stop", "function_call", "tool_calls", "eos"])
async def test_calls_count_by_their_presence(provider: Provider, models: Catalogue, finish: str) -> None:
    provider.script = sends(call(0, "{}", id="a", name="f"), delta(finish))
    assert (await answer(models)).stop_reason == "toolUse"


@pytest.mark.parametrize(
    "text", ['{"command": "ls', "ls", '["ls"]', "[" * 5000, '{"a":' * 60 + "1" + "}" * 60, '{"a":1e999}']
)
async def test_arguments_that_are_no_object_are_kept_for_the_loop_to_refuse(
    provider: Provider, models: Catalogue, text: str
) -> None:
    provider.script = sends(call(0, text, id="a", name="bash"), delta("tool_calls"))
    [made] = (await answer(models)).content
    assert isinstance(made, ToolCallBlock)
    assert made.arguments == {"__malformed__": text[:2000]}


async def test_arguments_with_raw_line_breaks_and_many_brackets_are_read(provider: Provider, models: Catalogue) -> None:
    provider.script = sends(call(0, '{"text": "a\nb", "list": [' + "[]," * 60 + "1]}", id="a", name="f"), STOP)
    [made] = (await answer(models)).content
    assert isinstance(made, ToolCallBlock)
    assert made.arguments == {"text": "a\nb", "list": [[]] * 60 + [1]}


async def test_a_lone_surrogate_becomes_a_replacement_character(provider: Provider, models: Catalogue) -> None:  # K-27
    provider.script = sends(
        b'data: {"choices":[{"delta":{"content":"a\\ud83db"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"c\xe4d"}}]}\n\n',
        call(0, '{"k\\ud83d": "\\udc00"}', id="a", name="f"),
        STOP,
    )
    text, made = (await answer(models)).content
    assert text == TextBlock("a\ufffdbc\ufffdd")
    assert isinstance(made, ToolCallBlock)
    assert made.arguments == {"k\ufffd": "\ufffd"}


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("at_once", [1, 7, None])
async def test_bytes_may_come_one_by_one_with_any_line_ends_and_comments(
    provider: Provider, models: Catalogue, end: bytes, at_once: int | None
) -> None:
    events = (
        b"\xef\xbb\xbf: hi\n\n" + delta(content="a") + b": ping\n\n" + delta(content="\u2028ä") + STOP + scripted.DONE
    )
    stream = scripted.STREAM + chunked(events.replace(b"\n", end)) + scripted.END
    provider.script = scripted.says(stream, at_once=at_once)
    assert (await answer(models)).content == [TextBlock("a\u2028ä")]


async def test_odd_but_whole_streams_are_answers(provider: Provider, models: Catalogue) -> None:
    async def read(*events: bytes, done: bool = True) -> Reply:
        provider.script = sends(*events, done=done)
        return await answer(models)

    text = delta(content="x")
    assert (await read(text, STOP, done=False)).content == [TextBlock("x")]
    assert (await read(text, STOP, b"data: [DONE]", done=False)).content == [TextBlock("x")]
    assert (await read(text, STOP, scripted.DONE, b"data: rubbish\n\n")).content == [TextBlock("x")]
    assert (await read(text, STOP, delta(""))).content == [TextBlock("x")]
    assert (await read(delta(refusal="no"), STOP)).content == [TextBlock("no")]
    assert (await read(text, STOP, b'data: {"choices":null,"usage":null,"error":null}\n\n')).usage == Usage(0, 0)
    odd = b'data: {"choices":[],"usage":{"prompt_tokens":null,"completion_tokens":-1,"prompt_tokens_details":null}}\n\n'
    assert (await read(text, STOP, odd)).usage == Usage(0, 0)
    assert (await read(text, STOP, scripted.USAGE)).usage == Usage(12, 7, cache_read_tokens=5)
    assert (await read(text, delta("length"))).stop_reason == "length"


async def test_a_connection_whose_stream_was_read_to_its_end_is_used_again(
    provider: Provider, models: Catalogue
) -> None:
    provider.script = sends(delta(content="x"), STOP)
    for _ in range(3):
        await answer(models)
    assert provider.connections == 1


# --- what goes wrong (K-30) -------------------------------------------------------------------------------------------

HEAD = scripted.STREAM + chunked(delta(content="par"))
PAGE = b"<html><head><style>b{}</style></head><body><h1>Gateway\n trouble</h1></body></html>"

FAULTS = [
    ("401", scripted.answers(401, b'{"error":{"message":"bad key"}}'), "auth", "status 401: bad key"),
    ("403", scripted.answers(403, b'{"detail":"not you"}'), "auth", "status 403: not you"),
    ("429", scripted.answers(429, b'{"error":{"message":"slow down"}}'), "rate_limit", "status 429: slow down"),
    ("400", scripted.answers(400, b'{"error":"too long"}'), "refused", "status 400: too long"),
    ("404", scripted.answers(404, b'[{"error":{"message":"no such model"}}]'), "refused", "no such model"),
    ("500", scripted.answers(500, b"", "text/plain"), "provider", "status 500: (nothing)"),
    ("503", scripted.answers(503, b'{"message":"busy"}'), "overloaded", "status 503: busy"),
    ("502 page", scripted.answers(502, PAGE, "text/html"), "provider", "status 502: Gateway trouble"),
    ("302", scripted.says(b"HTTP/1.1 302 X\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n"), "provider", "status 302"),
    (
        "html 200",
        scripted.answers(200, PAGE, "text/html; charset=utf-8"),
        "provider",
        "text/html where an event stream",
    ),
    (
        "json 200",
        scripted.answers(200, b'{"error":{"message":"no"}}'),
        "provider",
        "application/json where an event stream",
    ),
    ("empty 200", scripted.answers(200, b"", "text/event-stream"), "incomplete", "without a finish reason"),
    ("no type", scripted.says(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nok\n\n"), "incomplete", "finish reason"),
    ("closed", scripted.says(b"", close=True), "unreachable", "disconnected"),
    ("no http", scripted.says(b"SSH-2.0\r\n\r\n", close=True), "unreachable", "cannot be reached at http://127.0.0.1"),
    ("reset", scripted.resets(), "unreachable", "cannot be reached"),
    ("reset later", scripted.resets(HEAD), "incomplete", "broke off its answer"),
    ("cut", scripted.says(HEAD, close=True), "incomplete", "broke off its answer"),
    ("cut in an event", scripted.says(HEAD + chunked(b'data: {"cho'), close=True), "incomplete", "broke off"),
    ("ended early", sends(delta(content="par"), done=False), "incomplete", "without a finish reason"),
    (
        "ended in an event",
        sends(delta(content="par"), STOP[:30], done=False),
        "incomplete",
        "in the middle of an event",
    ),
    ("done without finish", sends(delta(content="par")), "incomplete", "without a finish reason"),
    ("no json", sends(b"data: {oops\n\n"), "provider", "a chunk that cannot be read"),
    ("wrong json", sends(event := b'data: {"choices":[{"delta":{"content":7}}]}\n\n'), "provider", "cannot be read"),
    ("deep json", sends(b"data: " + b"[" * 3000 + b"\n\n"), "provider", "a chunk that cannot be read"),
    ("error chunk", sends(scripted.event({"error": {"message": "boom", "code": 502}})), "provider", "answer: boom"),
    ("limited", sends(scripted.event({"error": {"message": "x", "type": "rate_limit_error"}})), "rate_limit", "x"),
    ("overloaded", sends(scripted.event({"error": {"message": "x", "code": 529}})), "overloaded", "x"),
    ("error event", sends(b'event: error\ndata: {"message":"gone"}\n\n'), "provider", "answer: gone"),
    ("filtered", sends(delta(content="par"), delta("content_filter")), "content_filter", "content filter"),
    ("failed", sends(delta(content="par"), delta("error")), "provider", "finish reason 'error'"),
    ("no end we know", sends(delta(content="par"), delta("abort")), "provider", "finish reason 'abort'"),
    ("only spaces", sends(delta(content=" \n\t "), STOP), "incomplete", "without saying anything"),
    ("nothing said", sends(STOP), "incomplete", "without saying anything"),
    ("only thought", sends(delta(reasoning="hm"), delta("length")), "incomplete", "used all its tokens"),
    ("huge event", sends(b"data: " + b"x" * (9 << 20)), "provider", "an event of more than"),
    ("endless answer", sends(*[delta(content="x" * (1 << 20))] * 9), "provider", "more than 8388608 characters"),
]


@pytest.mark.parametrize(
    ("script", "kind", "text"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
async def test_a_fault_is_a_typed_error_that_quotes_it(
    provider: Provider, models: Catalogue, script: scripted.Script, kind: str, text: str
) -> None:
    provider.script = script
    with trio.fail_after(20), pytest.raises(ModelError) as caught:
        await answer(models)
    assert str(caught.value).startswith("local ")
    assert text in str(caught.value)
    assert caught.value.kind == kind
    # The next request is not affected.
    provider.script = sends(delta(content="well"), STOP)
    assert (await answer(models)).content == [TextBlock("well")]


async def test_nobody_listens() -> None:
    nobody = bench.catalogue("http://user:password@127.0.0.1:1/v1")
    with pytest.raises(ModelError, match="Connection refused") as caught:
        await answer(nobody)
    assert caught.value.kind == "unreachable"
    assert "password" not in str(caught.value)
    await nobody.aclose()


@pytest.mark.parametrize("head", [b"", HEAD])
async def test_a_silent_server_is_given_up(
    provider: Provider, models: Catalogue, head: bytes, autojump_clock: MockClock
) -> None:
    await models.warm()  # a thread: the clock must not jump meanwhile
    provider.script = scripted.hangs(head)
    with pytest.raises(ModelError, match="300 s") as caught:
        await answer(models)
    assert caught.value.kind == ("incomplete" if head else "unreachable")
    assert autojump_clock.current_time() >= 300


@pytest.mark.parametrize("head", [b"", HEAD])
async def test_cancelling_closes_the_connection_at_once(
    provider: Provider, models: Catalogue, head: bytes
) -> None:  # K-29
    reached = trio.Event()
    provider.script = scripted.hangs(head, reached)
    async with trio.open_nursery() as asking:
        asking.start_soon(answer, models)
        await reached.wait()
        asking.cancel_scope.cancel()
    with trio.fail_after(1):
        await provider.idle.wait()
    assert provider.open == 0


async def test_a_body_that_never_ends_is_quoted_by_its_start(provider: Provider, models: Catalogue) -> None:
    body = b"HTTP/1.1 500 X\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"word " * 50_000)
    provider.script = scripted.hangs(body)
    with trio.fail_after(2), pytest.raises(ModelError, match="word word") as caught:
        await answer(models)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "script",
    [
        scripted.answers(401, f'{{"error":{{"message":"wrong: {bench.KEY}"}}}}'.encode()),
        scripted.answers(500, b"x" * 750 + bench.KEY.encode(), "text/plain"),
        sends(scripted.event({"error": {"message": bench.KEY}})),
        sends(b"data: {" + bench.KEY.encode() + b"\n\n"),
        scripted.answers(200, bench.KEY.encode(), "text/plain"),
    ],
)
async def test_the_key_is_in_no_error(provider: Provider, models: Catalogue, script: scripted.Script) -> None:  # K-31
    provider.script = script
    with pytest.raises(ModelError) as caught:
        await answer(models)
    assert bench.KEY not in str(caught.value)
    assert bench.KEY[:12] not in str(caught.value)
    assert "secret" in str(caught.value)
    assert bench.KEY not in repr(models.resolve(bench.M))


async def test_proxies_of_the_environment_do_not_capture_loopback(
    provider: Provider, models: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    provider.script = sends(delta(content="x"), STOP)
    assert (await answer(models)).content == [TextBlock("x")]


async def test_proxy_settings_that_cannot_be_used_are_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "gopher://nowhere")
    models = bench.catalogue("http://192.0.2.1/v1")
    with pytest.raises(ModelError, match="cannot be asked") as caught:
        await answer(models)
    assert caught.value.kind == "unreachable"
