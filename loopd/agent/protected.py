"""The daemon's own files: in restricted presets ``read``, ``write`` and ``edit`` are denied them, and the sandbox hides
them (A-7). What a person lets run outside of it has all rights.

What a path leads to is compared, not how it is spelled: so links, ``..``, hard links, bind mounts, ``/proc/self/root``
and file systems that see several spellings as one name all meet the same rule.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

# Device and inode.
Identity = tuple[int, int]

# Keys and settings lie near the top; a search through all sessions would hold up every file that has a second name.
_SEARCHED = 64


class Protected:
    """``paths``: files and directories, which need not exist. One of a directory ends in a slash."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)

    def covers(self, names: Sequence[str], found: Sequence[Identity], status: os.stat_result | None) -> bool:
        """Whether a real path is one of them, or below one. ``names`` are its components, ``found`` what the first 0,
        1, 2, … of them lead to, as far as that exists; ``status`` is of the file itself, if there is one."""
        if not self.paths:
            return False
        folded = tuple(map(fold, names))
        for path in self.paths:
            for identity, rest in _places(path):
                if any(one == identity and folded[at : at + len(rest)] == rest for at, one in enumerate(found)):
                    return True
        return status is not None and status.st_nlink > 1 and any(_holds(path, status) for path in self.paths)


NOTHING = Protected(())


def identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def fold(name: str) -> str:
    """The same for all spellings that some file system takes for one name, and for a few more."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", name).casefold())
    return plain if plain.isascii() else "".join(c for c in plain if unicodedata.category(c) not in ("Cf", "Mn"))


def _places(path: str) -> Iterator[tuple[Identity, tuple[str, ...]]]:
    """Where it is: itself, and its name in the last directory that exists, for one that is made, or replaced by a new
    file of the same name, at this moment."""
    with suppress(OSError):
        yield identity(os.stat(path)), ()
    rest: tuple[str, ...] = ()
    place = os.path.realpath(path)
    while place != os.path.dirname(place):
        place, name = os.path.split(place)
        rest = (fold(name), *rest)
        with suppress(OSError):
            yield identity(os.stat(place)), rest
            return


def _holds(directory: str, status: os.stat_result) -> bool:
    """Another name of that file is in there: a hard link has no directory that would tell."""
    with suppress(OSError):
        top = os.stat(directory)
        if stat.S_ISDIR(top.st_mode) and top.st_dev == status.st_dev:
            for place, _, _ in islice(os.walk(directory), _SEARCHED):
                with suppress(OSError), os.scandir(place) as entries:
                    if any(entry.inode() == status.st_ino for entry in entries):
                        return True
    return False
