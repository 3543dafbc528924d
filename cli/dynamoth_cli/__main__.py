"""``python -m dynamoth_cli``."""

import sys

from dynamoth_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
