"""Names of Gluon, the same for every Triton release."""
