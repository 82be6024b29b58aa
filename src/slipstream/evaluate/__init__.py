"""After stage 6 of 6: trained weights → acceptance length, losslessness, tokens a second. Nothing waits for it.

Waits for: a drafter, the target's answers, their hidden states. Unblocked by: nobody; it changes nothing that it reads.

`acceptance` finds the exact greedy path from one teacher-forced pass; `decode` runs the real loop against a cache;
`lossless` compares their answers with the target's own; `summary` holds the figures that both give.
"""
