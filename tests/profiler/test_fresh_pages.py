"""What fresh memory costs: nothing for small tensors, less per byte in huge pages."""

from counterpoint.profiler.fresh_pages import FreshPages, probe_pages

KIB, MIB = 2**10, 2**20


def test_each_tensor_has_the_price_of_its_pages() -> None:
    pages = FreshPages(ordinary=0.5, huge=0.125)
    assert pages.ns([]) == pages.ns([255 * KIB] * 100) == 0
    assert pages.ns([256 * KIB, MIB]) == (256 * KIB + MIB) // 2
    assert pages.ns([MIB, 2 * MIB]) == MIB // 2 + 2 * MIB // 8


def test_the_system_is_asked() -> None:
    found = probe_pages()
    assert 0 < found.ordinary < 1000
    assert 0 <= found.huge < 1000
