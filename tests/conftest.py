"""Eight virtual CPU devices for every test: set before anything imports jax."""

import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# A suite started in the background of a script inherits an ignored Ctrl-C and would hand it on to the commands it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
