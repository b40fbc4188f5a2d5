"""Several runs side by side: one HTML page and one picture, from their files alone.

    python -m quickstart compare RUN RUN ... [--out FOLDER]

Shares nothing with a trainer but files, so it also reads runs that died or were copied from elsewhere. Rooms: `reading`
(a run's files), `page` (HTML), `chart` (curves as SVG), `picture` (PNG), `command` (the command line).
"""

from quickstart.compare.command import main

__all__ = ["main"]
