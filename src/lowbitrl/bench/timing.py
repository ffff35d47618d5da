"""Time of one call on a device, without the host's share.

On CUDA the calls are captured into one graph and the graph is replayed between two events: launch gaps
shrink to what a captured decode step pays. A sample is one replay's time over its calls. On CPU a sample is
one call by the wall clock.

L2 is either "warm" (the same buffers in every call: a tensor the op before has just written) or "cold"
(enough sets of buffers in turn that each is gone from the cache when its turn comes: weights in decoding).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

L2 = Literal["cold", "warm"]
Call = Callable[[], Any]

# A replay this long makes the events' own granularity (half a microsecond) vanish.
_REPLAY_MICROSECONDS = 400.0
_MAX_CALLS = 400
# A cold buffer must have been pushed out by this many times the cache.
_COLD_CACHES = 3


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: 20th, 50th and 80th percentile over ``samples``."""

    p20: float
    p50: float
    p80: float
    samples: int
    l2: L2


def time_calls(
    calls: Sequence[Call], *, l2: L2, samples: int = 30, span: float = _REPLAY_MICROSECONDS
) -> Timing:
    """Time one call of a rotation.

    Args:
        calls: the same op on as many sets of buffers; one for "warm". Must be graph-safe on CUDA.
        l2: what to record; "cold" is only true of as many sets as ``cold_sets`` says.
        span: microseconds that a replay shall last; less is quicker and coarser.
    """
    assert calls
    on_cuda = torch.cuda.is_available()
    times = _graph_samples(calls, samples, span) if on_cuda else _wall_samples(calls, samples)
    return percentiles(times, l2)


def time_whole(call: Call, *, samples: int, warm_ups: int = 1) -> Timing:
    """Wall-clock time of work that the host takes part in, the device's share included: whole steps, updates."""
    for _ in range(warm_ups):
        call()
    return percentiles([wall_microseconds(call) for _ in range(samples)], "warm")


def wall_microseconds(call: Call) -> float:
    """Microseconds until the call's device work is done; what was asked of the device before is not counted."""
    _finish()
    start = time.perf_counter()
    call()
    _finish()
    return (time.perf_counter() - start) * 1e6


def percentiles(times: Sequence[float], l2: L2) -> Timing:
    """Timing of samples in microseconds."""
    ranks = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, middle, high = torch.tensor(times, dtype=torch.float64).quantile(ranks)
    return Timing(float(low), float(middle), float(high), len(times), l2)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cold_sets(bytes_a_call: int) -> int:
    """How many sets of buffers of this size keep each other out of L2; 1 without CUDA."""
    if not torch.cuda.is_available():
        return 1
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, min(_MAX_CALLS, -(-_COLD_CACHES * cache // max(1, bytes_a_call)) + 1))


def _wall_samples(calls: Sequence[Call], samples: int) -> list[float]:
    calls[0]()
    times = []
    for i in range(samples):
        start = time.perf_counter()
        calls[i % len(calls)]()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _graph_samples(calls: Sequence[Call], samples: int, span: float) -> list[float]:
    repeats = _repeats(calls, span)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    return [t / (repeats * len(calls)) for t in _event_times(graph.replay, samples)]


def _repeats(calls: Sequence[Call], span: float) -> int:
    """How many rotations make a replay long enough to time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # Warm-up on a side stream, as capture asks: kernels compile and libraries make their handles here.
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    rotation = min(_event_times(lambda: [call() for call in calls], 3))
    wanted = max(1, round(span / max(rotation, 1.0)))
    return max(1, min(wanted, _MAX_CALLS // len(calls)))


def _event_times(call: Call, samples: int) -> list[float]:
    """Microseconds between events around each call."""
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)
    ]
    for start, stop in marks:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e3 for start, stop in marks]
