"""A damaged session is refused with the place that is wrong, and stays byte for byte as it is (S-5, S-24)."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_disks import ID, Conversation, Steps, create_in

from loopd.storage import SessionMalformed, SessionUnsupported
from loopd.storage.files import open_session, read_session


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a session with three turns and a tail that is not committed."""
    store, talk = create_in(Steps(), tmp_path_factory.mktemp("saved")), Conversation()
    for text in ("one", "two \N{SNOWMAN}", "three"):
        store.commit(talk.turn(text))
    store.close()
    directory = Path(store.path or "").parent
    with (directory / "history.jsonl").open("ab") as history:
        history.write(b"not committed\xff" * 20)
    return directory


@pytest.fixture
def session(saved: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, which may be damaged; whatever the test did, opening it must not have changed it."""
    copy = tmp_path / ID
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def _refusal(directory: Path) -> SessionMalformed:
    before = {file.name: file.lstat().st_mode for file in directory.iterdir()}
    content = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
    refusals = []
    for read in (open_session, read_session):
        with pytest.raises(SessionMalformed) as refused:
            read(Steps(), str(directory / "meta.json"))
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]
    assert {file.name: file.lstat().st_mode for file in directory.iterdir()} == before
    assert {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()} == content
    return refused.value


def _committed(directory: Path) -> Any:
    return json.loads((directory / "meta.json").read_text())["committed"]


def _edit(directory: Path, edit: Callable[[Any], Any]) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    edited = edit(meta)
    (directory / "meta.json").write_text(json.dumps(meta if edited is None else edited))


def _publish(directory: Path, lines: list[bytes], **counts: int) -> None:
    """As a careless writer would: bytes and checksum fit, whatever the lines are."""
    whole = b"".join(lines)
    (directory / "history.jsonl").write_bytes(whole)
    fits = {"bytes": len(whole), "crc32": zlib.crc32(whole)} | counts
    _edit(directory, lambda meta: meta["committed"].update(fits))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_one_flipped_byte_anywhere_in_the_committed_range_is_found(
    data: st.DataObject, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:  # S-24, K-8
    directory = tmp_path_factory.getbasetemp() / "flipped" / ID
    directory.mkdir(parents=True, exist_ok=True)
    history = bytearray((saved / "history.jsonl").read_bytes())
    at = data.draw(st.integers(0, _committed(saved)["bytes"] - 1))
    history[at] ^= data.draw(st.integers(1, 255))
    (directory / "history.jsonl").write_bytes(history)
    (directory / "meta.json").write_bytes((saved / "meta.json").read_bytes())
    refused = _refusal(directory)
    assert refused.path == str(directory / "history.jsonl")
    assert refused.offset is not None
    if "checksum" in refused.reason:
        assert refused.offset == at
    else:  # the line that it broke, or a later one that does not fit to it any more
        assert refused.offset >= history.rfind(b"\n", 0, at) + 1


def test_a_byte_flipped_outside_the_committed_range_does_not_matter(session: Path) -> None:  # K-7
    history = bytearray((session / "history.jsonl").read_bytes())
    history[_committed(session)["bytes"] + 3] ^= 1
    (session / "history.jsonl").write_bytes(history)
    assert read_session(Steps(), str(session / "meta.json"))[1].messages == 12


def test_a_newline_lost_between_two_records_is_found_at_the_first_of_them(session: Path) -> None:  # K-7
    history = (session / "history.jsonl").read_bytes()
    second = history.index(b"\n") + 1
    end = history.index(b"\n", second)
    (session / "history.jsonl").write_bytes(history[:end] + history[end + 1 :])
    assert _refusal(session).offset == second


def test_a_history_shorter_than_committed_is_found_where_it_ends(session: Path) -> None:
    os.truncate(session / "history.jsonl", 1000)
    refused = _refusal(session)
    assert (refused.offset, "bytes before" in refused.reason) == (1000, True)


def test_a_missing_history_is_refused_and_not_made_anew(session: Path) -> None:  # K-4
    (session / "history.jsonl").unlink()
    assert "is missing" in _refusal(session).reason


def test_a_range_that_ends_within_a_line_is_refused(session: Path) -> None:
    lines = (session / "history.jsonl").read_bytes().splitlines(keepends=True)[:3]
    _publish(session, [*lines, b'{"type":"weather"}'])
    assert _refusal(session).offset == sum(map(len, lines))


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (slice(0, 2), "no result for tool call"),
        (slice(1, 5), "index 1 where 0 was due"),
        (slice(0, 4), "12 and 3 are committed"),
    ],
)
def test_lines_that_do_not_fit_together_are_refused(keep: slice, reason: str, session: Path) -> None:  # S-5
    _publish(session, (session / "history.jsonl").read_bytes().splitlines(keepends=True)[keep])
    assert reason in _refusal(session).reason


@pytest.mark.parametrize(
    "line",
    [b"\n", b"[]\n", b"{}\n", b'{"role":"user"}\n', b'{"role":"king"}\n', b'{"type":"timing"}\n', b"[" * 9000 + b"\n"],
)
def test_a_line_that_is_no_record_is_refused_where_it_starts(line: bytes, session: Path) -> None:  # S-5
    lines = (session / "history.jsonl").read_bytes().splitlines(keepends=True)[:5]
    _publish(session, [*lines, line])
    assert _refusal(session).offset == sum(map(len, lines))


@pytest.mark.parametrize("kind", ["run", "timing"])
@pytest.mark.parametrize(
    "timing",
    [
        {"userMessageIndex": 4},
        {"userMessageIndex": -1},
        {"userMessageIndex": 0, "messageStartIndex": 3, "messageEndIndex": 2},
        {"userMessageIndex": 0, "messageStartIndex": 0, "messageEndIndex": 5},
        {"userMessageIndex": 0, "messageStartIndex": -1, "messageEndIndex": 2},
    ],
)
def test_a_timing_about_messages_that_are_not_there_is_refused_where_its_record_starts(
    kind: str, timing: Any, session: Path
) -> None:
    """S-19, S-5: what is kept apart from the messages is validated like them."""
    lines = (session / "history.jsonl").read_bytes().splitlines(keepends=True)[:4]
    record: dict[str, Any] = {"type": kind, "timing": {"startedAt": 5, **timing}}
    if kind == "run":
        record |= {"runId": "r", "outcome": "success"}
    _publish(session, [*lines, msgspec.json.encode(record) + b"\n"])
    refused = _refusal(session)
    assert (refused.offset, "messages that are not there" in refused.reason) == (sum(map(len, lines)), True)


def _set(**changes: Any) -> Callable[[Any], Any]:
    return lambda meta: meta | changes


def _set_committed(**changes: Any) -> Callable[[Any], Any]:
    return lambda meta: meta["committed"].update(changes)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda _: {}, "format"),
        (lambda _: [1], "object"),
        (lambda meta: meta.pop("cwd") and None, "cwd"),
        (_set(id="another"), "directory's name"),
        (_set(cwd="relative"), "absolute"),
        (_set(createdAt="today"), "createdAt"),
        (_set(createdAt=-1), "negative"),
        (_set(updatedAt=True), "updatedAt"),
        (_set(pinnedAt=-1), "negative"),
        (_set(updatedAt=2**53), "beyond"),
        (_set(pinnedAt=10**30), "beyond"),
        (_set(unread=None), "unread"),
        (_set(permission="all"), "permission"),
        (_set(model="echo"), "model"),
        (_set(minReader="3"), "minReader"),
        (_set_committed(commitId=""), "commitId"),
        (_set_committed(revision=-1), "negative"),
        (_set_committed(crc32=1 << 32), "crc32"),
        (_set_committed(messages=1, userMessages=2), "more user messages"),
        (_set_committed(messages=13), "are committed"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(edit: Callable[[Any], Any], reason: str, session: Path) -> None:
    _edit(session, edit)
    assert reason in str(_refusal(session))


@pytest.mark.parametrize(
    "content", [b"", bytes(413), b"{", b"\xff\xfe", b'{"format":"\xff"}', b" " * (1 << 20) + b"{}"]
)
def test_metadata_that_is_no_json_is_refused(content: bytes, session: Path) -> None:  # K-8
    (session / "meta.json").write_bytes(content)
    _refusal(session)


@pytest.mark.parametrize("name", ["meta.json", "history.jsonl"])
@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_a_file_that_is_no_regular_file_is_refused_and_never_waited_for(
    name: str, kind: str, session: Path, tmp_path: Path
) -> None:
    (session / name).rename(tmp_path / "original")
    match kind:
        case "link":
            (session / name).symlink_to(tmp_path / "original")
        case "fifo":
            os.mkfifo(session / name)
        case _:
            (session / name).mkdir()
    assert _refusal(session).reason in ("is a symbolic link", "is no regular file")


@pytest.mark.parametrize("changes", [{"minReader": 4, "committed": "otherwise"}, {"format": "other"}, {"version": 2}])
def test_what_a_newer_version_wrote_is_unsupported_and_untouched(changes: Any, session: Path) -> None:  # S-27
    _edit(session, lambda meta: meta | changes)
    before = (session / "meta.json").read_bytes()
    with pytest.raises(SessionUnsupported):
        open_session(Steps(), str(session / "meta.json"))
    assert (session / "meta.json").read_bytes() == before


def test_a_reader_follows_a_writer_that_publishes_between_its_two_reads(session: Path) -> None:  # rule 6
    class PublishesInBetween(Steps):
        opened = 0

        def open(self, name: str, flags: int, *, dir_fd: int | None = None) -> int:
            if name == "history.jsonl":
                self.opened += 1
                if self.opened == 1:
                    talk = Conversation()
                    talk.turn("another history")
                    _publish(session, talk.history.lines, messages=4, userMessages=1)
                    _edit(session, _set_committed(commitId="new"))
            return super().open(name, flags, dir_fd=dir_fd)

    fs = PublishesInBetween()
    meta, history = read_session(fs, str(session / "meta.json"))
    assert (meta.committed.commit_id, history.messages, fs.opened) == ("new", 4, 2)


def test_long_lines_and_many_lines_are_read_across_blocks(tmp_path: Path) -> None:
    store, talk = create_in(Steps(), tmp_path), Conversation()
    for size in (10, 300_000, 3, 700_000, 262_144, 5):
        store.commit(talk.turn("x" * size))
    store.close()
    meta, history = read_session(Steps(), store.path or "")
    assert (meta, history.lines) == (store.meta, talk.history.lines)
