"""`python -m speechdp` and the console script: from here on signals find somebody who heeds them."""

from speechdp.process.ending import hold_warnings, interrupts_end


def main() -> None:
    """Run the subcommand in sys.argv and exit with its code."""
    hold_warnings()
    interrupts_end()
    from speechdp.cli.main import main as run  # noqa: PLC0415 - takes long where disks are slow

    run()


if __name__ == "__main__":
    main()
