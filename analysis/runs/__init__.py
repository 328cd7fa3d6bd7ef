"""Opening runs, whole or in part."""
