"""`speechdp posteriors`: write a model's scores of a split for Kaldi's decoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp.counting import counted
from speechdp.options.shown import shown

if TYPE_CHECKING:
    from speechdp.comm.base import Communicator


@dataclass(frozen=True)
class PosteriorsCommand:
    """Write a model's scores of a split as a Kaldi archive, for Kaldi's decoders.

    For example: speechdp posteriors RUN DATA --split dev -o OUT.ark --scp OUT.scp"""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run directory written by `speechdp train`."""
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")]
    """Archive to write: a matrix (frames x pdfs) for each utterance, sorted by utterance id."""
    split: Annotated[str, shown("SPLIT")] = "test"
    """Split to score."""
    scp: Annotated[Path | None, shown("FILE", "none")] = None
    """Also write an index (scp file) of the archive."""
    kind: Literal["log_likelihood", "log_posterior"] = "log_likelihood"
    """log_likelihood: log-posteriors minus log-priors, as latgen-faster-mapped expects.
    log_posterior: the model's output as it is."""
    prior_scale: Annotated[float, shown("SCALE")] = 1.0
    """Scale of the log-priors that are subtracted for log_likelihood, 0 to 1."""
    task: Annotated[str | None, shown("NAME|MODULE:CLASS", "none")] = None
    """Task that the model was trained as, if its network is your own (docs/api.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: on a GPU if there is one, else on the CPU."""
    overwrite: bool = False
    """Replace existing files."""

    def run(self) -> int:
        """Write the archive and print a summary."""
        from speechdp.cli.support.ranks import over_ranks  # noqa: PLC0415 - keeps --help fast

        return over_ranks("auto", self.device, self._on_rank)

    def _on_rank(self, comm: Communicator) -> int:
        from rich.console import Console  # noqa: PLC0415

        from speechdp.cli.support.outputs import output_file  # noqa: PLC0415
        from speechdp.cli.support.progress import progress_bar  # noqa: PLC0415
        from speechdp.comm.device import choose_device  # noqa: PLC0415
        from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
        from speechdp.decode.posteriors import PosteriorOptions, write_posteriors  # noqa: PLC0415
        from speechdp.errors import ConfigError  # noqa: PLC0415
        from speechdp.tasks.model_file import load_model  # noqa: PLC0415
        from speechdp.tasks.registry import networks_of  # noqa: PLC0415

        if comm.size > 1:
            raise ConfigError(f"posteriors writes one archive and runs on one rank, not {comm.size}")
        out = output_file(self.out, overwrite=self.overwrite)
        scp = None if self.scp is None else output_file(self.scp, overwrite=self.overwrite)
        options = PosteriorOptions(self.split, out, scp, self.kind, self.prior_scale)
        dataset = Dataset.open(self.data)
        device = choose_device(self.device, comm.local_rank)
        trained = load_model(self.run_dir, device, own=networks_of(self.task))
        with progress_bar(Console(stderr=True)) as progress:
            result = write_posteriors(
                trained, dataset, options, lambda done, total: progress("scoring", done, total)
            )
        print(
            f"{self.out}: {counted(result.num_utterances, 'utterance')}, "
            f"{counted(result.num_frames, 'frame')}, {result.num_classes} classes, {self.kind}"
        )
        return 0
