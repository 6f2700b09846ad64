"""Commands that try to get out of the sandbox, or at what is protected in it: the table that `test_escapes.py` walks.

Each runs with `bash -u` in a directory of its own, with these variables: W the workspace, O somebody's files beside it,
H the home directory, P the daemon's directories, R what holds all of these, V a process outside with a secret in its
environment, T a word for names elsewhere, PY a Python. `won` tells of what leaves no trace. `works` says who gets
through where nothing stands in the way, which is tried too; None: nobody, or the try would harm this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Works = Literal["anyone", "root"] | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """``claimed``: whether the sandbox claims to stop it. Nobody looks at what comes of one that it does not."""

    name: str
    command: str
    works: Works = "anyone"
    claimed: bool = True


_PYTHON = """
import ctypes, errno, fcntl, os, socket, stat, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
W, O, P, R, T, V = (os.environ[name] for name in "WOPRTV")
V = int(V)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def syscall(*arguments):
    return check(libc.syscall(*arguments))
def won():
    print("wo" + "n")
def secret():
    with open(f"/proc/{V}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[47]), int(fields[48])
"""


def py(name: str, code: str, works: Works = "anyone") -> Attempt:
    return Attempt(name, f"\"$PY\" -I - <<'END'\n{_PYTHON}{code}\nEND", works)


def unix(name: str, path: str, kind: str = "SOCK_STREAM") -> Attempt:
    code = f"s = socket.socket(socket.AF_UNIX, socket.{kind}); s.connect({path}); s.send(b'hello')"
    return py(name, code)


def opens(name: str, path: str, works: Works = "root") -> Attempt:
    """Opened for writing and closed again, which does nothing."""
    return Attempt(name, f"for one in {path}; do [ -e $one ] && (exec 3>>$one) && won; done", works)


FILES = [
    Attempt("write outside", "echo x > $O/file"),
    Attempt("append outside", "echo x >> $O/file"),
    Attempt("create outside", "touch $O/new"),
    Attempt("through ..", "echo x > $W/../out/file"),
    Attempt("through //", "echo x > //$O//file"),
    Attempt("through ~", "echo x >> ~/.bashrc"),
    Attempt("remove outside", "rm -f $O/file"),
    Attempt("remove a directory outside", "rm -rf $O/dir"),
    Attempt("rename outside", "mv $O/file $O/other"),
    Attempt("move it in", "mv $O/file ."),
    Attempt("move something out", "touch mine; mv mine $O/"),
    Attempt("swap in and out", "echo x > mine; \"$PY\" -Ic \"import ctypes; ctypes.CDLL(None).renameat2(-100, b'mine', "
            "-100, b'$O/file', 2)\""),
    Attempt("make a directory outside", "mkdir $O/new"),
    Attempt("truncate outside", "truncate -s 0 $O/file"),
    Attempt("mode of a file outside", "chmod 777 $O/file"),
    Attempt("owner of a file outside", "chown 1 $O/file", "root"),
    Attempt("time of a file outside", "touch -d @1 $O/file"),
    Attempt("flags of a file outside", "chattr +d $O/file", None),
    Attempt("replace a program outside", "cp /bin/true $O/program"),
    Attempt("fill the disk outside", "head -c 3000000 /dev/zero > $O/big"),
    Attempt("symbolic link", "ln -s $O/file link; echo x > link"),
    Attempt("chain of links", "ln -s $O/file 1; ln -s 1 2; ln -s $PWD/2 3; echo x > 3"),
    Attempt("dangling link", "ln -s $O/new link; echo x > link"),
    Attempt("link to a directory", "ln -s $O/dir link; echo x > link/new"),
    Attempt("relative link", "ln -s ../../out/dir link; echo x > link/new; ln -s ../out/dir $W/s; echo x > $W/s/new"),
    Attempt("link made outside", "ln -s $PWD $O/link"),
    Attempt("hard link in", "ln $O/file link && echo x > link"),
    Attempt("hard link out", "touch mine; ln mine $O/link"),
    Attempt("/proc/self/root", "echo x > /proc/self/root$O/file"),
    Attempt("/proc/1/root", "echo x > /proc/1/root$O/file", None),
    Attempt("/proc/PPID/root", "echo x > /proc/$PPID/root$O/file"),
    Attempt("/proc/PID/root of a process outside", "echo x > /proc/$V/root$O/file"),
    Attempt("/proc/PID/cwd of a process outside", "echo x > /proc/$V/cwd/out/file"),
    Attempt("/proc/PID/fd of a process outside", "echo x > /proc/$V/fd/2"),
    Attempt("/proc/self/cwd", "cd $O/dir; echo x > /proc/self/cwd/../file"),
    Attempt("/proc/self/fd of a reader", "exec 3< $O/file; echo x > /proc/self/fd/3"),
    Attempt("/dev/fd of a reader", "exec 3< $O/file; echo x > /dev/fd/3"),
    Attempt("/proc/self/fd of a directory", "exec 3< $O/dir; echo x > /proc/self/fd/3/new"),
    Attempt("/proc/self/map_files", "echo x > /proc/self/task/$$/root$O/file"),
    py("openat below a directory",
       "d = os.open(O, os.O_PATH); os.close(os.open('file', os.O_WRONLY|os.O_TRUNC, dir_fd=d))"),
    py("attributes through a reader", "os.setxattr(os.open(f'{O}/file', os.O_RDONLY), 'user.mine', b'x')"),
    py("mode through a reader", "os.fchmod(os.open(f'{O}/file', os.O_RDONLY), 0o777)"),
    py("unnamed file made visible", "d = os.open(O, os.O_TMPFILE|os.O_WRONLY); "
        "check(libc.linkat(-100, f'/proc/self/fd/{d}'.encode(), -100, f'{O}/new'.encode(), 0x400))"),
    py("file handle", """
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)); mount = ctypes.c_int()
check(libc.name_to_handle_at(-100, f"{O}/file".encode(), handle, ctypes.byref(mount), 0))
d = check(libc.open_by_handle_at(os.open(O, os.O_RDONLY), handle, os.O_WRONLY | os.O_TRUNC))""", "root"),
    Attempt("host's /tmp", "touch /tmp/$T"),
    Attempt("host's /var/tmp", "touch /var/tmp/$T"),
    Attempt("host's /dev/shm", "touch /dev/shm/$T"),
    Attempt("host's /run", "touch /run/$T", "root"),
    Attempt("host's /etc", "touch /etc/$T", "root"),
    Attempt("host's /", "touch /$T", "root"),
    Attempt("sh -c in sh -c", """sh -c 'bash -c "sh -c \\"echo x > $O/file\\""'"""),
    Attempt("eval of an escape", "eval $'echo x \\x3e $O/file'"),
    Attempt("env -i", "env -i /bin/sh -c \"echo x > $O/file\""),
    Attempt("through xargs, nice and timeout", "echo $O/new | xargs nice timeout 3 touch"),
    Attempt("tar", "echo x > file; tar -cf - file | tar -C $O -xf -"),
    Attempt("git outside", "git init -q $O/repository"),
    Attempt("git config --global", "git config --global core.pager x"),
    Attempt("LD_PRELOAD", "ln -s $PY p; LD_PRELOAD=libc.so.6 ./p -Ic \"open('$O/file', 'w')\""),
    Attempt("BASH_ENV", "echo \"echo x > $O/file\" > rc; BASH_ENV=$PWD/rc bash -c :"),
    Attempt("PATH stub", "printf '#!/bin/sh\\necho x > $O/file' > ls; chmod +x ls; PATH=$PWD:$PATH ls"),
]  # fmt: skip

GIT = [
    Attempt("git: plant a hook", "echo x > $W/.git/hooks/pre-commit"),
    Attempt("git: change a hook's mode", "chmod +x $W/.git/hooks/sample"),
    Attempt("git: core.hooksPath", "git -C $W config core.hooksPath $PWD"),
    Attempt("git: core.fsmonitor", "git -C $W config --local core.fsmonitor $PWD/x"),
    Attempt("git: write config", "echo x >> $W/.git/config"),
    Attempt("git: info/attributes", "mkdir -p $W/.git/info; echo x > $W/.git/info/attributes"),
    Attempt("git: remove .git", "rm -rf $W/.git"),
    Attempt("git: rename .git", "mv $W/.git $W/s-git; mkdir $W/.git"),
    Attempt("git: a file in place of .git", "rm -rf $W/.git; echo gitdir: elsewhere > $W/.git"),
    Attempt("git: a link in place of .git", "rm -rf $W/.git; ln -s $PWD $W/.git"),
    Attempt("git: swap .git", "mkdir g; \"$PY\" -Ic \"import ctypes; ctypes.CDLL(None).renameat2(-100, b'g', -100, "
            "b'$W/.git', 2)\""),
    Attempt("git: hard link to config", "ln $W/.git/config c && echo x >> c"),
    Attempt("git: another way to it", "ln -s $W here; echo x >> here/../ws/.git/config"),
    Attempt("git: /proc/self/root", "echo x >> /proc/self/root$W/.git/config"),
    Attempt("git: init --separate-git-dir", "git init -q --separate-git-dir=$PWD/g $W"),
    Attempt("git: worktree", "git -C $W worktree add -q --orphan $PWD/tree 2>&1 || mkdir -p $W/.git/worktrees/x"),
    Attempt("git: rename the workspace", "cd /; mv $W $R/moved && mkdir -p $W/.git"),
    Attempt("git: mount over .git", "mkdir m; mount --bind m $W/.git", None),
]  # fmt: skip

OWN = [
    Attempt("own: read settings", "cat $P/conf/loopd/config.toml"),
    Attempt("own: read a key file", "cat $P/key"),
    Attempt("own: read a session", "cat $P/data/sessions/one/history.jsonl"),
    Attempt("own: read credentials", "cat $P/creds/*"),
    Attempt("own: read the log", "cat $P/log"),
    Attempt("own: search everything", "grep -rIs --exclude=before-key SECRET $R"),
    Attempt("own: copy everything", "cp -r $P copy; grep -r SECRET copy"),
    Attempt("own: tar everything", "tar -cf - -C $P . | strings | grep SECRET || tar -cf - -C $P . | grep -a SECRET"),
    Attempt("own: through /proc/self/root", "cat /proc/self/root$P/key"),
    Attempt("own: through a process outside", "cat /proc/$V/root$P/key"),
    Attempt("own: through the cwd of a process outside", "cat /proc/$V/cwd/own/key"),
    Attempt("own: through a link", "ln -s $P p; cat p/key"),
    Attempt("own: through a hard link", "ln $P/key k && cat k"),
    Attempt("own: in the workspace", "cat $W/own/deep/key"),
    Attempt("own: hard link in the workspace", "ln $W/own/deep/key k && cat k"),
    Attempt("own: rename its parent", "mv $W/own $W/s-own; cat $W/s-own/deep/key; "
            "mkdir -p $W/own/deep; echo x > $W/own/deep/key"),
    Attempt("own: swap its parent",
            "mkdir g; \"$PY\" -Ic \"import ctypes; ctypes.CDLL(None).renameat2(-100, b'g', -100, "
            "b'$W/own', 2)\"; cat g/deep/key"),
    Attempt("own: remove its parent", "rm -rf $W/own"),
    Attempt("own: uncover it", "umount -l $P/data $P/key; cat $P/key", None),
    Attempt("own: remount it",
            "mount -o remount,rw $P/data; touch $P/data/new && won; mount -t tmpfs x $P/data && won", None),
    Attempt("own: write settings", "echo x >> $P/conf/loopd/config.toml"),
    Attempt("own: new settings", "mkdir -p $P/absent; echo x > $P/absent/config.toml"),
    Attempt("own: new settings in the workspace", "mkdir -p $W/own/later; echo x > $W/own/later/config.toml"),
    Attempt("own: forge a session", "mkdir $P/data/sessions/two; echo x > $P/data/sessions/two/meta.json"),
    Attempt("own: append to the log", "echo x >> $P/log"),
    Attempt("own: unlink the socket", "rm -f $P/run/loopd/sock"),
    Attempt("own: replace the socket", "mv $P/run/loopd/sock $P/run/loopd/old; touch $P/run/loopd/sock"),
    Attempt("own: write its lock", "echo x > $P/run/loopd/sock.lock"),
    Attempt("own: rename the runtime directory", "mv $P/run $P/run2"),
    unix("own: connect to the socket", "f'{P}/run/loopd/sock'"),
    unix("own: connect through /proc", "f'/proc/{V}/cwd/own/run/loopd/sock'"),
    Attempt("own: loopctl permission", "timeout 6 $LOOPCTL --socket $P/run/loopd/sock permission danger-full-access"),
    Attempt("own: loopctl approvals allow", "timeout 2 $LOOPCTL --socket $P/run/loopd/sock approvals allow 1", None),
]  # fmt: skip

# They may have begun before the call ends, but not go on after it.
LATER = [
    Attempt("later: setsid", "setsid sh -c \"sleep 0.4; echo x > $O/file\" > /dev/null 2>&1 &", None),
    Attempt("later: nohup", "nohup sh -c \"sleep 0.4; echo x > $O/file\" > /dev/null 2>&1 &", None),
    Attempt("later: double fork", "(setsid sh -c \"(sleep 0.4; echo x > $O/file) &\" &) > /dev/null 2>&1", None),
    Attempt("later: without environment",
            "(env -i setsid /bin/sh -c \"sleep 0.4; echo x > $O/file\" &) > /dev/null 2>&1", None),
    Attempt("later: at", "echo \"echo x > $O/file\" | at now && won", None),
    Attempt("later: crontab", "touch /var/spool/cron/$T /var/spool/cron/crontabs/$T && won", None),
    Attempt("later: systemd-run", "systemd-run --user true && won; systemd-run true && won", None),
]  # fmt: skip
