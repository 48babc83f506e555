"""A switch with a delay between hosts that are network namespaces, in place of ``tc netem``.

    python -m benchmarks.harness.wire DELAY NAME=ADDRESS NAME=ADDRESS ...

makes an interface for each host, prints a line, and carries packets until it is killed. A packet
arrives DELAY seconds after it has left. The switch is written in Python, as not every kernel has
netem. A process of its own, with real-time priority if possible, carries the packets of each host;
`ping_pong` shows how late they still are. The kernel limits the bandwidth (`tc tbf`).
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
_PATIENCE = 60.0  # seconds to wait for the other host
_LARGEST = 2**16
_TARGET = slice(16, 20)  # of an IPv4 packet


def interface(name: str) -> int:
    """Make an interface; the file descriptor through which its packets are read and written."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH", name.encode(), _PLAIN_PACKETS))
    return descriptor


def carry(source: int, targets: Mapping[bytes, int], delay: float) -> None:
    """Carry the packets of one host to their targets, for ever.

    Args:
        source: File descriptor of the host's interface.
        targets: By address, the file descriptors of all interfaces.
        delay: Seconds that each packet takes.
    """
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
            if (target := targets.get(packet[_TARGET], -1)) >= 0:  # not a multicast, for example
                under_way.append((time.monotonic() + delay, target, packet))


def ping_pong(size: int, answering: bool, address: str, port: int, times: int = 50) -> list[float]:
    """Seconds of messages there and back by a plain socket, without code of the package.

    Args:
        size: Bytes of a message; one byte comes back.
        answering: Whether this host answers, and waits at ``address``.
        address: Address of the answering host.
        port: Port of the answering host, which prints it; 0: any free port.
        times: Number of messages.

    Raises:
        OSError: The other host is gone, or does not connect.
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
    """Make the interfaces, and carry packets between them."""
    delay, hosts = float(sys.argv[1]), dict(one.split("=") for one in sys.argv[2:])
    sources = {socket.inet_aton(address): interface(name) for name, address in hosts.items()}
    print("ready", flush=True)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)
    first, *others = sources.values()
    carried = next((one for one in others if os.fork() == 0), first)
    if carried != first:
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: killed with the first process
    carry(carried, sources, delay)


if __name__ == "__main__":
    main()
