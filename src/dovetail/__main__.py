"""`python -m dovetail`: the command line."""

import sys

from dovetail.cli.entry_point import main

if __name__ == "__main__":
    sys.exit(main())
