"""What the server imports once, of which all ranks are forked."""

import streamer

streamer.AdamW, streamer.wrap, streamer.save, streamer.load, streamer.unwrap  # noqa: B018 - imported when asked for
