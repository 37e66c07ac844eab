"""How fast Fairlane is, beside the bare database in the same run: ``python -m benchmarks``."""
