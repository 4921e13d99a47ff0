"""`python -m hiddentap` is the command `hiddentap`."""

from .capture.cli import main

if __name__ == "__main__":
    main()
