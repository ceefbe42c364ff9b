"""`python -m autoshard` is the `autoshard` command."""

from autoshard.cli import main


if __name__ == "__main__":
    raise SystemExit(main())
