"""After a crash at any moment, in any state that the disk may then have, what was acknowledged reads (rule 2)."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
from storage_disks import ID, Conversation, Recording, Steps, create_in, lay_out

from loopd.storage import Metadata, SessionMissing, StorageError
from loopd.storage.files import FileStore, open_session, read_session
from loopd.storage.fs import DIRECTORY, WRITE, opened
from loopd.storage.places import path_of, workspace_key
from loopd.storage.reading import HISTORY


class Violation(AssertionError):
    pass


def _live(fs: Recording, root: Path) -> list[Metadata | None]:
    """A short life; answers what each acknowledgement published."""
    published: list[Metadata | None] = [None]
    talk = Conversation()

    def acknowledged(store: FileStore) -> None:
        published.append(store.meta)
        fs.acknowledge()

    store = create_in(fs, root)
    acknowledged(store)
    for step in (lambda: store.commit(talk.turn("one")), lambda: store.update({"pinned_at": 7})):
        step()
        acknowledged(store)
    # A tail that no metadata names, as an attempt leaves it that was cut off: longer than the next commit's lines.
    with (
        opened(fs, os.path.dirname(store.path or ""), DIRECTORY) as directory,
        opened(fs, HISTORY, WRITE, dir_fd=directory) as fd,
    ):
        fs.write(fd, b'{"role":"user"' * 200, fs.fstat(fd).st_size)
    store.commit(talk.turn("two \N{SNOWMAN}"))
    acknowledged(store)
    store.commit(talk.turn("three"))
    acknowledged(store)
    store.close()
    return published


def _recover(root: Path, allowed: list[Metadata | None], cwd: Path) -> None:
    path = path_of(str(root / "data"), str(cwd), ID)
    fs = Steps()
    try:
        store, history = open_session(fs, path)
    except SessionMissing:
        if None not in allowed:
            raise Violation("an acknowledged session is gone") from None
        store, history = create_in(fs, root, cwd=str(cwd)), Conversation().history
    except Exception as error:
        raise Violation(f"does not open: {error}") from error
    else:
        if store.meta not in allowed:
            raise Violation(f"opens with {store.meta}, not one of {allowed}")
    try:
        talk = Conversation(history)
        after = store.commit(talk.turn("next"))
    finally:
        store.close()
    meta, again = read_session(fs, path)
    assert (meta, again.lines) == (after, talk.history.lines)


def _check_all(fs: Recording, published: list[Metadata | None], tmp_path: Path) -> int:
    states = 0
    names = count()
    for acknowledged, tree in fs.crashes():
        root = tmp_path / f"state-{next(names)}"
        root.mkdir()
        lay_out(tree, root)
        _recover(root, published[acknowledged : acknowledged + 2], tmp_path / "live")
        states += 1
    return states


def test_every_legal_crash_state_reads_what_was_acknowledged(tmp_path: Path) -> None:  # S-13, S-14, S-21, I-4
    live = tmp_path / "live"
    live.mkdir()
    fs = Recording(live)
    published = _live(fs, live)
    states = _check_all(fs, published, tmp_path)
    print(f"crash states recovered: {states} at {len(fs.moments)} moments")
    assert states > 40


SYNCED = ["history.jsonl", ".meta.json.tmp", "the session", "the workspace", "sessions", "data", "root"]


@pytest.mark.parametrize("kind", SYNCED)
def test_without_any_one_of_the_fsyncs_some_crash_loses_what_was_acknowledged(kind: str, tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    label = {"the session": ID, "the workspace": workspace_key(os.path.realpath(live))}.get(kind, kind)
    fs = Recording(live, drop=label)
    published = _live(fs, live)
    assert any(node.label == label for node in fs.nodes)
    with pytest.raises(Violation):
        _check_all(fs, published, tmp_path)


def test_a_rewritten_history_reads_at_every_moment_of_its_being_written(tmp_path: Path) -> None:  # K-4
    live = tmp_path / "live"
    live.mkdir()
    fs, talk = Recording(live), Conversation()
    store = create_in(fs, live)
    store.commit(talk.turn("one"))
    before = store.meta
    Path(store.path or "").with_name(HISTORY).unlink()
    fs.moments.clear()
    snapshot = talk.turn("two")
    with pytest.raises(StorageError, match="removed"):
        store.commit(snapshot)
    after = store.commit(snapshot, rewrite=True)
    store.close()
    states = 0
    for _, tree in fs.crashes():
        root = tmp_path / f"state-{states}"
        root.mkdir()
        lay_out(tree, root)
        # The recorder did not see the file vanish: each state has the old file or the new one, and both must do.
        _recover(root, [before, after], live)
        states += 1
    assert states > 3
