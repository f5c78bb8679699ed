"""Model averaging overlapped with the next steps; the average is applied `delay` steps later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from speechdp.comm.background import JobThread
from speechdp.comm.base import Work
from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model, Pattern
from speechdp.parallel.period import Period, PeriodUnit
from speechdp.parallel.strategy import Progress
from speechdp.strategies.mechanisms.averaging import AveragingStrategy
from speechdp.strategies.mechanisms.number_formats import share_of_bytes
from speechdp.timing.timeline import Span

#: Fragments start at multiples of this, like the tensors in the flat vector.
_ALIGNMENT_BYTES = 64


@dataclass
class _Flight:
    """An average in flight, or received but not yet applied (`work` is None).

    Attributes:
        fragment: index of the fragment that is averaged.
        age: steps since its start.
    """

    fragment: int
    age: int
    work: Work | None


class _Aside:
    """Run one job at a time in a thread beside training.

    Args:
        device: device that the jobs compute on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: JobThread | None = None
        self._job: Callable[[], None]
        # On a GPU it has its own stream, too: on training's stream, its kernels and those of concurrent steps
        # would wait for each other.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def open(self, name: str) -> None:
        """Start the thread."""
        if self._thread is None:
            self._thread = JobThread(name, self._run)

    def close(self) -> None:
        """Stop the thread; no job is running."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def start(self, job: Callable[[], None]) -> Work:
        """Run `job` in the thread, after everything queued so far on the caller's stream."""
        assert self._thread is not None, "between `pause` and `resume` nothing is exchanged"
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._job = job
        self._thread.start()
        return _AsideWork(self)

    def wait(self) -> None:
        """Wait for the job; what it writes is ordered before later work on the caller's stream."""
        assert self._thread is not None, "a job is under way"
        self._thread.wait()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):
            self._job()


class _AsideWork(Work):
    def __init__(self, aside: _Aside) -> None:
        self._aside = aside

    def wait(self) -> None:
        self._aside.wait()


