"""Make a search: measure, predict, race, halve.  Finished work is kept, and the best so far is recorded.

Each stage has its own file: prediction.py, race.py, halving.py with runs.py, and choice.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from speechdp.errors import ConfigError, RunError
from speechdp.experiments.jobs import JobStopped, stops_between_jobs
from speechdp.experiments.race.record import FOLDER as RACES
from speechdp.experiments.tune.choice import choose_again, choose_soonest
from speechdp.experiments.tune.halving import Halving
from speechdp.experiments.tune.jobs import TunedJobs
from speechdp.experiments.tune.prediction import measure, predict
from speechdp.experiments.tune.race import TunedRace
from speechdp.experiments.tune.record import FILE_NAME, RUNS, TARGET, TuneRecord, check_same_search
from speechdp.experiments.tune.runs import TunedRuns
from speechdp.experiments.tune.search import SearchState, TuneRequest, earlier_settings


class Tuner:
    """Makes a search.

    Args:
        jobs: starts the jobs of the search.
        print_line: prints a line of progress.
    """

    def __init__(self, request: TuneRequest, jobs: TunedJobs, print_line: Callable[[str], None]) -> None:
        self._search = SearchState(request, jobs, print_line)
        self._runs = TunedRuns(self._search)

    def run(self) -> TuneRecord:
        """Search; return the record.

        Raises:
            JobStopped: a signal requested a stop; the same command continues, and the record has the best so
                far.
            ConfigError: the folder holds another search, or the budget is too small.
            RunError: no back-end works, no setting can be trained, or the disk is full.
        """
        search, request = self._search, self._search.request
        begun = check_same_search(request.out, request.settings, earlier_settings())
        if begun is not None:
            search.take_up(begun)
            if begun.completed:
                choose_again(search, self._runs, begun.settings.get(TARGET))
                return search.record
        elif any((request.out / folder).is_dir() for folder in (RUNS, RACES)):
            search.print_line(
                f"{request.out}: {FILE_NAME} is missing, so the budget starts from zero; the runs and the "
                "race there count as this search's, so give the options that they were started with "
                "(--overwrite starts without them)"
            )
        search.keep()
        try:
            with stops_between_jobs():
                search.jobs.begin()
                self._go_through_stages()
        except (JobStopped, ConfigError, RunError):
            with contextlib.suppress(RunError):  # of a full disk, which is already reported
                search.keep()
            raise
        search.keep(completed=True)
        return search.record

    def _go_through_stages(self) -> None:
        """Measure, predict, race and halve, as long as there are several settings left to choose from."""
        search = self._search
        measured = measure(search)
        backend = predict(search, measured)
        if len(search.racing) == 1 and not search.request.learning_rates:  # nothing has to be trained
            search.choose(search.record.left[0])
            return
        if search.backend_before and measured[backend].besides is None:  # no new measurements
            search.charge_from_now()
        TunedRace(search, measured[backend]).hold()
        if len(search.record.left) > 1:
            Halving(search, self._runs).hold()
            choose_soonest(search, self._runs)
