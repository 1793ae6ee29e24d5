"""Entry point of ``python -m onelaunch``, which runs the command line without the console script."""

from onelaunch.cli.main import app

if __name__ == "__main__":
    app()
