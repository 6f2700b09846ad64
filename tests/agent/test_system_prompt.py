"""The system prompt: place, date, permission, and the project's instructions in order and in bounds."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from loop_protocol.v1.types import Permission
from loopd.agent.prompt import INSTRUCTIONS_BYTES, joined, prompt_sections

NOW = datetime(2031, 2, 3, 4, 5)


def sections(cwd: Path, permission: Permission = "read-only", *, sandbox: bool = True) -> dict[str, str]:
    return prompt_sections(cwd=str(cwd), permission=permission, sandbox=sandbox, now=NOW, platform="Plan 9")


def prompt(cwd: Path, permission: Permission = "read-only") -> str:
    return joined(sections(cwd, permission))


def test_it_names_place_date_and_platform_and_is_short(tmp_path: Path) -> None:
    text = prompt(tmp_path)
    assert str(tmp_path) in text
    assert "2031-02-03" in text
    assert "04:05" not in text
    assert "Plan 9" in text
    assert len(text) < 1800 + 2 * len(str(tmp_path))


def test_its_sections_have_an_order_and_none_is_empty(tmp_path: Path) -> None:  # S-19
    assert list(sections(tmp_path)) == ["role", "environment", "permission", "guidance"]
    (tmp_path / "AGENTS.md").write_text("mind the gap")
    assert list(sections(tmp_path))[-1] == "instructions"
    assert "\n\n".join(sections(tmp_path).values()) + "\n" == prompt(tmp_path)


# What each says, and what it must not say.
PERMISSIONS: list[tuple[Permission, bool, list[str], list[str]]] = [
    (
        "read-only",
        True,
        ["write and edit ask", "can write nothing", "no network", "escalate: true", "own files", "Nothing else lifts"],
        ["/tmp", "No sandbox"],
    ),
    (
        "workspace-write",
        True,
        ["in the working directory", "except .git", "own /tmp", "no network", "escalate: true", "own files"],
        ["write nothing", "No sandbox"],
    ),
    ("read-only", False, ["write and edit ask", "each bash command asks", "own files"], ["escalate", "runs in a"]),
    ("workspace-write", False, [".git and all outside ask", "each bash command asks"], ["escalate", "/tmp"]),
    ("danger-full-access", True, ["all the rights of the person"], ["sandbox", "denied", "escalate"]),
    ("danger-full-access", False, ["all the rights of the person"], ["sandbox", "denied", "escalate"]),
]


@pytest.mark.parametrize(("preset", "sandbox", "said", "unsaid"), PERMISSIONS)
def test_the_permission_section_says_what_holds(
    tmp_path: Path, preset: Permission, sandbox: bool, said: list[str], unsaid: list[str]
) -> None:
    text = sections(tmp_path, preset, sandbox=sandbox)["permission"]
    assert text.startswith(f"Permission preset: {preset}.")
    assert [part for part in said if part not in text] == []
    assert [part for part in unsaid if part in text] == []
    assert len(text) < 900


def test_instructions_are_joined_from_the_root_to_the_cwd_with_their_paths(tmp_path: Path) -> None:  # C-4
    inner = tmp_path / "project" / "part"
    inner.mkdir(parents=True)
    (tmp_path / "AGENTS.md").write_text("outermost")
    (tmp_path / "project" / "CLAUDE.md").write_text("middle")
    (inner / "AGENTS.md").write_text("innermost")
    (inner / "CLAUDE.md").write_text("hidden by the other")
    text = prompt(inner)
    places = [text.index(word) for word in ("outermost", "middle", "innermost")]
    assert places == sorted(places)
    assert f"Instructions from {tmp_path}/project/CLAUDE.md" in text
    assert "hidden" not in text


def test_long_instructions_are_cut_with_a_marker_and_bad_bytes_replaced(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_bytes(b"a\xffb" + "ä".encode() * INSTRUCTIONS_BYTES)
    text = prompt(tmp_path)
    assert "a\ufffdbä" in text
    assert f"[cut after {INSTRUCTIONS_BYTES} bytes" in text
    assert len(text.encode()) < INSTRUCTIONS_BYTES + 3000
    assert text.count("\ufffd") == 1


@pytest.mark.parametrize("kind", ["directory", "fifo", "dangling link"])
def test_what_is_no_file_counts_as_missing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "AGENTS.md"
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path.symlink_to("nowhere")
    (tmp_path / "CLAUDE.md").write_text("the other one")
    assert "the other one" in prompt(tmp_path)


def test_a_directory_that_vanished_still_gives_a_prompt(tmp_path: Path) -> None:
    assert "gone" in prompt(tmp_path / "gone")
