"""Pure functions from tables to tables, each with an invariant that is checked."""
