"""Raw tables to the Timeline: pure functions, each with an invariant that is checked."""
