"""A step that failed before its first update -> everything home again, as it was before the step."""

from counterpoint.runtime.compute import Compute
from counterpoint.runtime.store import Store


def bring_home(store: Store, compute: Compute) -> None:
    """Write the weights and states that are on the device to their homes; only when no lane is at work."""
    for buffer, region in store.regions.items():
        if buffer.kind in ("weight", "state"):
            store.disk.write(store.key(buffer), region).wait()
    discard(store, compute)


def discard(store: Store, compute: Compute) -> None:
    """Free the device; what is at home counts."""
    compute.graphs.clear()
    compute.forwarded.clear()
    compute.started.clear()
    compute.steps.clear()
    store.saved.clear()
    for regions in (store.regions, store.saved_regions):
        for region in regions.values():
            store.pool.free(region)
        regions.clear()
    for buffer in list(store.values):
        store.drop(buffer)
    store.forget_passing()
