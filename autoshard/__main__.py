"""Entry point of `python -m autoshard`, which is the `autoshard` command."""

from autoshard.cli import main


if __name__ == "__main__":
    raise SystemExit(main())
