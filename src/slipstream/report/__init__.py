"""Outside the processes, from the run folder alone: what a run did, where its time went, and why.

Waits for: nothing; a run that is going on is read while it is written. Unblocked by: nothing.
"""
