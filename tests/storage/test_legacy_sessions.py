"""One-file sessions of version 2: what is read in them, what is refused, and that moving them loses nothing (S-18)."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_disks import MODEL, NOW, Conversation, Faulty, Recording, Steps, lay_out

from loop_protocol.v1.types import AssistantMessage, PromptTiming
from loopd.core.history import History, decode_message
from loopd.storage import Metadata, SessionLocked, SessionMalformed, SessionMissing, SessionUnsupported, StorageError
from loopd.storage.catalog import Catalog
from loopd.storage.files import open_session, read_session
from loopd.storage.fs import CREATE, DIRECTORY, READ, FileSystem, opened, sync_directory, write_all
from loopd.storage.legacy import migrate, read

HEADER: dict[str, Any] = {"format": "loop-session", "version": 2, "id": "old", "cwd": "/"}
CALL = {"type": "toolCall", "id": "t1", "name": "read", "arguments": {"path": "a"}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hello \N{SNOWMAN}", "timestamp": NOW},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "let me see"}, CALL],
        "usage": {"input": 9, "cost": 0.5},
    },
    {"role": "toolResult", "toolCallId": "t1", "content": [{"type": "text", "text": "42"}], "details": {"rows": [1]}},
    {"role": "assistant", "content": "it is", "provider": "p", "model": "m", "stopReason": "stop", "api": "x"},
]


def _body(header: dict[str, Any], messages: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in (header, *messages))


def _old(place: Path, header: dict[str, Any] | None = None, messages: list[Any] | None = None) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    file = place / "old.jsonl"
    file.write_bytes(_body(HEADER | (header or {}), TALK if messages is None else messages))
    return file


def _migrate(fs: FileSystem, file: Path, **options: Any) -> str:
    given: dict[str, Any] = {"model": MODEL, "permission": "read-only", "require_cwd": str} | options
    return migrate(fs, str(file), **given)


def _read(file: Path, fs: FileSystem | None = None) -> tuple[str, Metadata, History]:
    return read(fs or Steps(), str(file), model=MODEL, permission="read-only")


def _messages(history: History) -> list[Any]:
    return [json.loads(history.line(index)) for index in range(history.messages)]


def _tree(root: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def _listed(place: Path) -> tuple[list[str], list[str], list[str]]:
    listing = Catalog(Steps(), "/nowhere").list("/", str(place))
    return [row.path for row in listing.rows], listing.legacy, [one.path for one in listing.damaged]


# --- what is read -----------------------------------------------------------------------------------------------------


def test_opening_moves_it_with_all_that_it_says(tmp_path: Path) -> None:  # S-18, S-20, S-27
    title = {"text": "My work", "source": "model", "messageIndices": [0], "model": {"provider": "p", "id": "m"}, "x": 1}
    told = {
        "createdAt": NOW,
        "updatedAt": NOW + 7,
        "model": {"provider": "p", "id": "m"},
        "permission": "workspace-write",
        "unread": True,
        "pinnedAt": NOW + 1,
        "title": title,
        "colour": {"deep": [1, 2.50]},
    }
    file = _old(tmp_path / "s", told)
    path = Path(_migrate(Steps(), file))
    assert path == tmp_path / "s" / "old" / "meta.json"
    assert not file.exists()
    assert sorted(one.name for one in (tmp_path / "s").iterdir()) == ["old"]
    document = json.loads(path.read_text())
    assert {key: document[key] for key in told} == told
    assert (document["id"], document["cwd"], document["version"]) == ("old", "/", 3)
    store, history = open_session(Steps(), str(path))
    store.close()
    assert (history.messages, history.user_messages) == (4, 1)
    assert [path.stat().st_mode & 0o777 for path in (path, path.with_name("history.jsonl"), path.parent)] == [
        0o600,
        0o600,
        0o700,
    ]
    assert _listed(tmp_path / "s") == ([str(path)], [], [])


def test_what_a_message_lacks_is_neutral_and_what_is_not_known_stays(tmp_path: Path) -> None:  # S-18, S-27
    _, meta, history = _read(_old(tmp_path, {"createdAt": NOW - 5}))
    user, asked, result, said = _messages(history)
    assert user == {
        "role": "user",
        "index": 0,
        "content": [{"type": "text", "text": "hello \N{SNOWMAN}"}],
        "timestamp": NOW,
    }
    assert asked["usage"] == {"input": 9, "cost": 0.5, "inputTokens": 0, "outputTokens": 0}
    neutral = {"index": 1, "timestamp": NOW - 5, "provider": "unknown", "model": "unknown", "stopReason": "stop"}
    assert {key: asked[key] for key in neutral} == neutral
    assert (result["toolName"], result["isError"], result["details"]) == ("read", False, {"rows": [1]})
    assert (said["content"], said["provider"], said["api"]) == ([{"type": "text", "text": "it is"}], "p", "x")
    assert [decode_message(line + b"\n").index for line in map(history.line, range(4))] == [0, 1, 2, 3]
    assert isinstance(history.last_message, AssistantMessage)
    assert (meta.committed.messages, meta.committed.user_messages, meta.unread, meta.pinned_at) == (4, 1, False, None)


def test_a_header_may_say_no_more_than_format_version_and_cwd(tmp_path: Path) -> None:  # S-18
    file = tmp_path / "bare.jsonl"
    file.write_text('{"format":"loop-session","version":2,"cwd":"/"}')  # nor need it end in a newline
    os.utime(file, ns=(0, NOW * 1_000_000))
    _, meta, history = _read(file)
    assert (meta.id, meta.created_at, meta.updated_at, meta.model) == ("bare", NOW, NOW, MODEL)
    assert (meta.permission, meta.unread, history.messages) == ("read-only", False, 0)
    path = _migrate(Steps(), file, permission="workspace-write")
    assert read_session(Steps(), path)[0].permission == "workspace-write"


def test_times_may_be_written_as_dates(tmp_path: Path) -> None:
    dates = {"createdAt": "2023-11-14T22:13:20.000Z", "updatedAt": "2023-11-14T23:13:20.5+01:00", "pinnedAt": NOW}
    _, meta, _ = _read(_old(tmp_path, dates))
    assert (meta.created_at, meta.updated_at, meta.pinned_at) == (NOW, NOW + 500, NOW)


def test_timings_are_kept_as_they_are_and_no_run_is_made_up(tmp_path: Path) -> None:  # P-6
    timings = [
        {"userMessageIndex": 0, "startedAt": NOW},
        {"userMessageIndex": 0, "startedAt": NOW, "finishedAt": NOW + 5, "stopped": True, "note": "mine"},
        {
            "id": "a",
            "userMessageIndex": 0,
            "messageStartIndex": 1,
            "messageEndIndex": 4,
            "startedAt": 1,
            "finishedAt": 2,
        },
    ]
    path = _migrate(Steps(), _old(tmp_path, {"promptTimings": timings}))
    meta, history = read_session(Steps(), path)
    assert history.timings == msgspec.convert(timings, list[PromptTiming])
    assert (history.runs, history.requests) == ({}, {})
    assert [json.loads(line)["timing"] for line in history.lines[4:]] == timings
    assert "promptTimings" not in Path(path).read_text()
    assert meta.committed.messages == 4


def test_a_header_longer_than_a_block_is_read_and_listed(tmp_path: Path) -> None:  # S-4, P-6
    timings = [{"userMessageIndex": 0, "startedAt": NOW + n, "finishedAt": NOW + n + 1} for n in range(9000)]
    file = _old(tmp_path, {"promptTimings": timings})
    assert _listed(tmp_path) == ([], [str(file)], [])
    path = _migrate(Steps(), file)
    assert len(read_session(Steps(), path)[1].timings) == 9000
    assert os.path.getsize(path) < 1000  # it does not grow with the history (S-23)


def test_half_of_a_surrogate_pair_becomes_the_sign_for_it_and_whole_ones_stay(tmp_path: Path) -> None:
    said = {"role": "user", "content": r"cut \ud83d" + "\ud83d \N{PILE OF POO} \\" + "\udca9", "mine": "\udca9"}
    _, _, history = _read(_old(tmp_path, messages=[said]))
    assert b"\\ud83d\\udca9" in history.lines[0]
    (message,) = _messages(history)
    assert message["content"][0]["text"] == r"cut \ud83d" + "\N{REPLACEMENT CHARACTER} \N{PILE OF POO} \\\ufffd"
    assert message["mine"] == "\N{REPLACEMENT CHARACTER}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
MORE = st.dictionaries(st.text(min_size=1).map("x".__add__), JSON, max_size=3)
SAID = st.text() | st.lists(st.builds(lambda text: {"type": "text", "text": text}, st.text()), max_size=3)
OLD_TIMINGS = st.lists(st.fixed_dictionaries({"userMessageIndex": st.just(0), "startedAt": st.integers(0, NOW)}))


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(SAID)} | draw(MORE)]
    for _ in range(draw(st.integers(0, 4))):
        calls = [CALL | {"id": id} for id in draw(st.lists(st.sampled_from("abc"), max_size=2))]
        messages.append(
            {"role": "assistant", "content": [{"type": "text", "text": draw(st.text())}, *calls]} | draw(MORE)
        )
        messages += [
            {"role": "toolResult", "toolCallId": call["id"], "content": draw(SAID)} | draw(MORE) for call in calls
        ]
        messages.append({"role": "user", "content": draw(SAID)} | draw(MORE))
    if draw(st.booleans()):
        messages = [message | {"index": index, "timestamp": NOW} for index, message in enumerate(messages)]
    return messages


def _block(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@given(header=MORE, messages=conversations(), timings=OLD_TIMINGS)
def test_whatever_it_says_reads_the_same_afterwards(
    header: dict[str, Any],
    messages: list[dict[str, Any]],
    timings: list[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # S-18, S-27
    file = _old(tmp_path_factory.mktemp("old"), header | {"promptTimings": timings}, messages)
    before = _read(file)
    path = _migrate(Steps(), file, durable=False)
    store, history = open_session(Steps(), path, durable=False)
    assert [line for line in history.lines] == before[2].lines
    assert history.timings == msgspec.convert(timings, list[PromptTiming])
    document = json.loads(Path(path).read_text())
    assert {key: document[key] for key in header} == header
    for written, found in zip(messages, _messages(history), strict=True):
        assert found["content"] == _block(written["content"])
        assert {key: found[key] for key in written if key != "content"} == {
            key: value for key, value in written.items() if key != "content"
        }
    assert store.commit(Conversation(history).turn("more")).committed.messages == len(messages) + 4
    store.close()
    assert {key: json.loads(Path(path).read_text())[key] for key in header} == header


# --- what is refused --------------------------------------------------------------------------------------------------


def _lines(*lines: bytes) -> bytes:
    return b"".join(line + b"\n" for line in lines)


HEAD = json.dumps(HEADER).encode()
USER = json.dumps(TALK[0]).encode()
NO_SESSIONS: list[tuple[bytes, int | None, str]] = [
    (b"", 0, "JSON"),
    (b"\n", 0, "JSON"),
    (_lines(b"hello"), 0, "JSON"),
    (_lines(b'{"role":"user"}'), 0, "format"),
    (_lines(b'{"format":"loop-session","version":2}'), 0, "cwd"),
    (_lines(HEAD.replace(b'"/"', b'"w"')), 0, "absolute"),
    (_lines(HEAD.replace(b'"/"', b'"/\\u0000"')), 0, "absolute"),
    (_lines(HEAD.replace(b'"old"', b'"new"')), 0, "the file's name 'old'"),
    (_lines(HEAD.replace(b'"old"', b'"../old"')), 0, "the file's name 'old'"),
    (_lines(HEAD.replace(b"}", b',"unread":"no"}')), 0, "unread"),
    (_lines(HEAD.replace(b"}", b',"createdAt":-1}')), None, "negative"),
    (_lines(HEAD.replace(b"}", b',"createdAt":"today"}')), 0, "createdAt"),
    (_lines(HEAD.replace(b"}", b',"permission":"all"}')), 0, "permission"),
    (_lines(HEAD.replace(b"}", b',"title":{"text":"x"}}')), 0, "title"),
    (_lines(HEAD.replace(b"}", b',"promptTimings":[{}]}')), 0, "userMessageIndex"),
    (_lines(HEAD.replace(b"}", b',"promptTimings":[{"userMessageIndex":0,"startedAt":1}]}')), 0, "promptTimings[0]"),
    (_lines(HEAD.replace(b"}", b',"much":"' + b"x" * 1024 * 1024 + b'"}')), 0, "larger than"),
    (_lines(HEAD.replace(b"}", b',"x":"\xff"}')), 0, "UTF-8"),
    (_lines(HEAD, USER, b""), len(HEAD) + len(USER) + 2, "JSON"),
    (_lines(HEAD, USER)[:-2], len(HEAD) + 1, "JSON"),
    (_lines(HEAD, USER + USER), len(HEAD) + 1, "JSON"),
    (_lines(HEAD, b"[1]"), len(HEAD) + 1, "object"),
    (_lines(HEAD, b"[" * 9000), len(HEAD) + 1, ""),
    (_lines(HEAD, b'{"type":"weather"}'), len(HEAD) + 1, "role"),
    (_lines(HEAD, b'{"role":"king","content":"x"}'), len(HEAD) + 1, "king"),
    (_lines(HEAD, b'{"role":"user"}'), len(HEAD) + 1, "content"),
    (_lines(HEAD, b'{"role":"user","content":[{"type":"song"}]}'), len(HEAD) + 1, "song"),
    (_lines(HEAD, b'{"role":"user","content":"x","index":1}'), len(HEAD) + 1, "index 1 where 0 was due"),
    (_lines(HEAD, b'{"role":"user","content":"x","timestamp":"noon"}'), len(HEAD) + 1, "timestamp"),
    (_lines(HEAD, b'{"role":"user","content":"\xff"}'), len(HEAD) + 1, "UTF-8"),
    (_lines(HEAD, b'{"role":"assistant","content":"x","usage":7}'), len(HEAD) + 1, "usage"),
    (_lines(HEAD, b'{"role":"assistant","content":"x","stopReason":"tired"}'), len(HEAD) + 1, "tired"),
    (_lines(HEAD, b'{"role":"toolResult","toolCallId":"t","content":"x"}'), len(HEAD) + 1, "no call waits"),
    (_body(HEADER, TALK[:2]), len(_body(HEADER, TALK[:2])), "no result"),
    (_body(HEADER, [*TALK[:2], TALK[0]]), len(_body(HEADER, TALK[:2])), "no result"),
]


@pytest.mark.parametrize(("body", "offset", "reason"), NO_SESSIONS)
def test_what_makes_no_sense_is_refused_with_its_place_and_stays(
    body: bytes, offset: int | None, reason: str, tmp_path: Path
) -> None:  # S-5, S-18
    file = tmp_path / "old.jsonl"
    file.write_bytes(body)
    refusals = []
    for attempt in (_read, lambda file: _migrate(Steps(), file)):
        with pytest.raises(SessionMalformed) as refused:
            attempt(file)
        assert (refused.value.path, refused.value.offset) == (str(file), offset)
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]
    assert reason in refusals[0]
    assert _tree(tmp_path) == {"old.jsonl": body}


@pytest.mark.parametrize("kind", [{"version": 3}, {"version": 7, "cwd": 1}, {"format": "other"}, {"version": "2"}])
def test_other_versions_in_one_file_are_unsupported_and_stay(kind: dict[str, Any], tmp_path: Path) -> None:  # S-4
    file = _old(tmp_path, kind)
    for attempt in (_read, lambda file: _migrate(Steps(), file)):
        with pytest.raises(SessionUnsupported):
            attempt(file)
    assert list(_tree(tmp_path)) == ["old.jsonl"]


@pytest.mark.parametrize("name", ["nope.jsonl", ".jsonl", ".hidden.jsonl", "none/old.jsonl", "old.jsonl/x.jsonl"])
def test_what_is_not_there_is_no_session(name: str, tmp_path: Path) -> None:
    _old(tmp_path)
    for attempt in (_read, lambda file: _migrate(Steps(), file)):
        with pytest.raises(SessionMissing):
            attempt(tmp_path / name)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    match kind:
        case "link":
            file.symlink_to(_old(tmp_path / "real"))
        case "fifo":
            os.mkfifo(file)
        case _:
            file.mkdir()
    for attempt in (_read, lambda file: _migrate(Steps(), file)):
        with pytest.raises(SessionMalformed, match=r"regular|symbolic link"):
            attempt(file)


def test_a_missing_cwd_refuses_before_anything_is_written(tmp_path: Path) -> None:  # S-5, I-10
    class Gone(Exception):
        pass

    def refuse(cwd: str) -> None:
        raise Gone(cwd)

    file = _old(tmp_path, {"cwd": "/nowhere"})
    before = _tree(tmp_path)
    with pytest.raises(Gone, match="/nowhere"):
        _migrate(Steps(), file, require_cwd=refuse)
    assert _tree(tmp_path) == before


def test_files_of_another_session_in_its_place_are_never_written_over(tmp_path: Path) -> None:
    file = _old(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "history.jsonl").write_text("precious\n")
    before = _tree(tmp_path)
    with pytest.raises(StorageError, match="ENOTEMPTY"):
        _migrate(Steps(), file)
    assert _tree(tmp_path) == before


def test_an_old_program_that_still_writes_to_it_loses_nothing(tmp_path: Path) -> None:
    class WritesMeanwhile(Steps):
        def mkdir(self, path: str) -> None:
            with file.open("ab") as old:
                old.write(USER + b"\n")
            super().mkdir(path)

    file = _old(tmp_path)
    with pytest.raises(StorageError, match="was changed while it was read"):
        _migrate(WritesMeanwhile(), file)
    assert list(_tree(tmp_path)) == ["old.jsonl"]
    assert read_session(Steps(), _migrate(Steps(), file))[1].messages == 5


# --- all or nothing ---------------------------------------------------------------------------------------------------


def _is_whole(file: Path, lines: list[bytes]) -> None:
    """Either form, never both in a list, never a damaged row; and opening works and gives the conversation."""
    moved = str(file.parent / "old" / "meta.json")
    assert _listed(file.parent) in [([], [str(file)], []), ([moved], [], [])]
    assert _read(file)[2].lines == lines
    assert _migrate(Steps(), file) == moved
    assert _listed(file.parent) == ([moved], [], [])
    store, history = open_session(Steps(), moved)
    assert history.lines == lines
    store.commit(Conversation(history).turn("more"))
    store.close()


ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.EACCES]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after-effect"])
@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[number] for number in ERRORS])
def test_a_call_that_fails_leaves_one_form_whole(number: int, after: bool, tmp_path: Path) -> None:  # S-18, D-5
    open_before = len(os.listdir("/proc/self/fd"))
    hits = []
    for k in count(1):
        fs, file = Faulty(), _old(tmp_path / f"round-{k}")
        lines = _read(file)[2].lines
        fs.arm(k, number, after=after)
        told = None
        try:
            _migrate(fs, file)
        except StorageError as error:
            told = str(error)
        fs.disarm()
        if fs.hit is None:
            break
        hits.append(fs.hit)
        assert (told is None) == (fs.hit == "unlink")  # a file that is left over is no loss
        assert told is None or errno.errorcode[number] in told
        if not (file.parent / "old").exists():
            assert list(_tree(file.parent)) == ["old.jsonl"]
        _is_whole(file, lines)
    print(f"{len(hits)} points hit: {' '.join(hits)}")
    assert {"lock", "mkdir", "write", "fsync", "rename", "unlink"} <= set(hits)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_disk_that_is_full_within_a_write_leaves_the_file_alone(tmp_path: Path) -> None:  # S-18, K-6
    hits = 0
    for k in range(1, 40):
        fs, file = Faulty(), _old(tmp_path / f"round-{k}")
        lines = _read(file)[2].lines
        fs.arm(k, errno.ENOSPC, short=True)
        if refused := _is_refused(fs, file):
            assert list(_tree(file.parent)) == ["old.jsonl"]
        hits += refused
        _is_whole(file, lines)
    assert hits == 2  # the history and the metadata


def _is_refused(fs: Faulty, file: Path) -> bool:
    try:
        _migrate(fs, file)
    except StorageError:
        return True
    return False


class Killed(BaseException):
    pass


class Kills(Steps):
    """Nothing happens any more from the k-th call on: no clean-up either."""

    def __init__(self, at: int) -> None:
        self.left = at

    def step(self, name: str, args: tuple[Any, ...], go: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left <= 0:
            if name == "close":  # the kernel does that
                os.close(args[0])
            raise Killed
        return go()


def test_a_kill_at_any_call_leaves_one_form_whole_and_the_next_opening_goes_on(tmp_path: Path) -> None:  # S-18
    kills = 0
    for k in count(1):
        file = _old(tmp_path / f"round-{k}")
        lines = _read(file)[2].lines
        try:
            _migrate(Kills(k), file)
        except Killed:
            kills += 1
            _is_whole(file, lines)
        else:
            break
    assert kills > 20
    assert [path.name for path in (tmp_path / f"round-{k}").iterdir()] == ["old"]


def _crash_states(root: Path, drop: str | None = None) -> Iterator[tuple[int, dict[str, bytes | None]]]:
    fs = Recording(root, drop)
    with opened(fs, str(root), DIRECTORY) as place, opened(fs, "old.jsonl", CREATE, dir_fd=place) as fd:
        write_all(fs, fd, [_body(HEADER, TALK)], 0)
        fs.fsync(fd)
    fs.drop = None
    sync_directory(fs, str(root))
    fs.drop = drop
    fs.moments.clear()
    store, history = open_session(fs, _migrate(fs, root / "old.jsonl"))
    fs.acknowledge()
    store.commit(Conversation(history).turn("more"))
    store.close()
    fs.acknowledge()
    yield from fs.crashes()


def _check(tmp_path: Path, drop: str | None = None) -> int:
    (tmp_path / "live").mkdir()
    states = 0
    for acknowledged, tree in _crash_states(tmp_path / "live", drop):
        states += 1
        root = tmp_path / f"state-{states}"
        root.mkdir()
        lay_out(tree, root)
        lines = _read(root / "old.jsonl")[2].lines
        said = [json.loads(line).get("role") for line in lines]
        assert said[:4] == [message["role"] for message in TALK]
        assert len(said) in ([4], [4, 9], [9])[acknowledged]
        _is_whole(root / "old.jsonl", lines)
    return states


def test_every_legal_crash_state_has_one_form_whole(tmp_path: Path) -> None:  # S-18, S-21
    states = _check(tmp_path)
    print(f"{states} crash states")
    assert states > 15


@pytest.mark.parametrize("drop", [".history.jsonl.tmp", ".meta.json.tmp", ".old.migrating", "root"])
def test_without_any_one_of_the_fsyncs_some_crash_loses_it(drop: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, SessionMissing, SessionMalformed, StorageError)):
        _check(tmp_path, drop)


# --- two at once ------------------------------------------------------------------------------------------------------


def test_who_comes_while_another_moves_it_is_told_who(tmp_path: Path) -> None:  # S-22
    file = _old(tmp_path)
    fs = FileSystem()
    with opened(fs, str(file), READ) as fd:
        fs.lock(fd)
        with pytest.raises(SessionLocked) as locked:
            _migrate(Steps(), file)
        assert locked.value.holder == os.getpid()
        assert _read(file)[2].messages == 4  # readers take no lock
    assert list(_tree(tmp_path)) == ["old.jsonl"]


def test_many_at_once_move_it_once_and_find_the_same(tmp_path: Path) -> None:  # S-18, S-22
    for number in range(20):
        file = _old(tmp_path / str(number))
        outcomes: list[str] = []
        begin = threading.Barrier(4)

        def one(file: Path = file, outcomes: list[str] = outcomes, begin: threading.Barrier = begin) -> None:
            begin.wait()
            try:
                outcomes.append(_migrate(Steps(), file))
            except SessionLocked:
                outcomes.append("locked")

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        moved = str(file.parent / "old" / "meta.json")
        assert len(outcomes) == 4
        assert moved in outcomes
        assert set(outcomes) <= {moved, "locked"}
        assert sorted(_tree(file.parent)) == ["old", "old/history.jsonl", "old/meta.json"]
        assert read_session(Steps(), moved)[1].messages == 4


def test_what_was_moved_meanwhile_by_another_is_found_there(tmp_path: Path) -> None:  # S-18
    class IsSlower(Steps):
        def lock(self, fd: int) -> None:
            _migrate(Steps(), file)
            super().lock(fd)

    file = _old(tmp_path)
    path = _migrate(IsSlower(), file)
    assert read_session(Steps(), path)[0].id == "old"
    assert list(tmp_path.iterdir()) == [Path(path).parent]
    assert _read(file)[0] == path == _migrate(Steps(), file)


# --- lists ------------------------------------------------------------------------------------------------------------


def test_a_file_left_over_beside_its_new_form_is_listed_no_more(tmp_path: Path) -> None:  # S-4, S-18
    file = _old(tmp_path)
    catalog = Catalog(Steps(), "/nowhere")
    assert catalog.list("/", str(tmp_path)).legacy == [str(file)]
    body = file.read_bytes()
    path = _migrate(Steps(), file)
    file.write_bytes(body)
    listing = catalog.list("/", str(tmp_path))
    assert ([row.path for row in listing.rows], listing.legacy, listing.damaged) == ([path], [], [])
    assert _migrate(Steps(), file) == path
    assert catalog.most_recent("/", str(tmp_path)) == path


def test_listing_and_continuing_never_move_one(tmp_path: Path) -> None:  # S-4, S-18
    (tmp_path / "link").symlink_to("/")
    file = _old(tmp_path, {"cwd": str(tmp_path / "link")})  # of the canonical workspace, however it is spelled (K-11)
    before = _tree(tmp_path)
    catalog = Catalog(Steps(), "/nowhere")
    assert catalog.list("/", str(tmp_path)).legacy == [str(file)]
    assert catalog.list(str(tmp_path), str(tmp_path)).legacy == []
    assert catalog.most_recent("/", str(tmp_path)) is None
    assert _tree(tmp_path) == before
    assert read_session(Steps(), _migrate(Steps(), file))[0].cwd == "/"
