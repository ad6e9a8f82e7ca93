"""The compiled CPU kernels behind the families' ``cpu`` backends."""
