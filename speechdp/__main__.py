"""`python -m speechdp` and the console script: signals are handled from here on."""

import os

from speechdp.process.ending import hold_warnings, interrupts_end


def main() -> None:
    """Run the subcommand in sys.argv and exit with its code."""
    hold_warnings()
    interrupts_end()
    _heed_mpirun()
    from speechdp.cli.main import main as run  # noqa: PLC0415 - takes long where disks are slow

    run()


def _heed_mpirun() -> None:
    """Let rank 0 say that mpirun ends its ranks, unless `speechdp launch` supervises mpirun and says so."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return  # before anything more is imported
    from speechdp.comm.startup.mpirun_end import handle_mpirun_end  # noqa: PLC0415
    from speechdp.launching.variables import LAUNCH  # noqa: PLC0415

    if LAUNCH not in os.environ:
        handle_mpirun_end()


if __name__ == "__main__":
    main()
