"""`python -m hla` is the command line."""

import sys

from hla.cli import main

if __name__ == "__main__":
    sys.exit(main())
