"""`python -m bertsmith` is the `bertsmith` command."""

import sys

from bertsmith.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
