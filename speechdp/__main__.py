"""`python -m speechdp` and the console script: from here on a batch system's warning is heeded."""

from speechdp.process.ending import hold_warnings


def main() -> None:
    """Run the subcommand in sys.argv and exit with its code."""
    hold_warnings()
    from speechdp.cli.main import main as run  # noqa: PLC0415 - takes long where disks are slow

    run()


if __name__ == "__main__":
    main()
