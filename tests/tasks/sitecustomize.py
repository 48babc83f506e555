"""`python -m batchwright` and `torchrun` where others start them, forked: see `forked_tasks`.

Python reads this at its start, before anything else. What was forked belongs to this process: it
gets its signals, ends with it, and this process ends as it does.
"""

import os
import sys


def _run(name: str, program: str, words: list[str]) -> None:
    import json
    import signal
    import socket

    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    line.connect(f"\0{name}")
    files = [os.dup(number) for number in range(3)]
    _, out, err = files
    here = os.getcwd()  # noqa: PTH109
    order = {
        "number": 0,
        "module": "forked",
        "arguments": [here, "/dev/null", f"&{out}", f"&{err}", program, *words],
        "environment": dict(os.environ),
        "files": files,
    }
    passed_on = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until there is somebody to have it
    socket.send_fds(line, [json.dumps(order).encode()], files)
    pid = json.loads(line.recv(1 << 10))["pid"]
    for number in passed_on:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = json.loads(line.recv(1 << 10) or '{"code": 1}')["code"]
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if "FORKED_TASKS" in os.environ:
    first = sys.orig_argv[1] if len(sys.orig_argv) > 1 else ""
    if sys.orig_argv[1:3] == ["-m", "batchwright"]:
        _run(os.environ["FORKED_TASKS"], "batchwright", sys.orig_argv[3:])
    elif os.path.basename(first) == "torchrun":  # noqa: PTH119
        _run(os.environ["FORKED_TASKS"], "torch.distributed.run", sys.orig_argv[2:])
