"""Measurements on random weights at true shapes: nothing is downloaded, and the machine's own ceilings come first."""

from slipstream.launch.bench.ceilings import Ceilings, measure_ceilings
from slipstream.launch.bench.drafter import DrafterBench, bench_drafter, sweep_chunks
from slipstream.launch.bench.drafter_work import DrafterWork
from slipstream.launch.bench.shapes import SHAPES

__all__ = ["SHAPES", "Ceilings", "DrafterBench", "DrafterWork", "bench_drafter", "measure_ceilings", "sweep_chunks"]
