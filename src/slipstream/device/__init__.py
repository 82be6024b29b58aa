"""What the machine lends: memory that processes share, CPU threads, and the kind of device that is there.

Beside the flow: no stage waits in here. Nothing in this package imports torch when it is imported, so the supervisor
and preflight can ask about the machine without paying for it.
"""
