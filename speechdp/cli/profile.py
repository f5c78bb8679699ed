"""`speechdp profile`: time every function of a training step on several numbers of ranks."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from speechdp.cli.support.out_folder import OutFolder, inputs_of, owned_folder
from speechdp.cli.support.script_options import StartsJobs
from speechdp.cli.support.several_runs import check_new, check_precision, report_failures, until_stopped
from speechdp.options.run import TrainOptions
from speechdp.options.shown import BATCH_JOB_OR_HERE, heading, shown

if TYPE_CHECKING:
    from speechdp.experiments.profile.jobs import ProfileRequest
    from speechdp.experiments.profile.plan import ProfilePlan
    from speechdp.experiments.profile.record import Settings
    from speechdp.train.session import Session


@dataclass(frozen=True)
class ProfileCommand(StartsJobs):
    """Time every function of a training step on several numbers of ranks.

    It starts the ranks itself: speechdp profile DATA OUT --ranks 1,2,4"""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[OUT]")] = Path("profile")
    """Folder for the recorded times and the report.  Finished jobs in it are kept."""
    options: Annotated[TrainOptions, heading("training")] = field(default_factory=TrainOptions)
    ranks: Annotated[str, shown("N,...")] = "1,2"
    """Numbers of ranks to time."""
    only: Annotated[str, shown("KIND,...", "all that apply")] = ""
    """Run only jobs of these kinds.
    weak, strong: the whole step with a constant batch per rank, or over all ranks.
    encoder, decoder, postproc, output: one part of the model.
    blocking, pooled, fed: ways of loading data."""
    strong: bool = False
    """Also time strong scaling (constant total batch), not only weak scaling (constant batch per rank)."""
    steps: Annotated[int, shown("STEPS")] = 20
    """Training steps to time on each rank."""
    warmup: Annotated[int, shown("STEPS")] = 3
    """Number of initial steps that are recorded but not included in the means."""
    loader_steps: Annotated[int | None, shown("STEPS", "64 + --warmup, at least --steps")] = None
    """Steps in the jobs blocking, pooled and fed, which compare ways of loading data."""
    poster_iterations: bool = False
    """Take N times as many steps on N ranks, as the poster in docs/profile.md did."""
    hostfile: Annotated[Path | None, shown("FILE", BATCH_JOB_OR_HERE)] = None
    """File with a line `host slots=N` for each host."""
    launch_args: Annotated[str, shown("'OPTIONS'", "none")] = ""
    """More options for `speechdp launch`, quoted as one argument: "--launcher horovodrun"."""
    threads: Annotated[int | None, shown("N", "cores / largest number of ranks, at least 1")] = None
    """CPU threads of each rank, the same in all jobs."""
    overwrite: bool = False
    """Delete the profile in OUT and start over."""
    job: tyro.conf.Suppress[str] = ""
    """Job that this process is a rank of; given by `profile` to the ranks it starts."""

    def run(self) -> int:
        """Run all jobs and write the page, or be a rank of one job; return the exit code."""
        return self._be_a_rank() if self.job else self._run_all()

    def _be_a_rank(self) -> int:
        from speechdp.cli.support.distributed import SessionRequest, train_over_ranks  # noqa: PLC0415 - fast --help

        others = {"OUT folder": self.out_dir, "--job": self.job, "--steps": self.steps}
        return train_over_ranks(SessionRequest(self.data, self.options, self.job, others), self._on_rank)

    def _on_rank(self, session: Session) -> int:
        from speechdp.experiments.profile.ranks import JobRequest, profile_rank  # noqa: PLC0415
        from speechdp.experiments.profile.record import MODULES  # noqa: PLC0415

        kind = self.job.rpartition("-")[0]
        request = JobRequest(
            folder=self.out_dir / self.job,
            module=kind if kind in MODULES else "",
            steps=self.steps,
            sample_hz=self.options.loading.sample_hz,
        )
        profile_rank(session, self.options, request)
        return 0

    def _run_all(self) -> int:
        from speechdp.cli.report import print_report  # noqa: PLC0415
        from speechdp.cli.support.console import line_printer  # noqa: PLC0415
        from speechdp.experiments.jobs import LOGS  # noqa: PLC0415
        from speechdp.experiments.profile.jobs import Profiler  # noqa: PLC0415
        from speechdp.experiments.profile.record import STRONG, threads_before  # noqa: PLC0415
        from speechdp.experiments.record import FAILED  # noqa: PLC0415
        from speechdp.ownership.overwrite import PROFILE  # noqa: PLC0415

        check_new(self.options, self.out_dir, PROFILE)
        plan = self._plan()
        before = None if self.overwrite else threads_before(self.out_dir)
        starter = self.starter("profile", max(plan.ranks), before, self.options.loading.feeders)
        assert starter.threads is not None  # a starter of commands always has it
        request = self._request(plan, starter.threads)
        check_precision(self.data, self.options, on_this_machine=starter.starts_here)
        print_line = line_printer()
        profiler = Profiler(request, starter, print_line)
        out = OutFolder(self.out_dir, self.overwrite, inputs_of(self.data, self.options))
        with owned_folder(out, "profile", print_line, PROFILE):
            print_line(f"profile in {self.out_dir.absolute()}")
            for note in request.settings.notes:
                print_line(f"note: {note}")
            if [job.entry.ranks for job in request.jobs if job.entry.kind == STRONG] == [1]:
                print_line("note: strong on 1 rank alone: there is nothing to scale; give --ranks 1,2")

            def work() -> int:
                record = profiler.run()
                failed = [job for job in record.jobs if job.state == FAILED]
                if len(failed) < len(record.jobs):
                    print_report(self.out_dir, None)
                report_failures(len(failed), len(record.jobs), self.out_dir / LOGS, "jobs")
                return 1 if failed else 0

            return until_stopped(self.out_dir, print_line, work)

    def _plan(self) -> ProfilePlan:
        from speechdp.experiments.compare.plan import whole_numbers  # noqa: PLC0415
        from speechdp.experiments.profile.plan import ProfilePlan  # noqa: PLC0415

        return ProfilePlan(
            ranks=tuple(sorted(whole_numbers("ranks", self.ranks, least=1))),
            only=tuple(word.strip() for word in self.only.split(",") if word.strip()),
            strong=self.strong,
            steps=self.steps,
            warmup=self.warmup,
            loader_steps=self.loader_steps,
            poster_iterations=self.poster_iterations,
        )

    def _request(self, plan: ProfilePlan, threads: int) -> ProfileRequest:
        from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
        from speechdp.experiments.profile.jobs import ProfileRequest  # noqa: PLC0415
        from speechdp.train.models import check_task  # noqa: PLC0415

        dataset = Dataset.open(self.data)
        check_task(dataset, self.options)
        for split in (self.options.train_split, self.options.held_out):
            dataset.shard_paths(split)
        jobs = plan.jobs(self.options)
        return ProfileRequest(self.data, self.out_dir, jobs, self._settings(plan, dataset.checksum, threads))

    def _settings(self, plan: ProfilePlan, checksum: str, threads: int) -> Settings:
        from speechdp.experiments.profile.notes import notes_on  # noqa: PLC0415
        from speechdp.experiments.profile.plan import batch_of_rank  # noqa: PLC0415
        from speechdp.experiments.profile.record import Settings  # noqa: PLC0415
        from speechdp.launching.cores import available_cores  # noqa: PLC0415

        options = self.options
        sizes = options.make_task().model_facts()
        return Settings(
            task=options.task_class.name,
            preset=options.preset_name,
            decoder=sizes.get("decoder", ""),
            batch_size=batch_of_rank(options),
            reduction=sizes.get("reduction", 0),
            steps=plan.steps,
            warmup_steps=plan.warmup,
            device="CPU",
            machine=f"{platform.system()} {platform.machine()}",
            cores=available_cores(),
            command=("speechdp", *sys.argv[1:]),
            threads=threads,
            notes=tuple(notes_on(plan, options, on_this_machine=self.hosts.are_counted_here)),
            options={**options.to_json(), "data": checksum},
        )
