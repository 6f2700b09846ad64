"""A check of the data directory finds each kind of damage, names it, and changes nothing (S-5, S-24, K-8)."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from storage_disks import Conversation, Counting, Steps, create_in

from loopd.storage.checkup import Checkup, Finding
from loopd.storage.files import FileStore, open_session


def _session(root: Path, *, turns: int = 1, **options: Any) -> FileStore:
    store, talk = create_in(Steps(), root, str(uuid.uuid4()), durable=False, **options), Conversation()
    for number in range(turns):
        store.commit(talk.turn(f"turn {number}"))
    return store


@pytest.fixture
def session(tmp_path: Path) -> Path:
    store = _session(tmp_path)
    store.close()
    return Path(store.path or "").parent


def _tree(root: Path) -> dict[str, Any]:
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in root.rglob("*")
    }


def _checked(root: Path, *, owner: int | None = None) -> tuple[Checkup, list[Finding]]:
    before = _tree(root)
    data = str(root / "data")
    checkup = Checkup(Steps(), data, [f"{data}/rescue"], os.geteuid() if owner is None else owner)
    found = list(checkup.everything())
    assert _tree(root) == before
    return checkup, [one for one in found if "are free there" not in one.what]


def _faults(found: list[Finding]) -> list[tuple[str, str]]:
    return [(one.path, one.what) for one in found if one.severity == "fault"]


def _notes(found: list[Finding]) -> list[tuple[str, str]]:
    return [(one.path, one.what) for one in found if one.severity == "note"]


def test_nothing_at_all_and_whole_sessions_have_nothing_amiss(tmp_path: Path) -> None:
    assert _checked(tmp_path)[1] == []
    for turns in range(3):
        _session(tmp_path, turns=turns).close()
    checkup, found = _checked(tmp_path)
    assert (checkup.sessions, found) == (3, [])


def test_of_eighteen_sessions_the_two_damaged_ones_are_named_with_their_reason(tmp_path: Path) -> None:  # K-8
    stores = [_session(tmp_path) for _ in range(18)]
    for store in stores:
        store.close()
    nul, flipped = Path(stores[3].path or ""), Path(stores[11].path or "").with_name("history.jsonl")
    nul.write_bytes(bytes(413))
    body = bytearray(flipped.read_bytes())
    body[body.index(b"turn 0")] ^= 1
    flipped.write_bytes(body)
    checkup, found = _checked(tmp_path)
    told = dict(_faults(found))
    assert set(told) == {str(nul), str(flipped.with_name("meta.json"))}
    assert "is not JSON" in told[str(nul)]
    assert f"{flipped} at byte" in told[str(flipped.with_name("meta.json"))]
    assert (checkup.sessions, _notes(found)) == (18, [])


def _cut(session: Path) -> None:
    os.truncate(session / "history.jsonl", 100)


def _link(name: str) -> Callable[[Path], object]:
    def damage(session: Path) -> None:
        (session / name).rename(session.parents[3] / "elsewhere")
        (session / name).symlink_to(session.parents[3] / "elsewhere")

    return damage


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda session: (session / "meta.json").unlink(), "is missing beside"),
        (lambda session: (session / "history.jsonl").unlink(), "bytes of it are committed"),
        (_cut, "bytes before the committed range does"),
        (_link("meta.json"), "is a symbolic link"),
        (_link("history.jsonl"), "is a symbolic link"),
        (lambda session: session.chmod(0o750), "is open to others (mode 0750)"),
        (lambda session: (session / "meta.json").chmod(0o644), "is open to others (mode 0644)"),
        (lambda session: session.parent.chmod(0o711), "is open to others (mode 0711)"),
        (lambda session: session.parents[2].chmod(0o770), "is open to others (mode 0770)"),
        (lambda session: session.parent.rename(session.parents[1] / ("0" * 24)), "does not belong into this directory"),
        (lambda session: (session.parent / "link").symlink_to(session), "is a symbolic link, which is not followed"),
    ],
)
def test_what_is_refused_or_must_not_be_is_a_fault(
    damage: Callable[[Path], object], what: str, session: Path, tmp_path: Path
) -> None:  # S-5, S-20, S-24
    damage(session)
    assert what in "\n".join(text for _, text in _faults(_checked(tmp_path)[1]))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_faults(session: Path, tmp_path: Path) -> None:  # S-20
    os.chown(session / "history.jsonl", 12345, -1)
    assert _faults(_checked(tmp_path)[1]) == [(str(session / "history.jsonl"), "belongs to user 12345")]


def _journal(session: Path, commit_id: str) -> None:
    (session / "run.journal").write_text(json.dumps({"commitId": commit_id, "runId": "r"}) + "\nhalf a li")
    (session / "run.journal").chmod(0o600)


def _published(session: Path) -> str:
    commit_id: str = json.loads((session / "meta.json").read_text())["committed"]["commitId"]
    return commit_id


def _written(path: Path, body: bytes = b"x") -> None:
    path.write_bytes(body)
    path.chmod(0o600)


def _add(path: Path, tail: bytes) -> None:
    path.write_bytes(path.read_bytes() + tail)


@pytest.mark.parametrize(
    ("leave", "what"),
    [
        (lambda session: _written(session / ".meta.json.tmp"), "left by a write that was cut off"),
        (lambda session: _written(session / ".history.jsonl.tmp"), "left by a write that was cut off"),
        (lambda session: _add(session / "history.jsonl", b"tail"), "4 bytes that were never"),
        (lambda session: _written(session / "notes.txt"), "is not loopd's"),
        (lambda session: _journal(session, _published(session)), "when its daemon was killed"),
        (lambda session: _journal(session, "an older one"), "is of a run that was saved since"),
        (lambda session: _written(session / "run.journal", bytes(99)), "is of a run that was saved since"),
        (lambda session: (session.parent / ".gone").mkdir(mode=0o700), "cut off while it was made or removed"),
        (lambda session: (session.parent / "empty").mkdir(mode=0o700), "whose creation was cut off"),
        (lambda session: _written(session.parent / "a.txt"), "is not loopd's"),
        (lambda session: _written(session.parents[2] / "a.txt"), "is not loopd's"),
        (lambda session: _written(session.parent / "other.jsonl", b"{}\n"), "is no session that this version reads"),
        (
            lambda session: _written(
                session.parent / "old.jsonl", b'{"format":"loop-session","version":2,"cwd":"/"}\n'
            ),
            "is a session of an earlier version",
        ),
        (
            lambda session: _written(session / "meta.json", b'{"format":"loop-session","version":9,"minReader":9}'),
            "needs a reader of version 9",
        ),
    ],
)
def test_what_is_left_over_or_of_another_version_is_a_note(
    leave: Callable[[Path], object], what: str, session: Path, tmp_path: Path
) -> None:
    leave(session)
    _, found = _checked(tmp_path)
    assert _faults(found) == []
    [(path, text)] = _notes(found)
    assert what in text
    assert path.startswith(str(tmp_path / "data"))


def test_what_can_be_recovered_comes_with_the_command_for_that_very_session(session: Path, tmp_path: Path) -> None:
    """S-26: without its id the command means the session that is open where it is given."""
    _journal(session, _published(session))
    _, found = _checked(tmp_path)
    assert [finding.advice for finding in found] == [f"`loopctl recover --session {session.name}`"]


def test_a_workspace_that_is_gone_is_a_note(tmp_path: Path) -> None:  # K-12
    (tmp_path / "ws").mkdir()
    _session(tmp_path, cwd=str(tmp_path / "ws")).close()
    (tmp_path / "ws").rmdir()
    _, found = _checked(tmp_path)
    assert [one.severity for one in found] == ["note"]
    assert f"its directory {tmp_path}/ws does not exist any more" in found[0].what


def test_an_open_session_is_named_with_its_process_and_not_disturbed(tmp_path: Path) -> None:  # K-5
    store = _session(tmp_path)
    path = Path(store.path or "")
    _journal(path.parent, _published(path.parent))  # of the run that goes on
    assert [(one.path, one.what) for one in _checked(tmp_path)[1]] == [(str(path), f"is open in process {os.getpid()}")]
    assert store.commit(Conversation(open_copy(path)).turn("on")).committed.revision == 2
    store.close()


def open_copy(path: Path) -> Any:
    copy = path.parents[3] / path.parent.name
    shutil.copytree(path.parent, copy)
    store, history = open_session(Steps(), str(copy / "meta.json"))
    store.close()
    shutil.rmtree(copy)
    return history


def test_no_lock_is_taken_so_no_open_is_refused_meanwhile(tmp_path: Path) -> None:
    _session(tmp_path).close()
    fs = Counting()
    list(Checkup(fs, str(tmp_path / "data"), [], os.geteuid()).everything())
    assert "lock" not in fs.calls
    assert not {"write", "truncate", "rename", "unlink", "rmdir", "mkdir", "chmod", "fsync"} & set(fs.calls)


def test_rescue_copies_that_wait_are_notes_and_damaged_ones_faults(tmp_path: Path) -> None:  # S-25
    store, talk = _session(tmp_path, turns=0), Conversation()
    waits = store.rescue([str(tmp_path / "data" / "rescue")], talk.turn("lost"))
    store.close()
    damaged = shutil.copytree(waits, waits + "-2")
    (Path(damaged) / "meta.json").write_bytes(bytes(413))
    (Path(waits).parent / ".x.applied").mkdir(mode=0o700)
    checkup, found = _checked(tmp_path)
    assert checkup.copies == 2
    notes = dict(_notes(found))
    assert "4 unsaved messages (matches" in notes[waits]
    assert "cut off while it was removed" in notes[str(Path(waits).parent / ".x.applied")]
    [(path, text)] = _faults(found)
    assert (path, "damaged rescue copy" in text) == (damaged, True)


def test_little_room_is_a_note(tmp_path: Path) -> None:
    class Small(Steps):
        def room(self, path: str) -> int:  # noqa: ARG002
            return 1 << 20

    found = list(Checkup(Small(), str(tmp_path), [], os.geteuid()).everything())
    assert [(one.severity, one.what) for one in found] == [("note", "only 1024 KiB are free there")]


def test_findings_come_session_by_session(tmp_path: Path) -> None:
    for _ in range(5):
        store = _session(tmp_path)
        store.close()
        Path(store.path or "").write_bytes(b"{")
    checkup = Checkup(Steps(), str(tmp_path / "data"), [], os.geteuid())
    assert [checkup.sessions for _ in checkup.everything()][:5] == [1, 2, 3, 4, 5]
