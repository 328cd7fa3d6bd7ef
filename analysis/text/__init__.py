"""Messages, units and phrases, in English and Chinese."""
