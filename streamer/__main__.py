"""``python -m streamer``, the command where its script is not on the path."""

import sys

from streamer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
