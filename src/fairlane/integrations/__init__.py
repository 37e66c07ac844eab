"""Integrations with other libraries, one module each. A module requires the extra of the same name."""
