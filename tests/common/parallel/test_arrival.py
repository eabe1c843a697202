"""A rank that waits for the others: what it says, when it gives up, and what it refuses at once."""

from contextlib import ExitStack

import pytest

from common.cluster.environment import Process
from common.errors import ConfigError, RunError
from common.log import LOG
from common.parallel import arrival as module
from common.parallel.arrival import Arrival
from common.processes.addresses import free_port, listen


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes are tenths of a second."""
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def arrival(rank: int, address: str, port: int, limit: float = 30.0) -> Arrival:
    return Arrival(Process(rank=rank, world_size=2), "MASTER_ADDR", address, port, limit)


def test_it_says_where_it_waits_and_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, until something answers there."""
    port, said = free_port(), []
    with ExitStack() as listeners:

        def come_late(text: str) -> None:
            said.append(text)
            if len(said) == 3:
                listeners.enter_context(listen("127.0.0.1", port))

        monkeypatch.setattr(LOG, "warning", come_late)
        arrival(1, "127.0.0.1", port).reach("rank 0")
    assert (
        said[:3]
        == [
            f"rank 1 of 2 waits at 127.0.0.1:{port} for rank 0, which does not answer (Connection"
            " refused); 0 s"
        ]
        * 3
    )


def test_it_gives_up_after_the_limit() -> None:
    port = free_port()
    said = rf"rank 1 of 2 has waited 0.2 s \(runtime.stall_limit\) at 127.0.0.1:{port} for rank"
    with pytest.raises(RunError, match=said):
        arrival(1, "127.0.0.1", port, limit=0.2).reach("rank 0")


@pytest.mark.parametrize("address", ["no-such-host.invalid", "10.0.0.1:29500", "a..b"])
def test_a_name_that_does_not_resolve_is_refused_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        waits = arrival(rank, address, 29500)
        with pytest.raises(ConfigError, match=f"MASTER_ADDR={address} is not an address"):
            waits.reach("rank 0") if rank else waits.require_here()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")  # its name comes with the pod
    with pytest.raises(RunError, match="rank 0, which does not answer"):
        arrival(1, address, 29500, limit=0.2).reach("rank 0")


def test_rank_0_refuses_the_address_of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    arrival(0, "localhost", 1).require_here()
    # an address that is not this host's
    monkeypatch.setattr(module, "is_here", lambda address: False)
    with listen("127.0.0.1", 0) as listener:  # the forwarded port of a container
        port = listener.getsockname()[1]
        arrival(0, "127.0.0.1", port).require_here()
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=127.0.0.1 is not an address of this"):
        arrival(0, "127.0.0.1", port).require_here()
