"""What libraries say when another process is gone is told from errors of this one."""

import pytest

from ridgeline.trainer.failures import CheckpointError, lost_peer

GONE = [
    (
        "INTERNAL: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.1.2]:31467",
        "127.0.1.2",
    ),
    ("UNAVAILABLE: Socket closed; RPC: /xla.coordination.CoordinationService/GetKeyValue", None),
    ("UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats): /job:jax_worker/replica:0/task:3", "process 3"),
    ("INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a network error", None),
]
OWN = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.",
    "OSError: [Errno 28] No space left on device",
    "INVALID_ARGUMENT: Executable expected shape f32[8] but got f32[4]",
    "KeyError: 'train/loss'",
]


@pytest.mark.parametrize(("text", "who"), GONE)
def test_a_lost_peer_is_recognized_and_named_where_the_message_names_it(text, who):
    why = lost_peer(RuntimeError(text), 4)
    assert why is not None
    assert text[:40] in why
    assert who is None or f"{who}" in why.split(":")[0]
    assert lost_peer(RuntimeError(text), 1) is None, "a single process has no peers"


@pytest.mark.parametrize("text", OWN)
def test_an_error_of_this_process_is_none_of_a_peer(text):
    assert lost_peer(RuntimeError(text), 4) is None


def test_a_save_that_failed_because_a_process_went_is_a_lost_peer():
    error = CheckpointError("the last save failed")
    error.__cause__ = RuntimeError(GONE[1][0])
    assert lost_peer(error, 2) is not None
    assert lost_peer(CheckpointError(f"2 saves in a row failed, the last with: {GONE[0][0]}"), 2) is not None
    assert lost_peer(CheckpointError(f"2 saves in a row failed, the last with: {OWN[1]}"), 2) is None
