"""Stage 3 of 6: packs → the frozen target's hidden states, written into slots. Waits for: a free slot. Unblocked by: the
consumer that finished with one.

Inside: `capture` (what every target offers, and the write into a slot), `layouts` (how a pack's documents share a forward),
`loading` (only the layers that are needed), `huggingface` (the runner), `engine` (how it runs on a GPU, out of `frame`: borders
on the device, `kernels`: what mixes tokens, `elementwise`: what lies between, `fused`: layers made of both, with the mixers of
`attention` and `delta_net`; `float8`, `float8_elementwise`, `float8_layers`: the same with matrices of one byte a weight),
`isolation` (proof that documents do not see each other), `generate`, `answers`, `served` and `answer_file` (the target's own
answers, from here or a server), `ends` (frozen embedding and head), `fingerprint`, `parity` (what `slipstream check` proves),
`fake` (a target for tests).

Importing the package imports no torch, so that preflight can read a target's fingerprint.
"""
