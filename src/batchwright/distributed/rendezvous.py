"""Rendezvous of the workers of one start: store, agreement on a start, network interface.

The launcher gives every worker the address of a store. That of torchrun's agent outlives the
workers: it still holds the addresses that the workers of an earlier start left, and after a change
of hosts not even the restart count tells the starts apart. So before anything else the workers of a
start agree on a part of the store that nobody has used.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public all the same
from torch.distributed.distributed_c10d import PrefixStore, Store

from batchwright.distributed.heartbeat import BEAT_SECONDS, RollCall, answered
from batchwright.distributed.processes import STORE_SOCKET
from batchwright.errors import LostWorkerError
from batchwright.workload.host import collective_interface

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "")
_POLL_SECONDS = 0.02
_LATE_SECONDS = 5.0  # by which a store may give up by itself later, on a busy machine
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR from <linux/sockios.h>


def agent_holds_store() -> bool:
    """Whether the store is an elastic agent's and so outlives this process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_keeper() -> str:
    """Address of an agent's store; empty where worker 0 holds the store."""
    if not agent_holds_store():
        return ""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def meet(rank: int, size: int, timeout: float) -> Store:
    """A store that is used by the ``size`` workers of this start alone.

    Raises:
        LostWorkerError: Some did not come in time, or are gone by the current `RollCall`.
        RuntimeError: The store cannot be reached, or is silent.
    """
    if rank == 0:
        store = _connect(timeout, serve=not agent_holds_store())
        return _part(store, _lead(LimitedStore(_starts(store), timeout), size, timeout))
    end = time.monotonic() + timeout
    while True:
        try:
            store = _connect(end - time.monotonic())
            starts, left = LimitedStore(_starts(store), timeout), end - time.monotonic()
            number = _follow(starts, rank, size, left)
            store.set_timeout(timedelta(seconds=timeout))  # it has what was left for the meeting
            return _part(store, number)
        except RuntimeError:  # the store of an earlier start, just about to go
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_SECONDS)


def _connect(timeout: float, *, serve: bool = False) -> Store:
    inherited = os.environ.pop(STORE_SOCKET, None) if serve else None
    port = int(os.environ["MASTER_PORT"])
    seconds = max(1.0, timeout)

    def connected() -> Store:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            is_master=serve,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=None if inherited is None else int(inherited),
        )

    return answered(connected, seconds + _LATE_SECONDS)  # it waits for a first word, too


def _starts(store: Store) -> Store:
    return PrefixStore("batchwright/starts", store)


def _part(store: Store, number: int) -> Store:
    return PrefixStore(f"batchwright/start/{number}", store)


class LimitedStore:
    """A store whose calls give up after some seconds without an answer; see `answered`.

    They raise `RuntimeError` then, as the store does by itself.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._limit = store, seconds + _LATE_SECONDS

    def add(self, key: str, number: int) -> int:
        """Add to the number of a key; returns the sum."""
        return answered(lambda: self._store.add(key, number), self._limit)

    def set(self, key: str, word: str) -> None:
        """Write a word."""
        answered(lambda: self._store.set(key, word), self._limit)

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys have words."""
        return answered(lambda: self._store.check(keys), self._limit)

    def get(self, key: str) -> bytes:
        """Wait for a key's word, and return it."""
        return answered(lambda: self._store.get(key), self._limit)


def _lead(store: LimitedStore, size: int, timeout: float) -> int:
    """Worker 0's part: open a new start, and close it when all others have signed."""
    number: int = store.add("count", 1)
    store.set("current", str(number))
    missing = set(range(1, size))
    end, look = time.monotonic() + timeout, 0.0
    while missing := {r for r in missing if not store.check([f"{number}/signed/{r}"])}:
        _refuse_late(end, timeout, sorted(missing))
        look = _refuse_lost(look)
        time.sleep(_POLL_SECONDS)
    signatures = [store.get(f"{number}/signed/{r}").decode() for r in range(1, size)]
    store.set(f"{number}/closed", json.dumps(["", *signatures]))
    return number


