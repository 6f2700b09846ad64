"""Titles that come by themselves and on demand, row by row (T-1…T-12)."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from inprocess import Models, PlayedModel, Probe, Wire, call, running, text
from test_saving import Breaking
from titling import (
    ALL,
    FIRST,
    NAMER,
    OFF,
    Namer,
    agreed,
    by_hand,
    file_of,
    first_words,
    hangs,
    made,
    on_disk,
    say,
    state,
    stored,
    talks,
    title,
    told,
)
from trio.testing import MockClock

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ModelRef, TextBlock, ThinkingBlock, Usage
from loopd.agent import Model, ModelError, Reply
from loopd.agent.prompt import TITLE_PROMPT
from loopd.config import Config, Default, TitlePolicy

IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
SAYS = "Explain the project"


async def _refused(wire: Wire, method: str, params: Any) -> RpcError:
    with pytest.raises(RpcError) as refused:
        await wire.call(method, params)
    return refused.value


# --- T-1: the policy


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mode": "sometimes"}, "$.title.mode"),
        ({"modus": "off"}, "modus"),
        ({"mode": "off", "max_input_bytes": 5}, "max_input_bytes"),
        ({"model": {"provider": "titles"}}, "$.title.model"),
        ({"model": {"provider": "titles", "id": "namer", "key": "k"}}, "key"),
        ("first-prompt", "$.title"),
        *(
            ({name: value}, f"$.title.{name}")
            for name in ("maxInputBytes", "maxOutputTokens", "timeoutMs")
            for value in (0, -1, 2147483648, 1.5, "5", True)
        ),
    ],
)
async def test_a_policy_that_makes_no_sense_is_refused_with_its_place(
    options: Any, field: str, tmp_path: Path
) -> None:  # T-1
    async with running(tmp_path) as world:
        wire = await world.connect()
        ask = {"cwd": world.cwd, "session": {"kind": "new"}, "title": options}
        error = await _refused(wire, "runtime/open", ask)
        assert (error.kind, field in str(error)) == ("invalid_params", True), str(error)
        assert not world.daemon.runtimes.by_id
        opened = await wire.open(world)
        for method, more in (("newSession", {}), ("switchSession", {"path": opened["path"]})):
            ask = {"runtimeId": opened["runtimeId"], "title": options, **more}
            assert (await _refused(wire, f"runtime/{method}", ask)).kind == "invalid_params"


async def test_what_a_policy_leaves_out_the_configuration_says_and_no_file_keeps_it(tmp_path: Path) -> None:  # T-1
    policy = TitlePolicy(mode="all-prompts", max_input_bytes=2147483647, timeout_ms=1)
    async with running(tmp_path, config=Config(default=Default(title=policy)), titles=Namer()) as world:
        wire = await world.connect()
        opened = await wire.open(world, title={"maxOutputTokens": 7, "timeoutMs": 2147483647})
        own = msgspec.structs.replace(policy, max_output_tokens=7, timeout_ms=2147483647)
        assert world.session().titles.policy == own
        assert "max" not in Path(opened["path"]).read_text()
        # What is not said does not differ, what is said must not.
        session = {"cwd": world.cwd, "session": {"kind": "continue"}}
        for same in ({}, {"title": {}}, {"title": {"mode": "all-prompts", "maxOutputTokens": 7}}):
            assert not (await wire.call("runtime/open", session | same))["created"]
        error = await _refused(wire, "runtime/open", session | {"title": {"mode": "off"}})
        assert (error.kind, error.data["runtimeId"]) == ("conflict", opened["runtimeId"])
        # A session that follows keeps it, unless another one is given along.
        seat = {"runtimeId": opened["runtimeId"]}
        await wire.call("runtime/newSession", seat)
        assert world.session().titles.policy == own
        await wire.call("runtime/newSession", seat | {"title": {"mode": "off"}})
        assert world.session().titles.policy == msgspec.structs.replace(policy, mode="off")
        await wire.call("runtime/switchSession", seat | {"path": opened["path"], "title": FIRST})
        assert world.session().titles.policy == msgspec.structs.replace(policy, mode="first-prompt", model=NAMER)


async def test_without_a_word_no_model_is_asked(tmp_path: Path) -> None:  # T-1, T-3
    model = talks()
    async with running(tmp_path, model=model) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        assert world.session().titles.policy == TitlePolicy(
            mode="off", max_input_bytes=16384, max_output_tokens=256, timeout_ms=15000
        )
        await say(wire, opened)
        await title(wire, opened, "wait")
        assert model.turns == 1
        assert await agreed(world, wire, opened) == first_words(SAYS)


# --- T-2, T-3: which texts ask for one


async def test_the_first_words_come_at_once_and_the_models_title_after_its_write(tmp_path: Path) -> None:
    """T-2, T-3, T-12, S-9"""
    namer = Namer()
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened)
        before = (await state(wire, opened))["updatedAt"]
        assert await title(wire, opened, "wait") == {"title": made("A name", 0)}
        assert [event.get("title") for event in told(wire)] == [first_words(SAYS), made("A name", 0)]
        kinds = [params.event.__struct_config__.tag for params in wire.events]
        assert kinds[:5] == ["run_started", "prompt_timing", "message_start", "session_title", "message_end"]
        assert (await state(wire, opened))["updatedAt"] == before == file_of(opened)["updatedAt"]
        [row] = (await wire.call("session/list", {"cwd": world.cwd}))["sessions"]
        assert row["title"] == made("A name", 0)
        await say(wire, opened, "and more")
        await title(wire, opened, "wait")
        assert len(namer.asked) == 1
        assert await agreed(world, wire, opened) == made("A name", 0)


async def test_images_and_invisible_text_wait_for_a_text(tmp_path: Path) -> None:  # T-2, T-3
    namer, model = Namer(), PlayedModel([text("hi")], input=frozenset({"text", "image"}))
    async with running(tmp_path, model=model, titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened, [IMAGE])
        await say(wire, opened, "\u200b\x1b[0m")
        await title(wire, opened, "wait")
        assert not namer.asked
        namer.answers = [hangs, text("A name")]
        await say(wire, opened, [IMAGE, {"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}])
        await namer.requests(1)
        await say(wire, opened, [IMAGE])
        assert namer.open == 1  # what has no text is no newer text
        assert namer.texts() == ["What is\nthis?"]
        assert await title(wire, opened, "refresh") == {"title": made("A name", 4)}
        assert await agreed(world, wire, opened) == made("A name", 4)


async def test_all_prompts_makes_it_again_of_all_texts(tmp_path: Path) -> None:  # T-3, T-6
    namer = Namer([text("One"), text("Two"), text("Three")])
    async with running(tmp_path, model=PlayedModel([call(), text("done")]), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=ALL)
        await say(wire, opened, "first")
        await title(wire, opened, "wait")
        await say(wire, opened, "second")
        assert (await title(wire, opened, "wait"))["title"] == made("Two", 0, 4)
        assert namer.texts() == ["first", "second"]
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        opened = await wire.open(world, kind="continue", title=ALL)
        await title(wire, opened, "wait")
        assert len(namer.asked) == 2  # opening asks nobody
        await say(wire, opened, "third")
        await title(wire, opened, "wait")
        assert namer.texts() == ["first", "second", "third"]
        assert await agreed(world, wire, opened) == made("Three", 0, 4, 6)


@pytest.mark.parametrize("policy", [FIRST, ALL])
async def test_a_title_by_hand_is_pinned_before_the_first_prompt_too(policy: Any, tmp_path: Path) -> None:  # T-3, T-8
    namer = Namer()
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=policy)
        await title(wire, opened, "rename", text="Mine")
        await say(wire, opened)
        await say(wire, opened, "and more")
        await title(wire, opened, "wait")
        assert not namer.asked
        assert await agreed(world, wire, opened) == by_hand("Mine")


async def test_queued_and_steering_texts_ask_for_titles_too(tmp_path: Path) -> None:  # T-3, T-10
    namer = Namer([text("One"), text("Two"), text("Three"), text("Four")])
    gate = trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("hi")

    async with running(tmp_path, model=PlayedModel([waits, text("hi")]), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=ALL)
        session = {"sessionId": opened["sessionId"]}
        await wire.prompt(opened["sessionId"], "first")
        await namer.requests(1)
        await wire.call("queue/add", session | {"content": "later"})
        await wire.call("queue/add", session | {"content": "steer it", "steer": True})
        await title(wire, opened, "wait")
        assert len(namer.asked) == 1  # what waits is no part of the conversation yet
        gate.set()
        for _ in range(2):
            await wire.event("run_settled")
        await title(wire, opened, "wait")
        assert namer.texts() == ["first", "steer it", "later"]
        assert namer.most == 1
        kept = await agreed(world, wire, opened)
        assert kept["messageIndices"] == [0, 2, 4]


# --- T-4, T-5: what is stored, and what an old history is called


async def test_a_title_names_its_model_without_effort_and_an_empty_session_has_none(tmp_path: Path) -> None:  # T-4
    namer = Namer(ref=ModelRef("titles", "namer", "high"))
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(
            world, title=FIRST | {"model": {"provider": "titles", "id": "namer", "effort": "high"}}
        )
        assert "title" not in opened["state"]
        assert "title" not in await title(wire, opened, "wait")
        await say(wire, opened)
        await title(wire, opened, "wait")
        assert file_of(opened)["title"] == made("A name", 0)
        assert await agreed(world, wire, opened) == made("A name", 0)


async def test_the_default_is_the_conversations_model_without_its_effort(tmp_path: Path) -> None:  # T-1, T-4
    class Remembering(Models):
        def resolve(self, ref: ModelRef) -> Model:
            asked.append(ref)
            return super().resolve(ref)

    asked: list[ModelRef] = []
    async with running(tmp_path, models=Remembering(talks("A name"))) as world:
        wire = await world.connect()
        model = {"provider": "scripted", "id": "thinker"}
        opened = await wire.open(world, model=model | {"effort": "high"}, title={"mode": "first-prompt"})
        await say(wire, opened)
        await title(wire, opened, "wait")
        assert set(asked) == {ModelRef("scripted", "thinker", "high"), ModelRef("scripted", "thinker")}
        assert await agreed(world, wire, opened) == made("A name", 0) | {"model": model}


async def test_a_title_of_messages_that_a_kill_takes_along_is_none(tmp_path: Path) -> None:  # T-4, I-7
    model = PlayedModel([hangs])
    async with running(tmp_path, model=model, titles=Namer()) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await wire.prompt(opened["sessionId"], "first")
        assert (await title(wire, opened, "wait"))["title"] == made("A name", 0)
        assert file_of(opened)["title"] == made("A name", 0)
        session = Path(opened["path"]).parent
        killed = tmp_path / "killed" / session.name
        shutil.copytree(session, killed)
        killed_world = {"path": str(killed / "meta.json")}
        read = await wire.call("session/state", killed_world)
        assert "title" not in read
        assert read["recoverable"]["messages"] == 1
    async with running(tmp_path, model=talks(), titles=Namer([text("Another")])) as world:
        wire = await world.connect()
        session = {"kind": "open", "path": killed_world["path"]}
        again = await wire.call("runtime/open", {"cwd": world.cwd, "session": session, "title": FIRST})
        assert "title" not in again["state"]
        await wire.call("runtime/attach", {"runtimeId": again["runtimeId"]})
        await say(wire, again, "second")
        await title(wire, again, "wait")
        assert await agreed(world, wire, again) == made("Another", 0)


async def test_an_old_history_counts_as_titled_and_can_be_named_on_demand(tmp_path: Path) -> None:  # T-5, T-8
    namer = Namer()
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await say(wire, opened)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        before = Path(opened["path"]).read_bytes()
        opened = await wire.open(world, kind="continue", title=FIRST)
        assert opened["state"]["title"] == first_words(SAYS)
        assert Path(opened["path"]).read_bytes() == before
        await say(wire, opened, "and more")
        await title(wire, opened, "wait")
        assert not namer.asked
        assert await title(wire, opened, "refresh") == {"title": made("A name", 0)}
        assert namer.texts() == [SAYS]
        assert await agreed(world, wire, opened) == made("A name", 0)


# --- T-6, T-7: the request, and what becomes of its answer


async def test_the_request_is_a_turn_of_its_own_that_the_conversation_has_nothing_of(tmp_path: Path) -> None:  # T-6
    asked: list[Any] = []

    async def remembers(request: Any, _: Any) -> Reply:
        await trio.lowlevel.checkpoint()
        asked.append(bytes(request.input.encoded))
        return text("hi")

    namer = Namer([Reply([TextBlock("A name")], Usage(100, 20), "stop")])
    async with running(tmp_path, model=PlayedModel([remembers]), titles=namer, tools=[Probe()]) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=ALL | {"maxOutputTokens": 99})
        await say(wire, opened, 'Sag "hallo" 🙂')
        await title(wire, opened, "wait")
        [request] = namer.asked
        assert (request.system, request.tools, request.max_output_tokens) == (TITLE_PROMPT, (), 99)
        [message] = request.input.turn
        assert message.content == [TextBlock('["Sag \\"hallo\\" 🙂"]')]  # compact JSON, in UTF-8
        assert "language" in TITLE_PROMPT
        now = await state(wire, opened)
        assert now["usage"] == {"inputTokens": 3, "outputTokens": 1}
        assert now["titleUsage"] == {"inputTokens": 100, "outputTokens": 20}
        assert now["liveCount"] == now["messageCount"] == 2
        await say(wire, opened, "more")
        await title(wire, opened, "wait")
        assert b"A name" not in asked[-1]
        assert TITLE_PROMPT[:20].encode() not in asked[-1]
        now = await state(wire, opened)
        assert now["titleUsage"] == {"inputTokens": 200, "outputTokens": 40}
        assert told(wire)[-1]["usage"] == now["titleUsage"]
        assert "A name" not in Path(opened["path"]).with_name("history.jsonl").read_text()


async def test_an_answer_becomes_one_clean_line(tmp_path: Path) -> None:  # T-7
    said = Reply(
        [ThinkingBlock("hm"), TextBlock("<think>so</think>\n\u201cFix\x1b[1m the\n"), TextBlock("login\u201d\n")],
        Usage(1, 1),
        "stop",
    )
    async with running(tmp_path, model=talks(), titles=Namer([said])) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened)
        await title(wire, opened, "wait")
        assert await agreed(world, wire, opened) == made("Fix the login", 0)


# --- T-8: by hand and on demand


@pytest.mark.parametrize(
    ("policy", "kept"),
    [(OFF, first_words("first")), (FIRST, made("A name", 0)), (ALL, made("A name", 0, 2))],
    ids=["off", "first-prompt", "all-prompts"],
)
async def test_a_refresh_goes_by_the_mode_and_replaces_a_title_by_hand(
    policy: Any, kept: Any, tmp_path: Path
) -> None:  # T-8
    namer = Namer()
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=policy)
        await title(wire, opened, "rename", text="Mine")
        await say(wire, opened, "first")
        await say(wire, opened, "second")
        assert not namer.asked
        assert await title(wire, opened, "refresh") == {"title": kept}
        assert len(namer.asked) == (policy != OFF)
        assert file_of(opened)["title"] == kept
        assert await agreed(world, wire, opened) == kept


async def _fails(*_: Any) -> Reply:
    await trio.lowlevel.checkpoint()
    raise ModelError("rate_limit", "slowly", retry_after_s=1)


async def test_a_refresh_that_fails_says_so_and_keeps_the_title_by_hand(tmp_path: Path) -> None:  # T-8, T-11
    namer = Namer([_fails])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        error = await _refused(wire, "title/refresh", {"sessionId": opened["sessionId"]})
        assert (error.kind, error.data["reason"]) == ("title_failed", "no_text")
        await title(wire, opened, "rename", text="Mine")
        await say(wire, opened)
        error = await _refused(wire, "title/refresh", {"sessionId": opened["sessionId"]})
        assert (error.kind, error.data["reason"], str(error)) == ("title_failed", "rate_limit", "slowly")
        assert len(namer.asked) == 1
        assert "titleError" not in await state(wire, opened)
        assert await agreed(world, wire, opened) == by_hand("Mine")


async def test_refresh_and_rename_need_an_idle_saved_session_and_reserve_it(tmp_path: Path) -> None:  # T-8, S-15
    namer, fs = Namer([hangs]), Breaking()
    gate = trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("hi")

    async with running(tmp_path, model=PlayedModel([text("hi"), waits, text("hi")]), titles=namer, fs=fs) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world, title=FIRST)
        session = {"sessionId": opened["sessionId"]}
        asks = [("title/refresh", session), ("title/rename", session | {"text": "Mine"})]
        await title(wire, opened, "rename", text="Mine")
        await say(wire, opened)
        waiting = await wire.request("title/refresh", session)
        await namer.requests(1)
        for method, params in [*asks, ("session/prompt", session | {"content": "x"})]:
            error = await _refused(other, method, params)
            assert (error.kind, error.data["operation"]) == ("session_busy", "refreshTitle")
        assert await title(other, opened, "cancel") == {"cancelled": True}
        with pytest.raises(RpcError) as cancelled:
            await wire.answer(waiting)
        assert (cancelled.value.kind, cancelled.value.data["reason"]) == ("title_failed", "cancelled")
        run_id = await wire.prompt(opened["sessionId"])
        for method, params in asks:
            assert (await _refused(wire, method, params)).kind == "session_busy"
        gate.set()
        await wire.call("run/wait", {"runId": run_id})
        fs.error = errno.ENOSPC
        await say(wire, opened, "unsaved")
        for method, params in asks:
            assert (await _refused(wire, method, params)).kind == "pending_save"
        fs.error = None
        assert (await wire.call("session/flush", session))["flushed"]
        assert len(namer.asked) == 1
        assert await agreed(world, wire, opened) == by_hand("Mine")


# --- T-9: waiting and cancelling


async def test_wait_cancels_nothing_and_cancel_and_abort_leave_nothing_open(tmp_path: Path) -> None:  # T-9
    gate = trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("One")

    namer = Namer([waits, hangs])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world, title=ALL)
        await say(wire, opened, "first")
        waiting = await wire.request("title/wait", {"sessionId": opened["sessionId"]})
        await wire.call("server/status")
        await wire.send(
            msgspec.json.encode({"jsonrpc": "2.0", "method": "$/cancelRequest", "params": {"id": waiting}}) + b"\n"
        )
        with pytest.raises(RpcError, match="wait"):
            await wire.answer(waiting)
        waiting = await wire.request("title/wait", {"sessionId": opened["sessionId"]})
        gate.set()
        assert await wire.answer(waiting) == {"title": made("One", 0)}
        assert await title(wire, opened, "cancel") == {"cancelled": False}
        for ends in ("title/cancel", "session/abort"):
            await say(wire, opened, ends)
            await namer.requests(2 + (ends == "session/abort"))
            assert namer.open == 1
            waiting = await other.request("title/wait", {"sessionId": opened["sessionId"]})
            await wire.call(ends, {"sessionId": opened["sessionId"]})
            assert namer.open == 0
            assert await other.answer(waiting) == {"title": made("One", 0)}
        assert await agreed(world, wire, opened) == made("One", 0)


@pytest.mark.parametrize(("ends", "cancelled"), [("cancel", "title"), ("abort", "both"), ("stop", "run")])
async def test_each_of_stop_cancel_and_abort_ends_what_it_names(ends: str, cancelled: str, tmp_path: Path) -> None:
    """T-9"""
    namer = Namer([hangs])
    async with running(tmp_path, model=PlayedModel([hangs]), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        session = {"sessionId": opened["sessionId"]}
        run_id = await wire.prompt(opened["sessionId"])
        await namer.requests(1)
        match ends:
            case "cancel":
                assert await title(wire, opened, "cancel") == {"cancelled": True}
            case "abort":
                assert await wire.call("session/abort", session) == {"stopped": True}
            case "stop":
                assert await wire.call("session/stop", session | {"runId": run_id}) == {"stopped": True}
        assert (world.session().run is None, namer.open == 0) == {
            "title": (False, True),
            "both": (True, True),
            "run": (True, False),
        }[cancelled]
        assert await wire.call("session/abort", session) == {"stopped": ends == "cancel"}
        assert namer.open == 0
        assert await agreed(world, wire, opened) == first_words("hi")


@pytest.mark.parametrize("then", ["flush", "cancel", "abort"])
async def test_a_finished_title_waits_for_the_flush_of_its_conversation(then: str, tmp_path: Path) -> None:
    """T-9, S-10, S-15"""
    fs, gate = Breaking(), trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("A name")

    async with running(tmp_path, model=talks(), titles=Namer([waits]), fs=fs) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        session = {"sessionId": opened["sessionId"]}
        fs.error = errno.ENOSPC
        assert not (await say(wire, opened))["saved"]
        gate.set()
        assert await title(wire, opened, "wait") == {"title": first_words(SAYS)}
        if then != "flush":
            answer = await wire.call(f"{'title' if then == 'cancel' else 'session'}/{then}", session)
            assert answer == ({"cancelled": True} if then == "cancel" else {"stopped": False})
        fs.error = None
        assert (await wire.call("session/flush", session))["flushed"]
        assert await agreed(world, wire, opened) == (made("A name", 0) if then == "flush" else first_words(SAYS))


# --- T-10: what makes older work stale (see also test_title_races.py)


@pytest.mark.parametrize("policy", [FIRST, ALL])
async def test_new_text_supersedes_and_only_all_prompts_starts_again(policy: Any, tmp_path: Path) -> None:  # T-10
    namer = Namer([hangs, text("Two")])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=policy)
        await say(wire, opened, "first")
        await namer.requests(1)
        await say(wire, opened, "second")
        await title(wire, opened, "wait")
        again = policy is ALL
        assert (len(namer.asked), namer.open, namer.most) == (1 + again, 0, 1)
        assert await agreed(world, wire, opened) == (made("Two", 0, 2) if again else first_words("first"))


# --- T-11: when no title comes


def _answer(*blocks: Any, reason: Any = "stop") -> Reply:
    return Reply([block if not isinstance(block, str) else TextBlock(block) for block in blocks], Usage(5, 1), reason)


async def _breaks(*_: Any) -> Reply:
    await trio.lowlevel.checkpoint()
    raise ZeroDivisionError


async def _is_wordy(_: Any, say: Any) -> Reply:
    from loopd.agent import TextDelta

    await trio.lowlevel.checkpoint()
    for _ in range(1000):
        say(TextDelta("word " * 2048))
    raise AssertionError("nobody stopped it")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (_fails, "rate_limit"),
        (_breaks, "internal"),
        (_is_wordy, "provider"),
        (_answer("A name", reason="length"), "incomplete"),
        (_answer("A name", reason="aborted"), "incomplete"),
        (_answer("A name", *call().content, reason="toolUse"), "tool_call"),
        (_answer("", " \n"), "empty"),
        (_answer("<think>only thoughts</think>"), "empty"),
        (_answer('""'), "empty"),
        (_answer(ThinkingBlock("hm")), "empty"),
    ],
)
async def test_what_goes_wrong_is_told_changes_nothing_and_is_not_tried_again(
    answer: Any, kind: str, tmp_path: Path
) -> None:  # T-11, K-41
    namer = Namer([answer, answer, text("At last")])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        result = await say(wire, opened)
        assert (result["outcome"], result["saved"]) == ("success", True)
        waited = await title(wire, opened, "wait")
        assert (waited["title"], waited["titleError"]["kind"]) == (first_words(SAYS), kind)
        assert told(wire)[-1]["error"] == waited["titleError"] == (await state(wire, opened))["titleError"]
        assert "title" not in told(wire)[-1]
        assert len(namer.asked) == 1
        attached = await world.connect()
        replica = await attached.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
        assert replica["state"]["titleError"] == waited["titleError"]
        await say(wire, opened, "and more")
        assert (await title(wire, opened, "wait"))["titleError"] == waited["titleError"]
        error = await _refused(wire, "title/refresh", {"sessionId": opened["sessionId"]})
        assert (error.kind, error.data["reason"]) == ("title_failed", kind)
        assert (await state(wire, opened))["titleError"] == waited["titleError"]
        assert await title(wire, opened, "refresh") == {"title": made("At last", 0)}
        assert "titleError" not in await state(wire, opened)
        assert await agreed(world, wire, opened) == made("At last", 0)


async def test_a_model_that_is_not_there_is_an_error_of_the_title_only(tmp_path: Path) -> None:  # T-11
    async with running(tmp_path, model=talks()) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST | {"model": {"provider": "none", "id": "x"}})
        assert (await say(wire, opened))["outcome"] == "success"
        assert (await title(wire, opened, "wait"))["titleError"]["kind"] == "model_unavailable"
        assert await agreed(world, wire, opened) == first_words(SAYS)


@pytest.mark.parametrize("over", [0, 1])
async def test_texts_may_have_so_many_bytes_as_json_and_not_one_more(over: int, tmp_path: Path) -> None:  # T-1, T-11
    namer = Namer()
    said = ["first", "zweite: äöü🙂 \"'\\\n"]
    size = len(msgspec.json.encode(said))
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=ALL | {"maxInputBytes": size - over})
        for one in said:
            await say(wire, opened, one)
            waited = await title(wire, opened, "wait")
        assert ("titleError" in waited, len(namer.asked)) == (bool(over), 2 - over)
        if over:
            assert waited["titleError"]["kind"] == "input_too_large"
        assert await agreed(world, wire, opened) == made("A name", *([0] if over else [0, 2]))


async def test_the_deadline_is_for_key_and_answer_and_ends_the_request(tmp_path: Path, mock_clock: MockClock) -> None:
    """T-11, K-41"""
    namer = Namer([hangs])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST | {"timeoutMs": 3000})
        assert (await say(wire, opened))["outcome"] == "success"
        await namer.requests(1)
        mock_clock.jump(2.9)
        assert (await wire.call("server/status"))["runs"] == 0
        assert namer.open == 1
        mock_clock.jump(0.2)
        waited = await title(wire, opened, "wait")
        assert waited["titleError"]["kind"] == "timeout"
        assert (namer.open, len(namer.asked)) == (0, 1)
        assert await agreed(world, wire, opened) == first_words(SAYS)


async def test_a_title_that_cannot_be_written_is_told_and_the_old_one_stays(tmp_path: Path) -> None:  # T-11, I-7
    gate, fs = trio.Event(), Breaking()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("A name")

    async with running(tmp_path, model=talks(), titles=Namer([waits, text("Another")]), fs=fs) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened)
        fs.error = errno.ENOSPC
        gate.set()
        assert (await title(wire, opened, "wait"))["titleError"]["kind"] == "save_failed"
        assert not (await state(wire, opened))["hasPendingSave"]
        assert (await _refused(wire, "title/refresh", {"sessionId": opened["sessionId"]})).kind == "save_failed"
        assert (await state(wire, opened))["title"] == first_words(SAYS)
        fs.error = None
        await wire.call("session/flush", {"sessionId": opened["sessionId"]})
        assert stored(opened) is None
        assert await agreed(world, wire, opened) == first_words(SAYS)


async def test_a_title_model_that_takes_ten_seconds_delays_no_prompt(tmp_path: Path, mock_clock: MockClock) -> None:
    """T-8, T-11"""
    slow = Namer()

    async def ten_seconds(*_: Any) -> Reply:
        await trio.sleep(10)
        return text("A name")

    slow.answers = [ten_seconds]
    async with running(tmp_path, model=talks(), titles=slow) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=ALL)
        for number in range(1, 6):
            assert (await say(wire, opened, f"text {number}"))["outcome"] == "success"
            await slow.requests(number)
        assert mock_clock.current_time() == 0
        assert slow.most == slow.open == 1
        mock_clock.jump(10)
        await title(wire, opened, "wait")
        assert await agreed(world, wire, opened) == made("A name", 0, 2, 4, 6, 8)


async def test_of_fifty_prompts_typed_fast_the_last_names_the_session_with_one_request_at_a_time(
    tmp_path: Path,
) -> None:  # T-10
    async def slowly(*_: Any) -> Reply:
        try:
            for _ in range(30):
                await trio.lowlevel.checkpoint()
            return text(f"Name {len(namer.asked)}")
        finally:
            with trio.CancelScope(shield=True):  # closing its connection takes its time
                for _ in range(5):
                    await trio.lowlevel.checkpoint()

    namer = Namer([slowly])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=ALL)
        for number in range(50):
            content = {"content": f"text {number}", "steer": bool(number % 3)}
            await wire.request("queue/add", {"sessionId": opened["sessionId"], **content})
        with trio.fail_after(30):
            while (await state(wire, opened))["queue"]["items"] or world.session().run:  # noqa: ASYNC110 nothing tells
                await trio.lowlevel.checkpoint()
        await title(wire, opened, "wait")
        assert (namer.most, namer.open) == (1, 0)
        assert sorted(namer.texts()) == sorted(f"text {number}" for number in range(50))
        kept = await agreed(world, wire, opened)
        assert (kept["text"], len(kept["messageIndices"])) == (f"Name {len(namer.asked)}", 50)


# --- what else a session is: in memory, a draft, idle, drained


async def test_in_memory_and_as_a_draft_the_same_holds(tmp_path: Path) -> None:  # S-2, S-3
    async with running(tmp_path, model=talks(), titles=Namer()) as world:
        wire = await world.connect()
        memory = await wire.open(world, kind="memory", runtimeId="new", title=FIRST)
        await say(wire, memory)
        assert (await title(wire, memory, "wait"))["title"] == made("A name", 0)
        draft = await wire.open(world, kind="draft", title=FIRST)
        assert not Path(draft["path"]).exists()
        await say(wire, draft)
        await title(wire, draft, "wait")
        assert await agreed(world, wire, draft) == made("A name", 0)


async def test_title_work_counts_as_not_idle(tmp_path: Path, mock_clock: MockClock) -> None:
    async with running(tmp_path, model=talks(), titles=Namer([hangs])) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False, title=FIRST | {"timeoutMs": 2147483647})
        await say(wire, opened)
        assert not world.session().can_be_reopened
        for _ in range(200):
            mock_clock.jump(15)
            await trio.testing.wait_all_tasks_blocked()
        assert world.daemon.runtimes.by_id
        await title(wire, opened, "cancel")
        assert world.session().can_be_reopened


async def test_a_drain_lets_titles_finish_until_its_deadline_and_starts_none(tmp_path: Path) -> None:  # D-4
    gate = trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("A name")

    namer = Namer([waits, hangs])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened)
        await namer.requests(1)
        draining = await other.request("server/drain", {"deadlineMs": 60_000})
        await other.call("server/status")
        assert namer.open == 1
        gate.set()
        assert (await other.answer(draining))["quiet"]
        assert (await state(wire, opened))["title"] == made("A name", 0)
        await other.call("server/drain", {"cancel": True})
        refreshing = await wire.request("title/refresh", {"sessionId": opened["sessionId"]})
        await namer.requests(2)
        assert (await other.call("server/drain", {"deadlineMs": 0}))["quiet"]
        assert namer.open == 0
        with pytest.raises(RpcError, match="cancelled"):
            await wire.answer(refreshing)
        assert await agreed(world, wire, opened, close=False) == made("A name", 0)
        path = opened["path"]
    async with running(tmp_path) as world:
        assert await on_disk(world, {"path": path}) == made("A name", 0)


async def test_what_steers_a_run_in_a_draining_daemon_asks_for_no_title(tmp_path: Path) -> None:  # D-4
    gate = trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("hi")

    namer = Namer([text("One"), text("Two")])
    async with running(tmp_path, model=PlayedModel([waits, text("hi")]), titles=namer) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world, title=ALL)
        await wire.prompt(opened["sessionId"], "first")
        await title(wire, opened, "wait")
        draining = await other.request("server/drain", {"deadlineMs": 60_000})
        await other.call("server/status")
        await wire.call("queue/add", {"sessionId": opened["sessionId"], "content": "second", "steer": True})
        gate.set()
        assert (await other.answer(draining))["quiet"]
        assert (await state(wire, opened))["messageCount"] == 4
        assert len(namer.asked) == 1
        await other.call("server/drain", {"cancel": True})
        assert await agreed(world, wire, opened) == made("One", 0)


@pytest.mark.parametrize("ends", ["end", "TERM"])
@pytest.mark.parametrize("refreshing", [False, True])
async def test_a_daemon_that_ends_waits_for_no_title_and_the_file_says_what_was_told(
    ends: str, refreshing: bool, tmp_path: Path, mock_clock: MockClock
) -> None:  # D-4, K-52
    namer = Namer([hangs])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened)
        await namer.requests(1)
        if refreshing:
            await wire.request("title/refresh", {"sessionId": opened["sessionId"]})
            await namer.requests(2)
        if ends == "end":
            world.daemon.end()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
            while not world.services.draining:  # noqa: ASYNC110 nothing tells
                await trio.lowlevel.checkpoint()
            assert namer.open == 1
            mock_clock.jump(2)  # of the four that this daemon has, two are for what is left
        await world.ended.wait()
        assert mock_clock.current_time() <= 2
        assert (world.exit_code, namer.open) == (0, 0)
    async with running(tmp_path) as world:
        assert await on_disk(world, opened) == first_words(SAYS)
