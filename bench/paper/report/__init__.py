"""The report: what the paper says of its evaluation, beside what kept samples show.

Inside: the statements, a module of judges for each subject, the advice that follows, the page in Markdown.
Not here: how samples are measured and kept (:mod:`collectives.bench.paper`).
"""

from __future__ import annotations