@dataclass(eq=False)
class DelayedAveraging(AveragingStrategy):
    """Average parameters over all ranks once per period during training; apply the mean `delay` steps later.

    Update rule: at the end of a window s_i <- w_i; `delay` steps w_i <- w_i - lr * g_i(w_i) as usual; then
    w_i <- w_i + mix * ((sum_j n_j s_j) / (sum_j n_j) - s_i), n_j the frames of rank j since the end of the
    previous window.  delay = 0 and mix = 1 are model averaging.  period = delay = 1 is delay-by-one,
    w_i(k+1) = mean_j w_j(k) - lr * g_i(w_i(k)).  With `fragments`, the flat vector is cut into that many
    pieces; each is averaged once per period, one after the other, period / fragments steps apart, and n_j
    counts from the piece's own last average.

    Exchange: a copy of the parameters (or of a fragment) at the window's end with its weight appended, in one
    allreduce overlapped with the following steps; 2 (N-1)/N times the parameters' bytes sent by each rank per
    period.  With compression= quantised differences to the piece's last average (`QuantisedMean`).

    Guarantee: the average is applied after `delay` steps, not whenever it arrives, so runs repeat and resume
    bitwise; replicas differ until `finish`, which sets all to their mean, bitwise equal.

    Source: delay-by-one of Cui et al. 2021 (arXiv 2110.11199; its formula recalled); fragments, delay and
    mix of Streaming DiLoCo (Douillard et al. 2025, read in torchft's code) without its outer optimizer.
    Deviations: weights by frames; a fragment is a contiguous piece of the vector, not a set of layers; the
    delay may be as long as the time to the next exchange, which starts after the correction.  Each rank keeps
    its own optimizer state.
    """

    #: Steps from the start of an exchange until its result is applied.
    delay: int = 1
    #: Number of pieces of the parameters that are averaged one after the other within a period.
    fragments: int = 1
    #: Fraction of the way from a rank's own parameters at the window's end to their mean; 1: all the way.
    mix: float = 1.0

    def predicted_exchange(self, model: Model) -> Exchange | None:
        period = max(1, model.steps_in(self.period) // self.fragments)
        nbytes = model.nbytes / self.fragments * share_of_bytes(self.compression)
        if self.delay == 0:
            return Exchange(Pattern.TOGETHER, period, nbytes)
        return Exchange(Pattern.DELAYED, period, nbytes, delay=min(self.delay, period))

    def check_options(self) -> None:
        super().check_options()
        if self.delay < 0:
            raise ConfigError(f"delayed_averaging:delay={self.delay}: at least 0 steps")
        if not 0 < self.mix <= 1:
            raise ConfigError(f"delayed_averaging:mix={self.mix}: more than 0 and at most 1")
        if self.fragments < 1:
            raise ConfigError(f"delayed_averaging:fragments={self.fragments}: at least 1")
        in_steps = self.period.unit is PeriodUnit.STEPS
        if self.fragments > 1 and (not in_steps or self.period.value % self.fragments != 0):
            raise ConfigError(
                f"delayed_averaging:fragments={self.fragments},period={self.period}: fragments need a period "
                "in steps that is a multiple of their number"
            )
        if in_steps and self.delay > self.current_period.value:
            raise ConfigError(
                f"delayed_averaging:delay={self.delay}: longer than the {self.current_period} steps from one "
                "exchange to the next (period / fragments); shorten it or lengthen the period"
            )

    @property
    def current_period(self) -> Period:
        """The time between exchanges: the period divided by the number of fragments."""
        return self.period if self.fragments == 1 else Period(self.period.value / self.fragments)

    def set_up(self) -> None:
        super().set_up()
        values = self.replica.parameters.values
        longest = max(piece.stop - piece.start for piece in self.pieces())
        # Only one exchange is in flight at a time, so these two serve all fragments.
        self._snapshot = values.new_empty(longest if self.comm.size > 1 else 0)
        self._travelling = values.new_empty(longest + 1 if self.comm.size > 1 else 0)
        self._next_fragment = 0
        #: Frames of this rank from each fragment's last average to the start of the window.
        self._earlier_frames = [0] * self.fragments
        self._flight: _Flight | None = None
        #: Computes compressed averages during training.
        self._aside = _Aside(values.device)

    def pieces(self) -> list[slice]:
        """Return the fragments."""
        values = self.replica.parameters.values
        align = _ALIGNMENT_BYTES // values.element_size()
        cuts = [values.numel() * f // self.fragments // align * align for f in range(self.fragments)]
        return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], values.numel()], strict=True)]

    def resume(self) -> None:
        super().resume()
        if self.means:
            self._aside.open(f"averages of rank {self.comm.rank}")

    def update(self, progress: Progress) -> None:
        super().update(progress)
        if self._flight is not None:
            self._flight.age += 1
            if self._flight.age >= self.delay:
                self._land()

    def exchange(self) -> None:
        if self.comm.size == 1:
            return
        # It is in flight before its time only if a window in frames or seconds was shorter than the delay.
        self._land()
        with self.timeline.span(Span.COMM):
            self._start()
        for fragment in range(self.fragments):
            self._earlier_frames[fragment] += self._window_frames
        self._earlier_frames[self._next_fragment] = 0
        self._next_fragment = (self._next_fragment + 1) % self.fragments
        if self.delay == 0:
            self._land()

    def weight(self) -> float:
        """Return this rank's weight: its frames since the last average of the next fragment."""
        return self._earlier_frames[self._next_fragment] + super().weight()

    def _start(self) -> None:
        fragment = self._next_fragment
        place = self.pieces()[fragment]
        piece = self.replica.parameters.values[place]
        travelling = self._travelling[: len(piece) + 1]
        snapshot = self._snapshot[: len(piece)].copy_(piece)
        weight = self.weight()
        work: Work
        if self.means:
            mean, reference = self.means[fragment], self.reference[place]
            travelling[-1] = 1.0  # the result is the mean itself
            work = self._aside.start(lambda: mean.average(snapshot, reference, weight, out=travelling[:-1]))
        else:
            torch.mul(piece, weight, out=travelling[:-1])
            travelling[-1] = weight
            work = self.comm.allreduce_async(travelling, name=f"fragment.{fragment}")
        self._flight = _Flight(fragment, 0, work)

    def _land(self) -> None:
        """Apply the result of the exchange in flight, if there is one."""
        if self._flight is None:
            return
        with self.timeline.span(Span.COMM):
            self._wait(self._flight)
        with self.timeline.span(Span.UPDATE):
            self._correct(self._flight)
            if self.means:
                place = self.pieces()[self._flight.fragment]
                self.reference[place].copy_(self._travelling[: place.stop - place.start])
        self._flight = None

    def _wait(self, flight: _Flight) -> None:
        if flight.work is not None:
            flight.work.wait()
            flight.work = None

    def _correct(self, flight: _Flight) -> None:
        piece = self.replica.parameters.values[self.pieces()[flight.fragment]]
        total = self._travelling[: len(piece) + 1]
        piece.sub_(self._snapshot[: len(piece)], alpha=self.mix)
        piece.addcdiv_(total[:-1], total[-1:], value=self.mix)

    def pause(self) -> None:
        # The result is still applied at its step; only the wait for it is no longer hidden.
        if self._flight is not None:
            self._wait(self._flight)
        self._aside.close()
        super().pause()

    def finish(self) -> None:
        self._land()
        if self._together is None:  # while gradients are averaged, replicas are equal
            self.average_parameters()
        self.forget_window()
        self.comm.broadcast(self.replica.parameters.whole, name="parameters")

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        """Show the mean of the replicas, each corrected by the average in flight, as `finish` would."""
        flight = self._flight
        if flight is None:
            with super().evaluation_parameters():
                yield
            return
        self._wait(flight)
        with self.replica.restored():
            self._correct(flight)
            with super().evaluation_parameters():
                yield

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {
            "next_fragment": self._next_fragment,
            "earlier_frames": list(self._earlier_frames),
            "flight": None,
        }
        if self._flight is not None:
            self._wait(self._flight)
            state["flight"] = [self._flight.fragment, self._flight.age]
            state |= {"snapshot": self._snapshot, "sum": self._travelling}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._next_fragment = state["next_fragment"]
        self._earlier_frames = list(state["earlier_frames"])
        self._flight = None
        if state["flight"] is not None:
            fragment, age = state["flight"]
            # New tensors: a single rank has none, yet may resume from a state in which several had an average
            # in flight.
            device = self.replica.parameters.values.device
            self._snapshot = state["snapshot"].to(device, copy=True)
            self._travelling = state["sum"].to(device, copy=True)
            self._flight = _Flight(fragment, age, None)

    def begin_as_copy(self) -> None:
        super().begin_as_copy()
        self._earlier_frames = [0] * self.fragments
