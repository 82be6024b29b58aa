"""Slipstream trains DFlash drafters on the hidden states of a frozen target, captured, packed and moved to the drafter."""

__version__ = "0.1.0"
