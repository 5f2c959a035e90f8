"""`python -m gemloupe`."""

from gemloupe.cli import app

if __name__ == "__main__":
    app()
