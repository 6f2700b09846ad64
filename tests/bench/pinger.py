"""How long the daemon's loop is held, seen from outside: asks ``server/status`` every 2 ms until told to stop.

Prints ``ready``; for each line on stdin prints the longest round trip since the line before, in seconds.
"""

from __future__ import annotations

import select
import sys
import time

from loop_protocol.client import Client

EVERY_S = 0.002


def main(path: str) -> None:
    client = Client.connect(path)
    longest = 0.0
    poll = select.poll()
    poll.register(0, select.POLLIN)
    print("ready", flush=True)
    while True:
        if poll.poll(0):
            if not sys.stdin.readline():
                return
            print(longest, flush=True)
            longest = 0.0
        start = time.monotonic()
        client.call_raw("server/status")
        longest = max(longest, time.monotonic() - start)
        time.sleep(max(0.0, start + EVERY_S - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1])
