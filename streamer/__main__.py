"""``python -m streamer``: the command without its script on the path."""

import sys

from streamer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
