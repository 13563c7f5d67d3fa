"""The version of this package: upstream's whose interface it has, and its own as the local part.

Libraries choose by upstream's how they call this package.
"""

__version__ = "0.33.0+0.1.0"
INTERFACE, _, OWN_VERSION = __version__.partition("+")
__version_tuple__ = (*map(int, INTERFACE.split(".")), OWN_VERSION)
