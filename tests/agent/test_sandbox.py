"""The sandbox of restricted presets, from inside it: what can be read and written, and what never leads out."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from agent_recording import MakeScope, call, left_over

from loopd.agent.protected import Protected
from loopd.agent.tools.sandbox import Preset, Sandbox
from loopd.agent.tools.seccomp import MACHINES, program_for
from loopd.agent.tools.shell import Bash, BashArguments

pytestmark = pytest.mark.usefixtures("subreaper", "sandbox")

Inside = Callable[..., Awaitable[tuple[str, bool]]]
# Not one that only root or only the host's /tmp has.
PYTHON = shutil.which("python3", path="/usr/bin:/bin") or os.path.realpath(sys.executable)


@pytest.fixture
def inside(make_scope: MakeScope, tmp_path: Path) -> Inside:
    """Runs one command in a preset: the one place for whoever wants to try what gets out."""
    (tmp_path / "ws").mkdir()

    async def run(preset: Preset, command: str, *protected: Path | str, ws: Path | None = None) -> tuple[str, bool]:
        bash = Bash(timeout_s=15, sandbox=Sandbox(Protected([str(path) for path in protected])))
        scope = make_scope(cwd=str(ws or tmp_path / "ws"), permission=preset)
        with trio.fail_after(20):
            return await call(bash, BashArguments(command), scope)

    return run


PRESETS: list[Preset] = ["read-only", "workspace-write"]


# --- the host ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
async def test_the_workspace_is_written_in_one_preset_only(inside: Inside, tmp_path: Path, preset: Preset) -> None:
    text, is_error = await inside(preset, "echo a > made && cat made")
    if preset == "workspace-write":
        assert (text, is_error) == ("a\n", False)
    else:
        assert "Read-only file system" in text
    assert (tmp_path / "ws" / "made").exists() is (preset == "workspace-write")


@pytest.mark.parametrize("preset", PRESETS)
async def test_outside_the_workspace_nothing_is_written_and_all_is_read(inside: Inside, preset: Preset) -> None:
    below = Path("/var/tmp") / f"loopd-test-{os.getpid()}"
    below.mkdir()
    try:
        (below / "there").write_text("read\n")
        tries = [f"echo a > {below}/there", f"rm {below}/there", f"mkdir {below}/d", f"chmod 777 {below}", "touch /x"]
        text, _ = await inside(preset, f"cat {below}/there; {'; '.join(f'{one} && echo done' for one in tries)}")
        assert text.startswith("read\n")
        assert "done" not in text
        assert (below / "there").read_text() == "read\n"
    finally:
        (below / "there").unlink()
        below.rmdir()


async def test_read_only_writes_nothing_but_below_its_own_tmp(inside: Inside) -> None:
    places = ["/", "/dev", "/dev/pts", "/tmp", "/run", "/var/tmp", "/sys", "/proc", "/proc/sys/kernel", "$HOME", "."]
    tries = "; ".join(f"touch {place}/made && echo {place}" for place in [*places, "$TMPDIR"])
    text, _ = await inside("read-only", f"exec 2>/dev/null; {tries}")
    assert text == "/dev/shm\n"


@pytest.mark.parametrize("preset", PRESETS)
async def test_a_private_tmp_is_empty_at_first_and_gone_afterwards(
    inside: Inside, tmp_path: Path, preset: Preset
) -> None:
    before = left_over()
    for _ in range(2):
        assert await inside(preset, "ls -A $TMPDIR | grep -v bt-; echo a > $TMPDIR/f && cat $(mktemp -u | xargs -I{} "
                                    "sh -c 'echo b > {}; echo {}') $TMPDIR/f") in (
            ("b\na\n", False),
            (f"{tmp_path.parts[2]}\nb\na\n", False),  # the way to a workspace below /tmp
        )  # fmt: skip
    assert not Path("/tmp/f").exists()
    assert not Path("/dev/shm/f").exists()
    assert left_over() == before


@pytest.mark.parametrize("preset", PRESETS)
async def test_there_is_no_network_and_no_process_but_its_own(inside: Inside, preset: Preset) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text, _ = await inside(
            preset, f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo connected; kill -0 {os.getpid()} && echo seen;"
            "ls /sys/class/net; cat /proc/1/comm",
        )  # fmt: skip
    assert "connected" not in text
    assert "seen" not in text
    assert text.endswith("\nlo\nbwrap\n") or text.endswith("bwrap\n")


@pytest.mark.parametrize("preset", PRESETS)
async def test_it_shares_no_namespace_with_the_host_and_has_no_capability(inside: Inside, preset: Preset) -> None:
    kinds = ["user", "pid", "net", "ipc", "uts", "mnt"]
    text, _ = await inside(preset, f"cd /proc/self/ns && readlink {' '.join(kinds)}; grep ^Cap /proc/self/status")
    lines = text.splitlines()
    namespaces, sets = lines[: len(kinds)], lines[len(kinds) :]
    host = [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]
    assert [one.partition(":")[0] for one in namespaces] == kinds
    assert not set(namespaces) & set(host)
    assert {line.split()[1] for line in sets} == {"0" * 16}


async def test_git_in_the_workspace_is_read_only_whether_directory_or_file(inside: Inside, tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    (ws / ".git" / "hooks").mkdir(parents=True)
    (ws / "sub").mkdir()
    (ws / "sub" / ".git").write_text("gitdir: ../.git\n")
    tries = ["echo evil > .git/hooks/pre-commit", "mv .git git", "rm -rf .git", "rmdir .git/hooks"]
    text, _ = await inside("workspace-write", "; ".join(f"{one} && echo done" for one in tries))
    assert "done" not in text
    text, _ = await inside(
        "workspace-write", "echo evil > .git && echo done; rm -f .git && echo done", ws=ws / "sub"
    )  # fmt: skip
    assert "done" not in text
    assert (ws / "sub" / ".git").read_text() == "gitdir: ../.git\n"


async def test_git_behind_a_link_is_read_only_by_all_its_names(inside: Inside, tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    (ws / "store" / "git" / "hooks").mkdir(parents=True)
    (ws / ".git").symlink_to("store/git")
    tries = ["echo evil > .git/hooks/pre-commit", "touch store/git/config", "mv store elsewhere", "rm -r store/git"]
    text, _ = await inside("workspace-write", "; ".join(f"{one} && echo done" for one in tries))
    assert "Read-only file system" in text
    assert "done" not in text
    assert os.listdir(ws / "store/git") == ["hooks"]


async def test_a_command_outlives_the_thread_that_started_it(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the kernel that thread is the parent: with die-with-parent long commands would end with it."""
    monkeypatch.setattr("trio._core._thread_cache.IDLE_TIMEOUT", 0.01)
    assert await inside("read-only", "sleep 0.3; echo done") == ("done\n", False)


