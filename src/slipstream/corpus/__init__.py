"""Stage 1 of 6: conversations → token ids and loss masks, in a store on disk.

Waits for: nothing, it runs before a run. Unblocked by: nothing; the plan reads the finished store.

In flow order: `sources` (lines of a file, or rows of `tables`, → conversations; their shapes are in `forms`, the records in
`conversation`), `chat` (the target's own chat template → token ids and loss mask), `turns` (what of a conversation a target is
to answer), `joining` (several answered turns → one document), `prepare` (all of it, counted, into a store), `store` and
`meta` (what lies on disk), `inspect` (what is in there, for a person). Importing the package or `meta` loads neither
torch, transformers nor datasets.
"""
