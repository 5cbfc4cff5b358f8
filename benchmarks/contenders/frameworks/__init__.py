"""The same training job under each framework, with this library and in the framework's own ways."""
