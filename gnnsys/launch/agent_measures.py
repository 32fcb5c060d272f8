"""What an agent measures of its host for `gnnsys plan --measure`: called by name, answered as JSON.

torch and the rooms that do the work are imported when something is asked for: an agent that starts jobs has no use for
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnnsys.observe import usable_core_time

if TYPE_CHECKING:
    from gnnsys.launch.message_rates import RateServer


class AgentMeasures:
    """`close` ends what listens."""

    def __init__(self) -> None:
        self._server: RateServer | None = None

    def core_work(self, seconds: float) -> dict[str, Any]:
        """Core-seconds by kind of work, and core-seconds of a second that a process here gets."""
        from gnnsys.launch.core_work import core_work

        return {"work": core_work(seconds), "cores": usable_core_time()}

    def listen(self, key: dict[str, Any]) -> int:
        """The port at which others pull; nobody without the key."""
        from gnnsys.comm import Keys
        from gnnsys.launch.message_rates import RateServer

        self.close()
        self._server = RateServer(Keys.from_json(key))
        return self._server.port

    def pull(self, peers: dict[str, str], key: dict[str, Any], seconds: float, patience: float) -> dict[str, Any]:
        """Bytes per second from each host, all at once, slice by slice."""
        from gnnsys.comm import Keys
        from gnnsys.launch.message_rates import pull_rates

        return pull_rates(peers, Keys.from_json(key), seconds, patience=patience)

    def costs(self, budget: float, gpus: int) -> dict[str, Any]:
        """Has the machine's cost profile in its cache, where it is not there yet; how far it is off, by itself."""
        import torch

        from gnnsys.ops import HAS_CUDA_KERNELS
        from gnnsys.planning import machine_profile

        device = torch.device("cuda") if gpus and HAS_CUDA_KERNELS else None
        made = machine_profile(device, budget_seconds=budget)
        return {"error": made.error, "seconds": made.seconds_taken}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
