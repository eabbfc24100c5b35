"""Adapters for frameworks that know torch's own backends by name, or wrap models in torch's class by name.

Inside: a module for each framework, which imports that framework. Not here: anything that the rest of the
package imports, so that it needs none of them.
"""

from __future__ import annotations
