"""The sides of the benchmark on PostgreSQL, one module for each queue; what each imports need not be installed."""
