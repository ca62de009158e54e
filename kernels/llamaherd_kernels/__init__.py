"""CPU kernels for unmodified llama.cpp, as a plug-in into llama-cpp-python.

    import llamaherd_kernels

    llamaherd_kernels.enable()  # before the first model is loaded

From then on llama.cpp gives the weights whose types have a faster kernel here to the plug-in. Where anything
is not as expected, stock llama.cpp goes on, and the returned status says why.
"""

from __future__ import annotations

from .enabling import Status, enable, status

__all__ = ["Status", "__version__", "enable", "status"]

__version__ = "0.1.0"
