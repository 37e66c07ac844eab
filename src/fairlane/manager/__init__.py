"""The manager: whoever is elected leader runs the services that keep the store tidy and time moving."""
