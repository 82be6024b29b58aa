"""Children for tests of the supervisor: a fresh interpreter with a few lines of script, and nothing to load."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

from slipstream.launch.processes import Child
from slipstream.transport.connections import connection_pair

PRELUDE = """
import os, signal, sys, time
from multiprocessing.connection import Connection
control = Connection(int(sys.argv[1]))
def say(kind, payload=None):
    control.send((kind, payload or {}))
"""
UNTIL_STOPPED = """
say("ready")
while control.recv()[0] != "stop":
    pass
say("done", {"status": "interrupted"})
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("ready")
time.sleep(600)
"""
DEAF = """
say("ready")
time.sleep(600)
"""


def stub(folder: Path, name: str, script: str) -> Child:
    """Start a child that runs `script` after `PRELUDE`; its output goes to a log in `folder`."""
    ours, theirs = connection_pair()
    log = folder / f"{name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    theirs.close()
    assert process.stdin is not None
    process.stdin.close()
    return Child(name=name, process=process, control=ours, log=log, started_at=time.monotonic())
