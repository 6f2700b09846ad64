"""Clients in a process of their own: ``SOCKET RUNTIME COUNT`` attaches COUNT connections and reads what comes.

Prints ``ready``; then, whenever all of them have a run's last event, one line: when that was, and whether one of them
was told that it lost events. Ends with its stdin.
"""

from __future__ import annotations

import json
import select
import sys
import time

from loop_protocol.client import Client

SETTLED = b'"type":"run_settled"'
LOST = b'"type":"events_lost"'


def main(path: str, runtime: str, count: int) -> None:
    clients = [Client.connect(path) for _ in range(count)]
    for client in clients:
        client.call("runtime/attach", {"runtimeId": runtime})
    # From here on only bytes: what parsing costs a client is not what this measures, and the machine has few cores.
    sockets = {client.fileno(): client._socket for client in clients}
    poll = select.poll()
    for descriptor in (0, *sockets):
        poll.register(descriptor, select.POLLIN)
    print("ready", flush=True)
    settled: set[int] = set()
    tails = dict.fromkeys(sockets, b"")
    lost = False
    while True:
        for descriptor, _ in poll.poll():
            data = sockets[descriptor].recv(1 << 20) if descriptor in sockets else b""
            if not data:
                return
            seen = tails[descriptor] + data
            tails[descriptor] = data[-len(SETTLED) :]
            lost = lost or LOST in seen
            if SETTLED in seen:
                settled.add(descriptor)
                tails[descriptor] = b""
        if len(settled) == count:
            print(json.dumps({"at": time.monotonic(), "lost": lost}), flush=True)
            settled.clear()
            lost = False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
