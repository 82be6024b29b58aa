"""A worker process of the contract suite: a producer or a consumer over descriptors that were handed to it.

Arguments, JSON: role, connection, memory (descriptors), num_slots, stop_at (a pack id, or null). A producer that reaches
`stop_at` writes half of its slot, says "half" and waits to be killed. A consumer that reaches it takes the pack, says
"taken" and waits to be killed.
"""

from __future__ import annotations

import json
import sys

from transport_harness import FINGERPRINT, LAYOUT, states_of, write_states

from slipstream.device.shared import SharedMemory
from slipstream.transport.connections import connection_from_fd
from slipstream.transport.shared import SharedSink, SharedSource
from slipstream.transport.slots import SlotPool


def wait_to_be_killed(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def produce(sink: SharedSink, stop_at: int | None) -> None:
    while (assignment := sink.acquire()) is not None:
        last = sink.last_hidden(assignment)
        assert last is not None
        if assignment.pack_id == stop_at:
            half = LAYOUT.pack_tokens // 2
            sink.hidden(assignment)[:half] = states_of(assignment.pack_id)[0][:half]
            wait_to_be_killed("half")
        write_states(assignment, sink.hidden(assignment), last)
        sink.publish(assignment)
    sink.close()


def consume(source: SharedSource, stop_at: int | None) -> None:
    pack_id = 0
    while True:
        source.take(pack_id)
        if pack_id == stop_at:
            wait_to_be_killed("taken")
        source.release(pack_id)
        pack_id += 1


def main() -> None:
    told = json.loads(sys.argv[1])
    memory = SharedMemory.attach(told["memory"], LAYOUT.nbytes * told["num_slots"])
    pool = SlotPool.shared(LAYOUT, told["num_slots"], memory)
    connection = connection_from_fd(told["connection"])
    if told["role"] == "producer":
        produce(SharedSink(connection=connection, pools=[pool], fingerprint=FINGERPRINT), told["stop_at"])
    else:
        consume(SharedSource(connection=connection, pool=pool), told["stop_at"])


if __name__ == "__main__":
    main()
