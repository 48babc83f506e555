"""A wire between two network interfaces, with a delay and a bandwidth: ``tc netem`` without it.

    python slow_wire.py FIRST SECOND DELAY BANDWIDTH

makes both interfaces, says so in a line, and carries packets until it is killed. Each packet leaves
after those before it, so many bytes per second, and arrives the delay later, in seconds.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import sys
import threading
import time

_SET_INTERFACE = 0x400454CA  # TUNSETIFF from <linux/if_tun.h>
_PLAIN_PACKETS = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
_LARGEST = 2**16


def interface(name: str) -> int:
    """A new interface, and the descriptor by which its packets come and go."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH", name.encode(), _PLAIN_PACKETS))
    return descriptor


def carry(source: int, target: int, delay: float, bandwidth: float) -> None:
    """One direction."""
    under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def arrive() -> None:
        while True:
            due, packet = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                os.write(target, packet)
            except OSError:
                continue  # the interface is down, or gone

    threading.Thread(target=arrive, daemon=True).start()
    left = 0.0  # when the last packet had left
    while True:
        try:
            packet = os.read(source, _LARGEST)
        except OSError:
            time.sleep(0.05)
            continue
        left = max(left, time.monotonic()) + len(packet) / bandwidth
        under_way.put((left + delay, packet))


def main() -> None:
    """See above."""
    names, (delay, bandwidth) = sys.argv[1:3], map(float, sys.argv[3:5])
    first, second = map(interface, names)
    print("ready", flush=True)  # noqa: T201 - whoever has started it waits for this
    both = ((first, second), (second, first))
    threads = [threading.Thread(target=carry, args=(*ends, delay, bandwidth)) for ends in both]
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main()
