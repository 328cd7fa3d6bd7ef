"""`python -m rankscope` is `rankscope`."""

from rankscope.profiler.main import main

if __name__ == "__main__":
    main()
