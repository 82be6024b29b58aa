"""The whole story on a laptop: a small real target, real prompts, prepare → plan → train → evaluate → export → reload.

Waits for: every stage. Unblocked by: nothing; it is the end of the flow.
"""
