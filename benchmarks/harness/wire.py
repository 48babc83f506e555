"""A switch between hosts that are network namespaces, with a delay: ``tc netem`` without it.

    python -m benchmarks.harness.wire DELAY NAME=ADDRESS NAME=ADDRESS ...

makes an interface for each host, says so in a line, and carries packets until it is killed. A
packet arrives the delay, in seconds, after it has left. It is written in Python, as not every
kernel has netem, and each host's packets are carried by a process of its own that goes before
others where it may; how late it still is, `ping_pong` shows. Bandwidth is the kernel's (`tc tbf`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

_SET_INTERFACE = 0x400454CA  # TUNSETIFF from <linux/if_tun.h>
_PLAIN_PACKETS = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
_TIMER_SLACK = 29  # PR_SET_TIMERSLACK from <linux/prctl.h>
_PATIENCE = 60.0  # seconds, until the other host counts as gone that has not come
_LARGEST = 2**16
_TARGET = slice(16, 20)  # of an IPv4 packet


def interface(name: str) -> int:
    """A new interface, and the descriptor by which its packets come and go."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH", name.encode(), _PLAIN_PACKETS))
    return descriptor


def carry(source: int, targets: Mapping[bytes, int], delay: float) -> None:
    """What comes from one host, for ever."""
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([source], [], [], wait)
        while under_way and under_way[0][0] <= time.monotonic():
            _, target, packet = under_way.popleft()
            with suppress(OSError):  # its interface is down, or gone
                os.write(target, packet)
        if readable:
            try:
                packet = os.read(source, _LARGEST)
            except OSError:
                time.sleep(0.05)
                continue
            if (target := targets.get(packet[_TARGET], -1)) >= 0:  # no address of all of them
                under_way.append((time.monotonic() + delay, target, packet))


def ping_pong(size: int, answering: bool, address: str, port: int, times: int = 50) -> list[float]:
    """Seconds of messages there and back by a plain socket, which nothing of ours sends.

    Args:
        size: Bytes of a message; one comes back.
        answering: Whether this is the one that answers, and waits at ``address``.
        address: Of that one.
        port: Of that one, which prints it; 0: any that is free.
        times: How many.

    Raises:
        OSError: The other one is gone, or does not come.
    """
    if answering:
        with socket.create_server((address, port)) as listener:
            listener.settimeout(_PATIENCE)
            print("ready", listener.getsockname()[1], flush=True)
            line, _ = listener.accept()
    else:
        line = socket.create_connection((address, port), timeout=_PATIENCE)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    taken, message, wanted = [], bytes(size), size if answering else 1
    with line:
        for _ in range(times):
            begun = time.perf_counter()
            if not answering:
                line.sendall(message)
            if len(line.recv(wanted, socket.MSG_WAITALL)) < wanted:
                raise ConnectionError("the other host is gone")
            if answering:
                line.sendall(b"-")
            taken.append(time.perf_counter() - begun)
    return taken


def main() -> None:
    """See above."""
    delay, hosts = float(sys.argv[1]), dict(one.split("=") for one in sys.argv[2:])
    sources = {socket.inet_aton(address): interface(name) for name, address in hosts.items()}
    print("ready", flush=True)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)
    first, *others = sources.values()
    carried = next((one for one in others if os.fork() == 0), first)
    if carried != first:
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: with the one that is killed
    carry(carried, sources, delay)


if __name__ == "__main__":
    main()
