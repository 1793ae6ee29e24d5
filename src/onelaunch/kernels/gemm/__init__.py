"""Parts of portable Triton matrix products that several operations share: device functions and tile choices."""
