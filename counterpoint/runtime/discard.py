"""A device between steps -> an empty one: what is at home counts."""

from counterpoint.runtime.compute import Compute
from counterpoint.runtime.store import Store


def discard(store: Store, compute: Compute) -> None:
    """Free the device, only when no lane is at work."""
    compute.graphs.clear()
    compute.forwarded.clear()
    compute.started.clear()
    compute.steps.clear()
    store.saved.clear()
    for regions in (store.regions, store.saved_regions):
        for region in regions.values():
            store.pool.free(region)  # type: ignore[arg-type]
        regions.clear()
    for buffer in list(store.values):
        store.drop(buffer)
    store.forget_passing()
