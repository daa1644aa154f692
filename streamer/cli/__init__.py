"""The command `streamer`."""
