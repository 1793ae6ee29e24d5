"""Matrix products: device functions that kernels of several operations share."""
