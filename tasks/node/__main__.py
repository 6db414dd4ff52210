"""`python -m node`: the agent of one machine."""

from .agent import main

if __name__ == "__main__":
    main()
