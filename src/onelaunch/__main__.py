"""Entry point of ``python -m onelaunch``, for environments in which the console script is not on the path."""

from onelaunch.cli.main import app

if __name__ == "__main__":
    app()
