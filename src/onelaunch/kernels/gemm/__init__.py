"""Matrix products: device functions and choices of tiles that kernels of several operations share."""
