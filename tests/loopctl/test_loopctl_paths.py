"""Where everything is, under every environment that a shell, an editor or a service manager gives us."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from loop_protocol import paths

HOME = pwd.getpwuid(os.getuid()).pw_dir


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOOPD_SOCKET": "/a/b", "XDG_RUNTIME_DIR": "/run/x"}, "/a/b"),
        ({"LOOPD_SOCKET": "", "XDG_RUNTIME_DIR": "/run/x"}, "/run/x/loopd/loopd.sock"),
        ({"XDG_RUNTIME_DIR": "/run/x"}, "/run/x/loopd/loopd.sock"),
    ],
)
def test_the_socket_is_where_the_environment_says(environment: dict[str, str], expected: str) -> None:
    assert paths.socket_path(environment) == expected


def test_a_relative_socket_is_one_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.socket_path({"LOOPD_SOCKET": "s"}) == str(tmp_path / "s")


@pytest.mark.parametrize("environment", [{}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative"}])
def test_without_a_runtime_directory_the_usual_or_the_temporary_one_is_taken(environment: dict[str, str]) -> None:
    uid = os.getuid()
    usual = f"/run/user/{uid}"
    is_private = os.path.isdir(usual) and os.stat(usual).st_mode & 0o7777 == 0o700
    expected = f"{usual}/loopd/loopd.sock" if is_private else f"/tmp/loopd-{uid}/loopd.sock"
    assert paths.socket_path(environment) == expected


def test_everything_else_follows_xdg_and_an_unset_home_comes_from_the_password_database() -> None:
    assert paths.data_dir({}) == f"{HOME}/.local/state/loopd"
    assert paths.data_dir({"HOME": "/h"}) == "/h/.local/state/loopd"
    assert paths.data_dir({"XDG_STATE_HOME": "/x"}) == paths.state_dir({"XDG_STATE_HOME": "/x"}) == "/x/loopd"
    assert paths.data_dir({"XDG_STATE_HOME": "/x", "LOOPD_DATA_DIR": "/d"}) == "/d"
    assert paths.log_path({"XDG_STATE_HOME": "/x", "LOOPD_DATA_DIR": "/d"}) == "/x/loopd/loopd.log"
    assert paths.config_path({"HOME": "/h"}) == "/h/.config/loopd/config.toml"
    assert paths.config_path({"XDG_CONFIG_HOME": "/c"}) == "/c/loopd/config.toml"
    assert paths.config_path({"LOOPD_CONFIG": "/c/other"}) == "/c/other"


def test_a_socket_path_of_107_bytes_fits_and_one_of_108_is_refused_with_length_and_limit() -> None:  # K-54
    assert paths.check_socket_path("/" + "a" * 106)
    with pytest.raises(paths.PathProblem, match=r"108 bytes.* 107"):
        paths.check_socket_path("/" + "ä" * 53 + "b")


def test_missing_parents_are_made_private_whatever_the_umask(tmp_path: Path) -> None:  # D-6
    old = os.umask(0)
    try:
        paths.private_directory(str(tmp_path / "a" / "b"))
    finally:
        os.umask(old)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


def test_the_temporary_fallback_must_be_a_real_closed_directory(tmp_path: Path) -> None:  # D-6
    fallback = tmp_path / f"loopd-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    fallback.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(paths.PathProblem, match="not a directory"):
        paths.private_directory(str(fallback))
    fallback.unlink()
    fallback.mkdir(mode=0o755)
    with pytest.raises(paths.PathProblem, match="open to other users"):
        paths.private_directory(str(fallback))
    fallback.chmod(0o700)
    paths.private_directory(str(fallback))


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(paths.PathProblem, match="not a directory"):
        paths.private_directory(str(tmp_path / "f"))
    with pytest.raises(paths.PathProblem, match="cannot make"):
        paths.private_directory(str(tmp_path / "f" / "below"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:  # D-6
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(paths.PathProblem, match="belongs to user 12345"):
        paths.private_directory(str(theirs))


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_directory_that_others_may_write_into_is_refused(tmp_path: Path, mode: int) -> None:  # D-6
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(paths.PathProblem, match="others may write into"):
        paths.private_directory(str(place))
    place.chmod(0o1777)  # as /tmp: nobody can replace what is somebody else's
    paths.private_directory(str(place))
    place.chmod(0o755)
    paths.private_directory(str(place))
