"""How often the verdict on a profiler's capture is right: simulated captures, faults put into real ones, real sets."""
