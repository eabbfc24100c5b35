"""vLLM on CPUs with its tensor and pipeline parallel groups over this package.

Inside: the platform that vLLM's plugin interface asks for, and the communicator that the platform names. They
are two modules because vLLM must know its platform before it can load what communicators derive from. Not
here: the entry points, which stand in ``collectives_registration``, so that nothing is loaded in vain.
"""

from __future__ import annotations
