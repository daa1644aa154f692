"""What the server imports once, of which all ranks are forked."""

import torch._dynamo  # noqa: F401 - optimizers import it, in more than a second

import streamer
import streamer.app.train

streamer.AdamW, streamer.wrap, streamer.save, streamer.load, streamer.unwrap  # noqa: B018 - imported when asked for
