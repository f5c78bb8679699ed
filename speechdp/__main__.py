"""`python -m speechdp`: the same as the console script `speechdp`."""

from speechdp.cli.main import main

if __name__ == "__main__":
    main()