def _follow(store: LimitedStore, rank: int, size: int, timeout: float) -> int:
    """The others' part: sign the current start, until one is closed with this very signature.

    The current one may be of workers that are gone: it stays unsigned by this process, or is closed
    with a signature of another.
    """
    own, signed = os.urandom(8).hex(), ""
    end, look = time.monotonic() + timeout, 0.0
    while True:
        if store.check(["current"]):
            number = store.get("current").decode()
            if number != signed:
                store.set(f"{number}/signed/{rank}", own)
                signed = number
            if store.check([f"{number}/closed"]):
                signatures = json.loads(store.get(f"{number}/closed"))
                if signatures[rank : rank + 1] == [own]:
                    return int(number)
        _refuse_late(end, timeout, _missing(store, signed, size))
        look = _refuse_lost(look)
        time.sleep(_POLL_SECONDS)


def _missing(store: LimitedStore, number: str, size: int) -> list[int]:
    """Ranks that have not signed; [0] where worker 0 has no start open."""
    if not number or store.check([f"{number}/closed"]):
        return [0]
    return [r for r in range(1, size) if not store.check([f"{number}/signed/{r}"])]


def _refuse_late(end: float, timeout: float, missing: Sequence[int]) -> None:
    if time.monotonic() < end:
        return
    who = ", ".join(str(rank) for rank in missing)
    hint = ""
    if agent_holds_store() and not on_one_host():
        hint = (
            "; if a host came or went, the agents may disagree about the store: start all of them "
            "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
        )
    raise LostWorkerError(
        f"worker {who} did not come to the start within {round(timeout, 1):g} s{hint}"
    )


def _refuse_lost(look: float) -> float:
    """Raise if a worker is known to be gone, at most each beat; returns when to look next."""
    if time.monotonic() < look:
        return look
    if RollCall.current is not None and RollCall.current.misses_one():
        raise LostWorkerError(RollCall.current.loss())
    return time.monotonic() + BEAT_SECONDS


# ------------------------------------------------------------------------------ network interface


def on_one_host() -> bool:
    """Whether all workers were started by one launcher on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def choose_interface() -> None:
    """Tell gloo which network interface to use, unless GLOO_SOCKET_IFNAME says it already.

    Left to itself gloo takes the address that the host's own name resolves to: often 127.0.1.1, or
    a second network card's, where nobody answers. On one host it is the loopback interface; between
    hosts the one over which this host reaches MASTER_ADDR.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = os.environ.get("MASTER_ADDR", "")
    if address in _LOOPBACK or on_one_host():
        os.environ["GLOO_SOCKET_IFNAME"] = collective_interface()
        return
    name = interface_towards(address)
    if name == collective_interface() and not address.startswith("127."):
        # The host of worker 0 itself: its own name may resolve to the loopback interface.
        name = _interface_of(_outer_address())
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def own_address() -> str:
    """Address under which the workers of other hosts reach this one; loopback if there are none."""
    if on_one_host():
        return "127.0.0.1"
    first = os.environ.get("MASTER_ADDR", "")
    found = _address_towards(first, socket.AF_INET) or _address_towards(first)
    if found is None or found == "::1" or found.startswith("127."):
        # The host of the store itself: as in `choose_interface`.
        found = _outer_address()
    return found or socket.gethostbyname(socket.gethostname())


def interface_towards(address: str) -> str | None:
    """Name of the network interface whose address packets to ``address`` would carry.

    ``None`` where there is no such route, or the system (other than Linux) cannot be asked.
    """
    return _interface_of(_address_towards(address))


def _outer_address() -> str | None:
    """This host's IPv4 address for others: that which leads out, else its only one."""
    found = _address_towards("192.0.2.1", socket.AF_INET)  # outside: RFC 5737, never sent to
    if found is not None:
        return found
    own = [one for one in _addresses().values() if not one.startswith("127.")]
    return own[0] if len(own) == 1 else None  # as in a network without a way out


def _addresses() -> dict[str, str]:
    """One IPv4 address of each network interface, by its name; Linux tells them."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _interface_of(own: str | None) -> str | None:
    """Name of the network interface with an address; of IPv6 there may be several."""
    for name, address in _addresses().items():
        if address == own:
            return name
    listing = Path("/proc/net/if_inet6")
    for line in listing.read_text(encoding="utf-8").splitlines() if listing.exists() else ():
        digits, *_, name = line.split()
        if socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) == own:
            return name
    return None


def _address_towards(address: str, family: int = 0) -> str | None:
    """The address that packets to another would carry; ``None`` where there is no route."""
    try:
        infos = socket.getaddrinfo(address, 9, family=family, type=socket.SOCK_DGRAM)
        with socket.socket(infos[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(infos[0][4])  # chooses a route; for datagrams nothing is sent
            own: str = probe.getsockname()[0]
    except OSError:
        return None
    return own
