"""Hosts that an attempt runs on, when some of the command's hosts are spare or do not come back.

The global batch stays as it was, so the same samples make the same steps. Fewer data-parallel ranks
take more micro batches each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from common.cluster.places import Placement
from common.errors import ConfigError
from common.launcher.control import Hosts
from common.parallel.run import Run

Resolve = Callable[[Sequence[str], int], Run]
"""Function that resolves the run with further overrides for a number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Hosts of one attempt.

    overrides: settings that keep the global batch; empty for the full number of ranks.
    """

    places: Placement
    overrides: tuple[str, ...]
    config: Run


class HostChoice:
    """Choice of the hosts of an attempt.

    fewest: fewest hosts to run on; None for the number of the first attempt. is_auto: whether every
    number of ranks has a micro batch of its own. Raises ConfigError if the run fits on no number of
    hosts.
    """

    def __init__(
        self, places: Placement, resolve: Resolve, fewest: int | None, *, is_auto: bool = False
    ) -> None:
        self._is_auto = is_auto
        self._places = places
        self._resolve = resolve
        count = len(places.hosts)
        if fewest is not None and fewest > count:
            raise ConfigError(
                f"runtime.min_nodes={fewest}, but the run has {count} host{'s'[: count != 1]};"
                " lower it, or start the run on more hosts"
            )
        self.nominal = self._find_nominal(fewest or count)
        self._fewest = fewest or len(self.nominal.places.hosts)
        self._known: dict[tuple[int, ...], Share | None] = {}

    def _find_nominal(self, fewest: int) -> Share:
        """Return the most hosts that the config fits, without a change."""
        first: ConfigError | None = None
        for count in range(len(self._places.hosts), fewest - 1, -1):
            places = self._places.only(self._places.hosts[:count])
            try:
                return Share(
                    places=places, overrides=(), config=self._resolve((), places.world_size)
                )
            except ConfigError as error:
                first = first or error
        assert first is not None
        raise first

    def choose(self, present: Sequence[int]) -> tuple[int, ...]:
        """Return the hosts to run on, of those that are present; empty if they are too few."""
        for count in range(len(present), self._fewest - 1, -1):
            if self.share(present[:count]) is not None:
                return tuple(present[:count])
        return ()

    def share(self, hosts: Sequence[int]) -> Share | None:
        """Return what runs on these hosts, given by their indexes; None if it does not fit."""
        key = tuple(hosts)
        if key not in self._known:
            self._known[key] = self._make(key)
        return self._known[key]

    def _make(self, hosts: tuple[int, ...]) -> Share | None:
        names = [self._places.hosts[index] for index in hosts]
        places = self._places.only(names)
        full = self.nominal.config
        if places.world_size > self.nominal.places.world_size:
            return None
        overrides: tuple[str, ...] = ()
        if places.world_size < self.nominal.places.world_size:
            overrides = (
                "parallel.data_parallel=null",
                "train.accumulation_steps=null",
                *(
                    ()
                    if self._is_auto
                    else (f"train.micro_batch_size={full.train.micro_batch_size}",)
                ),
                f"train.global_batch_size={full.train.global_batch_size}",
            )
        try:
            config = self._resolve(overrides, places.world_size)
        except ConfigError:
            return None
        return Share(places=places, overrides=overrides, config=config)

    def is_better(self, running: Collection[int], come: Collection[int]) -> bool:
        """Tell whether hosts that have come let the run have more ranks."""
        chosen = self.choose(sorted({*running, *come}))
        return self._ranks(chosen) > self._ranks(running)

    def _ranks(self, hosts: Collection[int]) -> int:
        names = [self._places.hosts[index] for index in hosts]
        return sum(len(self._places.of_host(name)) for name in names)


def hosts_of(full: Hosts, chosen: Sequence[int], places: Placement) -> Hosts:
    """Return the chosen hosts with their new ranks."""
    names = places.hosts
    return replace(
        full,
        all=tuple(
            replace(full.all[index], ranks=tuple(place.rank for place in places.of_host(names[at])))
            for at, index in enumerate(chosen)
        ),
        own=list(chosen).index(full.own),
    )
