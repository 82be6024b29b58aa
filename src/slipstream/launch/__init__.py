"""Where processes come from: preflight, the supervisor, the roles that children play, and validation during training.

Flows in: a recipe. Flows out: a run folder with a trained drafter. Waits for: its children, each held by its own handle.

`preflight` with `given` and `weight_headers` (what can be refused at once) → `local` (one host: `train_run`) with `lock` and
`resume` → `supervisor`, `processes` (children by handle) → `child`, `roles` (what they do) · `planning` (what all of them
derive from the run folder) · `answers`, `training` (validation, the drafter's side) · `runbook` (what a run says) ·
`regeneration`, `served_answers` (conversations that the target answers, before any run).
Importing this package imports nothing, so that preflight stays under two seconds.
"""