@pytest.mark.parametrize("parts", [("ws",), ("ws", "deep", "er")], ids=["workspace", "deeper"])
@pytest.mark.parametrize("preset", PRESETS)
async def test_a_workspace_that_holds_protected_files_does_not_give_them_away(
    inside: Inside, tmp_path: Path, preset: Preset, parts: tuple[str, ...]
) -> None:
    place = tmp_path.joinpath(*parts)
    place.mkdir(parents=True, exist_ok=True)
    data, key, missing = place / "data", place / "key", place / "not" / "yet"
    (data / "sessions").mkdir(parents=True)
    (data / "sessions" / "one").write_text("secret")
    key.write_text("secret")
    tries = [
        f"cat {data}/sessions/one {key}", f"mv {data} x", f"mv {place} y && cat y/data/sessions/one", f"rm -rf {data}",
        f"cp {key} z && cat z", f"ln {key} hard && cat hard", f"rm -f {key}", f"echo a > {key}", f"touch {data}/made",
        f"mkdir -p {missing} && touch {missing}/made", f"mv {missing.parent} q",
    ]  # fmt: skip
    text, _ = await inside(preset, "; ".join(f"{{ {one}; }} 2>&1" for one in tries) + "; true", data, key, missing)
    assert "secret" not in text
    assert (data / "sessions" / "one").read_text() == key.read_text() == "secret"
    assert not (data / "made").exists()
    assert not list(tmp_path.rglob("made"))  # wherever it was moved
    if preset == "read-only":
        assert not missing.parent.exists()


async def test_a_link_that_leads_to_protected_files_stays_the_link_that_it_is(inside: Inside, tmp_path: Path) -> None:
    ws, real = tmp_path / "ws", tmp_path / "ws" / "dotfiles" / "loopd"
    real.mkdir(parents=True)
    (ws / ".config").mkdir()
    (ws / ".config" / "loopd").symlink_to("../dotfiles/loopd")
    (real / "config.toml").write_text("secret")
    link = ws / ".config" / "loopd"
    text, _ = await inside(
        "workspace-write",
        "cat .config/loopd/config.toml dotfiles/loopd/config.toml; rm .config/loopd; mv .config c; mv dotfiles d;"
        "echo fine > other && cat other",
        link,
    )
    assert "secret" not in text
    assert text.endswith("fine\n")
    assert os.readlink(link) == "../dotfiles/loopd"
    assert (real / "config.toml").read_text() == "secret"


async def test_a_workspace_that_became_a_link_is_not_followed(inside: Inside, tmp_path: Path) -> None:
    """A command of another session, whose workspace holds this one, can put it there."""
    (tmp_path / "link").symlink_to("/")
    text, is_error = await inside("workspace-write", "touch made", ws=tmp_path / "link")
    assert is_error
    assert "leads somewhere else by now" in text


