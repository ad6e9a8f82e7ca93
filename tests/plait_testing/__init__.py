"""What tests and benchmarks share: models, servers, workers and references to compare with."""
