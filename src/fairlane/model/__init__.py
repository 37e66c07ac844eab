"""The rules as pure values and functions: no I/O, no clock, no third party but the small libraries."""
