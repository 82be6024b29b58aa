"""After stage 6 of 6: trained weights → a folder that SGLang, vLLM and the `dflash` package load.

Waits for: a checkpoint. Unblocked by: nobody. A folder gets its name only after independent code has read it back and
computed the same logits.
"""
