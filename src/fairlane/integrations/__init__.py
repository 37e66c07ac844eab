"""Integrations with other people's libraries, one module each. A module needs the extra of its name."""
