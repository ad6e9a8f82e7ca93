"""What flashinfer compiles for attention."""
