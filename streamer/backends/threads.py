"""The threads of the caller, for those who have to tell them apart or keep them from one another."""

from __future__ import annotations

import threading

#: A lock that the thread which holds it may take again. So the garbage collector, too, may interrupt a block
#: that holds one and run code that takes it.
Lock = threading.RLock
Thread = threading.Thread
current_thread = threading.current_thread
