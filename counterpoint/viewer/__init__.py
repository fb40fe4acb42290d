"""Timeline -> pictures and text: SVG, an HTML page, a Perfetto trace, a summary."""

from counterpoint.viewer.html import page
from counterpoint.viewer.svg import draw
from counterpoint.viewer.table import summarize
from counterpoint.viewer.trace import trace

__all__ = ["draw", "page", "summarize", "trace"]
