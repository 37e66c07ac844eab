"""The sides of the benchmark on Redis, one module for each queue; what each imports need not be installed."""
