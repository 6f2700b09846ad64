"""The system calls that a sandboxed command does not get, as a program for the kernel (seccomp-bpf, see seccomp(2)).

Namespaces leave doors that no mount closes: sockets in the file system that lead to daemons of the same person, and
parts of the kernel that belong to no namespace.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CLONE_NEWUSER = 0x10000000
_SETUID_OR_SETGID = 0o6000
_CREATING = 0o100 | 0o20000000  # O_CREAT, O_TMPFILE
# Codes of seccomp_data's fields, of BPF instructions, and of answers.
_NR, _ARCH, _ARGUMENTS = 0, 4, 16
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

Code = list[tuple[int, int, int, int]]


@dataclass(slots=True, frozen=True, kw_only=True)
class Machine:
    """The numbers of an architecture (AUDIT_ARCH_*, unistd.h). ``foreign``: where those of another ABI begin. ``modes``
    and ``opens``: calls that give a file its mode, with the argument that says it, for the latter the one after the
    flags."""

    arch: int
    socket: int
    socketpair: int
    clone: int
    unshare: int
    keys: Sequence[int]
    modes: Mapping[int, int]
    opens: Mapping[int, int]
    foreign: int | None = None
    clone3: int = 435
    io_uring_setup: int = 425
    openat2: int = 437
    fchmodat2: int = 452


MACHINES = {
    "x86_64": Machine(
        arch=0xC000003E,
        socket=41,
        socketpair=53,
        clone=56,
        unshare=272,
        keys=(248, 249, 250),
        modes={85: 1, 90: 1, 91: 1, 133: 1, 259: 2, 268: 2},  # creat, chmod, fchmod, mknod, mknodat, fchmodat
        opens={2: 2, 257: 3},  # open, openat
        foreign=0x40000000,  # x32
    ),
    "aarch64": Machine(
        arch=0xC00000B7,
        socket=198,
        socketpair=199,
        clone=220,
        unshare=97,
        keys=(217, 218, 219),
        modes={33: 2, 52: 1, 53: 2},  # mknodat, fchmod, fchmodat
        opens={56: 3},  # openat
    ),
}


def program_for(machine: str | None = None) -> bytes:
    """For this machine, or the named one. Raises NotImplementedError where its numbers are not known."""
    name = machine or os.uname().machine
    if name not in MACHINES:
        raise NotImplementedError(f"there is no filter of system calls for {name}")
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _program(MACHINES[name]))


def _program(machine: Machine) -> Code:
    # The same number means another call in another ABI: a 32-bit program would walk past all that follows.
    code: Code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, machine.arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NR)]
    if machine.foreign is not None:
        code += [(_AT_LEAST, 0, 1, machine.foreign), *_refuse(errno.EPERM)]
    rules = [
        # AF_UNIX leads out: D-Bus starts programs (systemd-run), docker.sock is root, tmux types, ssh-agent signs. The
        # network namespace does not hold it, a read-only mount neither. Nor is VSOCK, ALG or any other family needed.
        (machine.socket, _only((socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK), errno.EAFNOSUPPORT)),
        # A pair is harmless, but one of datagrams takes an address to send to, like any such socket.
        (machine.socketpair, _only((socket.SOCK_STREAM, socket.SOCK_SEQPACKET), errno.ESOCKTNOSUPPORT, at=1, mask=0xF)),
        # It opens sockets and files without any of the calls that are looked at here.
        (machine.io_uring_setup, _refuse(errno.ENOSYS)),
        # Keyrings belong to the user, not to a namespace: Kerberos and disk keys are in them.
        *((number, _refuse(errno.ENOSYS)) for number in machine.keys),
        # A user namespace of its own gives a command all capabilities in it, the kernel's favourite way to be broken.
        (machine.unshare, _without(_CLONE_NEWUSER, errno.EPERM)),
        (machine.clone, _without(_CLONE_NEWUSER, errno.EPERM)),
        # Its flags lie in memory, out of reach from here. Libraries take `clone` where there is none.
        (machine.clone3, _refuse(errno.ENOSYS)),
        # In the workspace such a file stays, and gives whoever else runs it the rights of its owner. That is the
        # person, or root.
        *((number, _without(_SETUID_OR_SETGID, errno.EPERM, at=at)) for number, at in machine.modes.items()),
        (machine.fchmodat2, _without(_SETUID_OR_SETGID, errno.EPERM, at=2)),
        *((number, _not_creating(_SETUID_OR_SETGID, errno.EPERM, at=at)) for number, at in machine.opens.items()),
        (machine.openat2, _refuse(errno.ENOSYS)),  # like clone3
    ]
    for number, then in rules:
        code += [(_EQUAL, 0, len(then), number), *then]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


# Each of these ends in an answer, so whoever jumps over it still has the call's number at hand. Arguments are compared
# by their lower half: the kernel takes these as 32 bits too.


def _refuse(error: int) -> Code:
    return [(_RETURN, 0, 0, _ERRNO | error)]


def _only(values: Sequence[int], error: int, *, at: int = 0, mask: int = 0xFFFFFFFF) -> Code:
    code: Code = [(_LOAD, 0, 0, _ARGUMENTS + 8 * at), (_AND, 0, 0, mask)]
    for value in values:
        code += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return code + _refuse(error)


def _without(bits: int, error: int, *, at: int = 0) -> Code:
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * at), (_ANY_BIT, 0, 1, bits), *_refuse(error), (_RETURN, 0, 0, _ALLOW)]


def _not_creating(bits: int, error: int, *, at: int) -> Code:
    """Else the mode means nothing, and may be anything."""
    flags: Code = [(_LOAD, 0, 0, _ARGUMENTS + 8 * (at - 1)), (_ANY_BIT, 0, 1, _CREATING), *_refuse(error)]
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * at), (_ANY_BIT, 0, len(flags), bits), *flags, (_RETURN, 0, 0, _ALLOW)]
