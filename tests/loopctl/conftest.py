"""A socket of the test's own, and ``loopctl`` called in this process with what it printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scripted_daemon import Loopctl, Ran

from loopctl.__main__ import run


@pytest.fixture
def socket_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Also the environment: nothing of the machine's own daemon is touched."""
    for name in (
        *("LOOPD_CONFIG", "LOOPD_DATA_DIR", "XDG_CONFIG_HOME", "TMPDIR"),
        *("OPENAI_API_KEY", "ANTHROPIC_API_KEY"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOOPD_SOCKET", str(tmp_path / "s"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "s")


@pytest.fixture
def cwd(socket_path: str) -> str:  # noqa: ARG001  it sets the directory
    return os.path.realpath(os.getcwd())


@pytest.fixture
def loopctl(socket_path: str, capsys: pytest.CaptureFixture[str]) -> Loopctl:  # noqa: ARG001  it sets the environment
    def call(*arguments: str) -> Ran:
        code = run(list(arguments))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call