@pytest.mark.parametrize("workspace", ["/proc", "/proc/sys", "/sys/fs", "/dev"])
async def test_the_kernel_s_own_directories_are_no_workspace(inside: Inside, workspace: str) -> None:
    """Mounted as one, the host's processes, devices and settings would be there again, writable for root."""
    text, is_error = await inside("workspace-write", "echo ran", ws=Path(workspace))
    assert is_error
    assert "no sandbox can have the workspace" in text


async def test_the_daemon_s_own_proc_entries_are_not_there(inside: Inside) -> None:  # K-31
    text, _ = await inside("read-only", f"cat /proc/{os.getpid()}/environ; cat /proc/$PPID/environ | tr '\\0' '\\n'")
    assert f"/proc/{os.getpid()}/environ: No such file" in text
    assert {line.partition("=")[0] for line in text.splitlines()[1:]} <= {"PATH", "HOME", "LOOPD_CALL", "TMPDIR", "PWD"}


# --- system calls -----------------------------------------------------------------------------------------------------

CALLS = {
    "unix": ("socket.socket(socket.AF_UNIX)", "EAFNOSUPPORT"),
    "vsock": ("socket.socket(socket.AF_VSOCK)", "EAFNOSUPPORT"),
    "packet": ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "EAFNOSUPPORT"),
    "inet": ("socket.socket(socket.AF_INET)", "fine"),
    "inet6": ("socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)", "fine"),
    "netlink": ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "fine"),
    "pair": ("socket.socketpair()", "fine"),
    "pair of datagrams": ("socket.socketpair(type=socket.SOCK_DGRAM)", "ESOCKTNOSUPPORT"),
    "io_uring": ("syscall(425, 1, 0)", "ENOSYS"),
    "keyctl": ("syscall({keys[2]}, 0, -3, 0)", "ENOSYS"),
    "add_key": ("syscall({keys[0]}, b'user', b'a', b'b', 1, -3)", "ENOSYS"),
    "unshare user": ("syscall({unshare}, 0x10000000)", "EPERM"),
    "clone user": ("syscall({clone}, 0x10000011, 0, 0, 0, 0)", "EPERM"),
    "clone3": ("syscall(435, 0, 0)", "ENOSYS"),
    "fork": ("os._exit(0) if os.fork() == 0 else os.wait()", "fine"),
    "thread": ("[t := threading.Thread(target=int), t.start(), t.join()]", "fine"),
    "spawn": ("subprocess.run(['true'], check=True)", "fine"),
    "x32": ("syscall(0x40000000 + 39)", "EPERM"),
}
TRY = """
import ctypes, errno, os, socket, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
try:
    {call}
except OSError as error:
    print(errno.errorcode[error.errno])
else:
    print("fine")
"""


@pytest.mark.parametrize("name", CALLS)
async def test_a_system_call_that_leads_out_is_refused_and_others_are_not(
    inside: Inside, tmp_path: Path, name: str
) -> None:
    made, wanted = CALLS[name]
    machine = MACHINES[os.uname().machine]
    if name == "x32" and machine.foreign is None:
        pytest.skip("there is no x32 on this machine")
    (tmp_path / "ws" / "try.py").write_text(
        TRY.replace("{call}", made.format(keys=machine.keys, unshare=machine.unshare, clone=machine.clone))
    )
    assert await inside("workspace-write", f"{PYTHON} -I try.py") == (f"{wanted}\n", False)


async def test_a_32_bit_call_ends_the_program(inside: Inside, tmp_path: Path) -> None:
    """`int 0x80` counts calls otherwise: what is 41 for one is `dup` for the other."""
    if os.uname().machine != "x86_64":
        pytest.skip("only x86_64 has it")
    code = "b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3'"  # mov eax, getpid; int 0x80; ret
    (tmp_path / "ws" / "try.py").write_text(
        f"import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write({code})\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\nprint('pid', f())\n"
    )
    text, is_error = await inside("workspace-write", f"{PYTHON} -I try.py; echo $?")
    assert not is_error
    assert text.splitlines()[-1] == "159"  # SIGSYS
    assert "pid" not in text


def test_there_is_no_filter_for_a_machine_whose_numbers_are_not_known() -> None:
    with pytest.raises(NotImplementedError, match="riscv64"):
        program_for("riscv64")
    assert len({program_for(machine) for machine in MACHINES}) == 2
    assert all(len(program_for(machine)) % 8 == 0 for machine in MACHINES)


async def test_a_missing_file_of_the_daemon_is_made_as_a_file(inside: Inside, tmp_path: Path) -> None:
    """A directory in the place of its settings would keep the daemon from starting again."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    settings, data = workspace / "cfg/config.toml", workspace / "data"
    said, failed = await inside(
        "workspace-write",
        f"echo x > {settings}; mv cfg other; mkdir data/x; true",
        str(settings),
        f"{data}/",
        ws=workspace,
    )
    assert not failed, said
    assert (settings.read_bytes(), data.is_dir(), list(data.iterdir())) == (b"", True, [])
